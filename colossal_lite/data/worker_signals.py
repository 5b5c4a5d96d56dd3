"""Shields the worker processes of a loader from signals that are meant for the run.

Torchrun and a terminal signal the whole process group of a rank, with the workers of its loader.  The last step of a
run would wait for the batch of a dead worker.  So each worker has a group of its own, and obeys SIGTERM alone, by which
torch ends a stuck worker.  A worker whose parent is gone ends by itself (torch's watchdog).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable


def begin_worker(then: Callable[[int], object] | None, worker: int) -> None:
    """Ignores the signals; the `worker_init_fn` of a torch DataLoader. `then`: the user's own, called after."""
    os.setpgid(0, 0)
    for name in ("SIGINT", "SIGHUP", "SIGUSR1"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    if then is not None:
        then(worker)
