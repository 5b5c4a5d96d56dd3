"""Shifts labels that equal their inputs, as Hugging Face's collators give them, to next tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from colossal_lite.data.batch_checks import IGNORED


def shift_labels(batch: Any) -> Any:
    """The batch, a mapping or (inputs, labels), with labels[:, t] = labels[:, t + 1] and the last ignored.

    So the loss is that of transformers, which shifts within the model. Raises ValueError for labels that are not
    [samples, tokens]."""
    if isinstance(batch, Mapping) and "labels" in batch:
        return {**batch, "labels": _shifted(batch["labels"])}
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], _shifted(batch[1])
    return batch  # `check_batch` says what it lacks


def _shifted(labels: Any) -> Tensor:
    if not isinstance(labels, Tensor) or labels.dim() != 2:
        what = f"shape {tuple(labels.shape)}" if isinstance(labels, Tensor) else type(labels).__name__
        raise ValueError(f"labels: {what} with labels='unshifted'; legal: a tensor [samples, tokens]")
    return torch.nn.functional.pad(labels[:, 1:], (0, min(1, labels.shape[1])), value=IGNORED)
