"""Decides which chunks are updated on the host, where their state rests, and which on the device.

Note: the interleaved optimizer (arXiv 2410.21316).
State off the device can be updated where it rests, or be streamed to the device and back.  With both at once the host,
both directions of the link and the device are busy together.  The chunks of one side are spread evenly over all.  A
chunk's side depends on its number in the whole model alone, so all ranks that share it choose alike.  The computation
of an update and its order are the same on both sides.  On an emulated device so are the bits.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from fractions import Fraction

LOOKAHEAD = 3
"""Chunks before its turn that a copy for an update is begun. So where both sides are used and no budget counts."""

ALL = 2**62
"""Chunks in a row: more than there are."""


@dataclass(frozen=True)
class UpdateMix:
    """The side of each chunk's update, and how early what it needs is copied.

    Records of chunks that are updated on the device are fetched `ahead` chunks before their turn.  Updates on the host,
    and the gradients and weights that come down for them, are begun `ahead_down` chunks before.
    """

    on_host: frozenset[int] = frozenset()
    ahead: int = 1
    ahead_down: int = 1
    early: bool = False
    """Whether gradients for updates on the host are copied in backward, right after their sums, to slots of their
    own."""

    @property
    def record_width(self) -> int:
        """Chunks in a row whose records may be on the device at once: fetched, updated, written back."""
        return self.ahead + 2

    @property
    def gradient_width(self) -> int:
        """Chunks in a row whose gradients may be in slots on the host at once."""
        return ALL if self.early else self.ahead_down + 1

    @property
    def new_weight_width(self) -> int:
        """As `gradient_width`, of weights that are written there and go up."""
        return self.ahead_down + 1

    @property
    def weight_width(self) -> int:
        """As `gradient_width`, of weights that come down, are updated and go up again."""
        return self.ahead_down + 2


ALL_ON_DEVICE = UpdateMix()


def mix_of(
    on_host: Fraction | Collection[int], ids: Collection[int], lookahead: int = LOOKAHEAD
) -> UpdateMix:
    """The mix that updates a share of the chunks on the host, or those with these numbers. `ids`: a chunk's number in
    the whole model, by its place on this rank. `lookahead` as in `mix_with`."""
    places = [
        place
        for place, number in enumerate(ids)
        if (is_on_host(number, on_host) if isinstance(on_host, Fraction) else number in on_host)
    ]
    return mix_with(places, len(ids), lookahead)


def mix_with(on_host: Collection[int], count: int, lookahead: int = LOOKAHEAD) -> UpdateMix:
    """The mix that updates these of `count` chunks on the host, so far ahead where both sides are used."""
    ahead = 1 if len(on_host) in (0, count) else lookahead
    return UpdateMix(frozenset(on_host), ahead, ahead)


def is_on_host(number: int, host_share: Fraction) -> bool:
    """Whether the chunk with this number is updated on the host: of the first n chunks, floor(n * share) are."""
    return (number + 1) * host_share // 1 > number * host_share // 1
