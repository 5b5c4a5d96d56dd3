"""Shields the worker processes of a loader from signals that are meant for the run.

Torchrun and a terminal signal the process group of a rank, workers of its loader too.  A worker that dies of that takes
away the batch that the last step waits for.  So each worker has a group of its own, and obeys SIGTERM alone: torch ends
a stuck worker so.  A worker whose parent is gone ends by itself (torch's watchdog).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable


def begin_worker(then: Callable[[int], object] | None, worker: int) -> None:
    """The `worker_init_fn` of a torch DataLoader, before `then`, the user's own."""
    os.setpgid(0, 0)
    for name in ("SIGINT", "SIGHUP", "SIGUSR1"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    if then is not None:
        then(worker)
