"""Computes fingerprints of tensors, so that ranks can tell whether they hold the same.

Note: a fingerprint is a number below 2**24, as a 0-d int64 tensor.  It is on the device of the tensors, so computing it
does not wait for the device.  Two different tensors have the same one by chance, once in 16 million.  It reads bytes:
0.0 and -0.0 differ.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

BITS = 24
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_STEP, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # of splitmix64


def fingerprint(tensors: Mapping[str, Tensor], salt: str = "") -> Tensor:
    """The fingerprint of tensors with their names, dtypes and shapes. They are on one device; there is at least one."""
    marks = [_of_one(f"{salt}/{name}", tensor) for name, tensor in tensors.items()]
    return torch.stack(marks).sum() & ((1 << BITS) - 1)


def _of_one(name: str, tensor: Tensor) -> Tensor:
    """A 0-d int64 from the elements of `tensor` and their places."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    form = zlib.crc32(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    words = real.contiguous().view(-1).view(_WORDS[real.element_size()]).to(torch.int64)
    places = torch.arange(form, form + words.numel(), device=words.device)
    mixed = (words + places * _STEP) * _FIRST
    mixed = (mixed ^ (mixed >> 29)) * _SECOND
    return (mixed ^ (mixed >> 32)).sum() + form
