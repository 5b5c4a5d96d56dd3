"""Has torch take kernels that give the same bits twice, and names what has none (`deterministic=True`).

Note: torch's switch is one for the process. It is on from `initialize` until the engine is closed, and then as it was.
With it, torch's attention adds its gradients in one order, cuDNN's is not taken, and an operation that adds by atomics
raises.  The kernels of this package have no atomics.  cuBLAS needs a variable, which `launch` sets on CUDA.
NCCL's order of sums is its own: `zero.sum_order="ordered"` adds in rank order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

FILLS: Any = torch.utils.deterministic
MARK = " does not have a deterministic implementation"


def enforced() -> Callable[[], None]:
    """Switch torch to deterministic kernels. The result sets it back."""
    was_on, only_warned = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    filled = FILLS.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    FILLS.fill_uninitialized_memory = False  # a launch for each buffer, and no bit of a result

    def set_back() -> None:
        torch.use_deterministic_algorithms(was_on, warn_only=only_warned)
        FILLS.fill_uninitialized_memory = filled

    return set_back


@contextmanager
def refused_by_name() -> Iterator[None]:
    """Raises ValueError in place of torch's RuntimeError for an operation without a deterministic kernel."""
    try:
        yield
    except RuntimeError as error:
        operation, mark, _ = str(error).partition(MARK)
        if not mark:
            raise
        raise ValueError(
            f"deterministic=True: {operation.split()[-1]} has no kernel here that gives the same bits twice; "
            f"legal: another operation in its place, or deterministic=False"
        ) from error
