"""The only file that copies tensors between devices and tiers.

Note: the first form moves what a step needs once: initial values, buffers, batches.  Chunks that travel between tiers
within a step will be moved from here too, by plan.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on `device`; itself if it is there already. From pinned memory the copy is asynchronous."""
    return tensor.to(device, non_blocking=tensor.is_pinned())


def to_host(tensor: Tensor) -> Tensor:
    """A copy in host memory, finished when this returns."""
    return tensor.detach().to("cpu", copy=True)


def buffers_to_device(module: nn.Module, device: torch.device) -> None:
    """Move every buffer of a module, in place."""
    for owner in module.modules():
        for name, buffer in owner.named_buffers(recurse=False):
            if buffer.device != device:
                owner._buffers[name] = to_device(buffer, device)
