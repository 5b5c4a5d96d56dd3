"""Replaces the masks of functional dropouts by masks from counters, while a forward pass runs.

Note: functional dropout.
`F.dropout`, its variants, and `dropout_p` of attention draw from torch's own generator.  Their masks would depend on
the mesh.  A TorchFunctionMode intercepts these calls, from any caller, and draws from the streams of random.py instead.
A stream is named by the module whose forward makes the call, and by the call's number in it.  The module is found on
the call stack when a mask is drawn.  Hooks on every module would slow every call.

Attention with dropout is computed unfused, with its matrix of weights [.., queries, keys].  No fused kernel of torch
takes a mask.  The mode does not see a forward in compiled blocks: `FirstStep` (engine/) refuses numbers drawn
there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._dynamo import eval_frame
from torch.overrides import TorchFunctionMode

from colossal_lite.kernels import TORCH, dropped
from colossal_lite.numerics.torch_modes import seen_within

OURS = ("torch.nn", "colossal_lite")
"""Packages whose modules draw no functional dropout, but for those of DRAWING."""
DRAWING = (
    nn.MultiheadAttention, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout,
)  # fmt: skip
_CALL = nn.Module._call_impl.__code__
_ALONE = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT)
"""Of a mode's code, where uncompiled code calls it. Else torch.compile compiles it, and its guards take the device of a
tensor for its shape."""
_SELU_LIMIT = (
    -1.7580993408473766
)  # -scale * alpha of selu: the value that alpha dropout gives a dropped element


def may_draw(module: nn.Module) -> bool:
    """Whether a functional dropout may be in a model: in code that is neither ours nor torch's."""
    return any(
        isinstance(m, DRAWING) or not f"{type(m).__module__}.".startswith(tuple(f"{p}." for p in OURS))
        for m in module.modules()
    )


class FunctionalDropout(TorchFunctionMode):
    """Draws the masks of functional dropouts, by the rows of the module that calls them."""

    def __init__(self, rows: Mapping[nn.Module, Callable[[], Any]], again: nn.Module | None = None) -> None:
        """`rows`: for each module of a model, the function that returns the counters of its next call. `again`: the
        module whose forward runs again in backward, without a call of the module."""
        super().__init__()
        self._rows, self._again = rows, again

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        counted = _COUNTED.get(func)
        if counted is None:
            return func(*args, **(kwargs or {}))
        return counted(self, *args, **(kwargs or {}))

    eval_frame.set_code_exec_strategy(__torch_function__.__code__, _ALONE)

    def drop(self, x: Tensor, p: float) -> Tensor:
        """x with elements dropped, the others divided by 1 - p."""
        return dropped(TORCH.dropout, x, p, self._caller()())

    def _caller(self) -> Callable[[], Any]:
        """The rows of the innermost module that is being called. Raises ValueError outside all of them."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code is _CALL and (rows := self._rows.get(frame.f_locals["self"])):
                return rows
            frame = frame.f_back
        if self._again is not None:
            return self._rows[self._again]
        raise ValueError(
            "dropout: no module of the model calls it, so its mask has no name. Legal: a call in the forward of a "
            "module that is called, and activation_checkpoint instead of a checkpoint of the model's own"
        )


def _dropout(
    mode: FunctionalDropout, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    if not training or p in (0.0, 1.0):
        return F.dropout(input, p, training, inplace)
    return input.mul_(mode.drop(torch.ones_like(input), p)) if inplace else mode.drop(input, p)


def _plain_dropout(mode: FunctionalDropout, input: Tensor, p: float, train: bool) -> Tensor:
    return _dropout(mode, input, p, train)


def _channels(dims: int, plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Dropout of whole channels of an x [B, C, ...] of `dims` dimensions."""

    def drop(
        mode: FunctionalDropout, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if not training or p in (0.0, 1.0):
            return plain(input, p, training, inplace)
        if input.dim() != dims:
            raise ValueError(
                f"{plain.__name__}: x has the shape {tuple(input.shape)}; legal: {dims} dimensions, samples first"
            )
        kept = mode.drop(input.new_ones(input.shape[:2]), p).view(*input.shape[:2], *(1,) * (dims - 2))
        return input.mul_(kept) if inplace else input * kept

    return drop


def _alpha(plain: Callable[..., Tensor], of_channels: bool) -> Callable[..., Tensor]:
    """Alpha dropout (1706.02515): dropped elements get selu's limit; mean and variance are preserved."""

    def drop(
        mode: FunctionalDropout, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
    ) -> Tensor:
        if not training or p in (0.0, 1.0):
            return plain(input, p, training, inplace)
        if of_channels:
            kept = mode.drop(input.new_ones(input.shape[:2]), p) != 0
            kept = kept.view(*input.shape[:2], *(1,) * (input.dim() - 2))
        else:
            kept = mode.drop(torch.ones_like(input), p) != 0
        scale = ((1.0 - p) * (1.0 + p * _SELU_LIMIT**2)) ** -0.5
        y = torch.where(kept, input, _SELU_LIMIT) * scale - scale * p * _SELU_LIMIT
        return input.copy_(y) if inplace else y

    return drop


def _attention(
    mode: FunctionalDropout, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """out [..., queries, K] of query [..., queries, K] over key and value [..., keys, K], unfused if it drops."""
    if dropout_p == 0.0:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], dim=-3) for x in (key, value))
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        is_bool = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -torch.inf) if is_bool else scores + attn_mask
    return mode.drop(torch._safe_softmax(scores, -1), dropout_p) @ value


_COUNTED: dict[Any, Callable[..., Any]] = {
    F.dropout: _dropout,
    torch.dropout: _plain_dropout,
    F.dropout1d: _channels(3, F.dropout1d),
    F.dropout2d: _channels(4, F.dropout2d),
    F.dropout3d: _channels(5, F.dropout3d),
    F.alpha_dropout: _alpha(F.alpha_dropout, of_channels=False),
    F.feature_alpha_dropout: _alpha(F.feature_alpha_dropout, of_channels=True),
    F.scaled_dot_product_attention: _attention,
    F.multi_head_attention_forward: seen_within(F.multi_head_attention_forward),
    # Random numbers that a checkpoint of the model's own draws again in backward are refused.
    Tensor.backward: seen_within(Tensor.backward),
    torch.autograd.backward: seen_within(torch.autograd.backward),
}
