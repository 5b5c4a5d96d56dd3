"""Leaves the modes of a model's forward while the framework itself computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes, _len_torch_dispatch_stack


@contextmanager
def without_modes() -> Iterator[None]:
    """Within, no mode sees an operation. Selective recomputation would take ours for the block's. A memory meter would
    count state as activations. Functional dropout would look at each of them."""
    with torch._C.DisableTorchFunction():
        if not _len_torch_dispatch_stack():
            yield
            return
        with _disable_current_modes():
            yield
