"""Which weights, gradients and optimizer records rest on the device and which on the host, under a budget: a plan.

Note: why what stays, stays for good.
What may move is cut into *pieces*: of each chunk this rank's shard of the weights, its sum of the gradient, and its
optimizer record (states, and the master where that is apart).  A step uses them in phases: the weights in every forward
and every backward and, if they are their own master, in the update; gradients come in each backward and are read in the
update; records are read and written there.  Frozen weights are read in forwards and backwards, and written never.
Across the boundary between two phases the device keeps at most its capacity, and what it does not keep must come again,
whatever the policy: that is `link_bound`, which Belady's rule (farthest next use first; 10.1147/sj.52.0078) cannot
beat.  A forward and a backward are a palindrome, and an update goes the way of the next forward, so every piece is used
once in a phase and each boundary costs the same whoever is kept: keeping the same pieces for good meets the bound of
each phase, and leaves nothing to decide in a step.  With several micro-batches a sum that stays takes room in the
forwards, where nobody uses it: there the plan is up to a fifth above the bound.  Which pieces: those used most often in
a step, by bytes over the link per byte kept, dirty ones counted both ways.

A user who knows better says what share of each kind rests on the host (`divide`): the pieces are then spread evenly
over the chunks, so that copies come at equal distances in a step; every choice of as many bytes moves as much.

What does not move is counted first: weights that are whole, slots, the gathered windows of zero/unshard.py, frozen
parameters, and the activations, as the first micro-batches have shown them.  Cost: none in a step.
Source: arXiv 2108.05818 (chunks, eviction by next use from a traced step), 2302.02599 (placement from chunk sizes),
2101.06840 (states on the host).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain, combinations, groupby

from colossal_lite.memory.pack import Interval, most_held, pack_intervals, visits


class Kind(StrEnum):
    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    FROZEN = "frozen"
    """Weights that do not train."""


# One is updated, one comes, one goes.
VISITORS = 3
# One is used up, one comes.
COMING = 2
# A sum of gradients is copied out of one while the next one is put into the other.
OUTGOING = 2
WIDTHS = {
    Kind.WEIGHTS: VISITORS,
    Kind.GRADIENTS: COMING,
    Kind.OPTIMIZER: VISITORS,
}  # what is frozen does not visit


def most_at_once(chunks: Collection[int], width: int) -> int:
    """Of these chunks, how many an update has to do with at once, at the most, if that is `width` in a row: some that
    come, the one that is updated, some that go."""
    return max((sum(c + n in chunks for n in range(width)) for c in chunks), default=0)


def place_bytes(kind: Kind, sizes: Mapping[int, int]) -> int:
    """On the device, for what of some chunks is of a kind and on the host: chunk -> bytes."""
    return pack_intervals(_visits(kind, sizes))[1] + _outbox_bytes(kind, sizes)


def least_place_bytes(kind: Kind, sizes: Mapping[int, int]) -> int:
    """As `place_bytes` if places fit together without a gap, which they do as a rule."""
    return most_held(_visits(kind, sizes)) + _outbox_bytes(kind, sizes)


def _visits(kind: Kind, sizes: Mapping[int, int]) -> tuple[Interval, ...]:
    return visits(sizes, WIDTHS[kind]) if kind in WIDTHS else ()


def _outbox_bytes(kind: Kind, sizes: Mapping[int, int]) -> int:
    return min(OUTGOING, len(sizes)) * max(sizes.values()) if kind is Kind.GRADIENTS and sizes else 0


@dataclass(frozen=True, order=True)
class Name:
    """What of which chunk."""

    chunk: int
    kind: Kind

    def __str__(self) -> str:
        return f"{self.kind} of {self.chunk}"


@dataclass(frozen=True)
class Piece:
    """What may rest on either tier: its bytes there, and how often they go up and down in a step if it is the host."""

    name: Name
    bytes: int
    ups: int
    downs: int

    @property
    def link_bytes(self) -> int:
        """Over the link in a step, both ways."""
        return (self.ups + self.downs) * self.bytes


@dataclass(frozen=True)
class Placement:
    """Where every piece rests, and the bytes that follow. `fixed`: device bytes that are no pieces, by kind."""

    pieces: tuple[Piece, ...]
    on_host: frozenset[Name]
    fixed: tuple[tuple[str, int], ...]
    budget: int | None = None

    @property
    def rows(self) -> tuple[tuple[str, str, int], ...]:
        """(kind, tier, bytes) of all that is not zero."""
        found: dict[tuple[str, str], int] = {(kind, "device"): held for kind, held in self.fixed}
        for piece in self.pieces:
            where = str(piece.name.kind), "host" if piece.name in self.on_host else "device"
            found[where] = found.get(where, 0) + piece.bytes
        found["visiting", "device"] = found.get(("visiting", "device"), 0) + self.visiting_bytes
        return tuple((kind, tier, held) for (kind, tier), held in found.items() if held)

    @property
    def visiting_bytes(self) -> int:
        """Places on the device in which what rests on the host is updated, and through which gradients leave."""
        return visiting_bytes(self.pieces, self.on_host)

    @property
    def device_bytes(self) -> int:
        return sum(held for _, tier, held in self.rows if tier == "device")

    @property
    def host_bytes(self) -> int:
        return sum(held for _, tier, held in self.rows if tier == "host")

    @property
    def up_bytes(self) -> int:
        """From host to device in a step."""
        return sum(p.ups * p.bytes for p in self.pieces if p.name in self.on_host)

    @property
    def down_bytes(self) -> int:
        return sum(p.downs * p.bytes for p in self.pieces if p.name in self.on_host)

    def __str__(self) -> str:
        lines = [f"{kind:<12} {tier:<6} {held:>14,}" for kind, tier, held in self.rows]
        of = "" if self.budget is None else f" of {self.budget:,}"
        lines.append(f"{'device':<19} {self.device_bytes:>14,}{of}")
        for kind in Kind:
            if kind is Kind.FROZEN and not any(piece.name.kind is kind for piece in self.pieces):
                continue
            chunks = sorted(name.chunk for name in self.on_host if name.kind is kind)
            lines.append(f"{kind} on the host: {_spans(chunks) or 'none'}")
        lines.append(f"link in a step: {self.up_bytes:,} up, {self.down_bytes:,} down")
        return "\n".join(lines)


def visiting_bytes(
    pieces: Iterable[Piece],
    on_host: frozenset[Name],
    of: Callable[[Kind, Mapping[int, int]], int] = place_bytes,
) -> int:
    """What the places of pieces on the host take on the device."""
    sizes: dict[Kind, dict[int, int]] = {kind: {} for kind in Kind}
    for piece in pieces:
        if piece.name in on_host:
            sizes[piece.name.kind][piece.name.chunk] = piece.bytes
    return sum(of(kind, some) for kind, some in sizes.items())


def place(pieces: Sequence[Piece], fixed: Mapping[str, int], budget: int | None) -> Placement:
    """The placement with few bytes over the link that the device's `budget` allows; None: no limit.

    If nothing fits, the placement that needs least is returned: `device_bytes` says how much."""

    def at(on_host: Iterable[Name]) -> Placement:
        return Placement(tuple(pieces), frozenset(on_host), tuple(fixed.items()), budget)

    if budget is None or at(()).device_bytes <= budget:
        return at(())
    on_host = frozenset(name for kind in Kind for name in _least(pieces, kind))
    held = at(on_host).device_bytes
    visiting = visiting_bytes(pieces, on_host, least_place_bytes)
    tried = [on_host]
    for group in _by_worth(pieces):
        # All of a kind or the rest of it first: with the last of them go its places.
        for some in (group, *([piece] for piece in group)):
            names = frozenset(piece.name for piece in some) & on_host
            less = visiting_bytes(pieces, on_host - names, least_place_bytes) if names else visiting
            after = held + sum(piece.bytes for piece in some if piece.name in names) + less - visiting
            if names and after <= budget:
                on_host, held, visiting = on_host - names, after, less
                tried.append(on_host)
    while len(tried) > 1 and at(tried[-1]).device_bytes > budget:  # where places have gaps
        tried.pop()
    return at(tried[-1])


def divide(
    pieces: Sequence[Piece],
    fixed: Mapping[str, int],
    fractions: Mapping[str, float],
    budget: int | None = None,
) -> Placement:
    """The placement with a share `fractions[kind]` of the bytes of each kind on the host (of frozen weights that of
    weights), to the nearest piece: after every chunk as near to the share as whole pieces allow, at most half of the
    largest piece off."""
    on_host = set[Name]()
    for kind in Kind:
        seen = away = 0
        for piece in sorted((p for p in pieces if p.name.kind is kind), key=lambda p: p.name):
            seen += piece.bytes
            if away + piece.bytes / 2 <= fractions[Kind.WEIGHTS if kind is Kind.FROZEN else kind] * seen:
                away += piece.bytes
                on_host.add(piece.name)
    return Placement(tuple(pieces), frozenset(on_host), tuple(fixed.items()), budget)


def _least(pieces: Sequence[Piece], kind: Kind) -> list[Name]:
    """The pieces of a kind on the host where least is on the device, of sets of its smallest pieces: a few large ones
    may take less than the places for them."""
    mine = sorted((piece for piece in pieces if piece.name.kind is kind), key=lambda piece: piece.bytes)

    def on_device(count: int) -> int:
        """Bytes if the `count` smallest are on the host."""
        away = {piece.name.chunk: piece.bytes for piece in mine[:count]}
        return least_place_bytes(kind, away) + sum(piece.bytes for piece in mine[count:])

    return [piece.name for piece in mine[: min(range(len(mine) + 1), key=on_device)]]


def _by_worth(pieces: Sequence[Piece]) -> Iterable[list[Piece]]:
    """Pieces that save as much per byte and are of one kind, those that save most first; larger ones first."""

    def worth(piece: Piece) -> tuple[int, str]:
        return -(piece.ups + piece.downs), piece.name.kind

    ordered = sorted(pieces, key=lambda piece: (*worth(piece), -piece.bytes, piece.name))
    return [list(group) for _, group in groupby(ordered, key=worth)]


def _spans(chunks: Sequence[int]) -> str:
    """`0-3, 7` of sorted numbers."""
    runs: list[list[int]] = []
    for chunk in chunks:
        if runs and chunk == runs[-1][-1] + 1:
            runs[-1].append(chunk)
        else:
            runs.append([chunk])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


# ---- the least that any policy moves ----


@dataclass(frozen=True)
class Use:
    """A piece in one phase of a step: whether its bytes are needed when the phase first touches it, and whether it
    leaves the phase with new ones that a later phase needs."""

    bytes: int
    reads: bool
    writes: bool


Phase = Mapping[Name, Use]


def link_bound(phases: Sequence[Phase], capacity: int) -> tuple[int, int]:
    """Bytes (up, down) that a step of these phases, repeated for ever, moves at the least where a device keeps
    `capacity` bytes between phases, whoever decides what is kept.

    Up: what a phase reads was kept at its beginning, at most the capacity, or comes.  Down: what a phase writes goes,
    unless it is kept at the end of every phase until it is written anew or needed no more.  So take any set of ends: of
    what is alive at one of them at most the capacity stays for each end, and all the rest may.  Cost: 2**phases."""
    up = sum(max(0, sum(use.bytes for use in phase.values() if use.reads) - capacity) for phase in phases)
    alive: dict[frozenset[int], int] = {}  # the ends at which something new must be kept -> bytes
    for number, phase in enumerate(phases):
        for name, use in phase.items():
            if use.writes:
                ends = _ends(phases, number, name)
                alive[ends] = alive.get(ends, 0) + use.bytes
    sets = chain.from_iterable(combinations(range(len(phases)), n) for n in range(len(phases) + 1))
    stays = min(
        capacity * len(some) + sum(held for ends, held in alive.items() if ends.isdisjoint(some))
        for some in sets
    )
    return up, sum(alive.values()) - stays


def _ends(phases: Sequence[Phase], number: int, name: Name) -> frozenset[int]:
    """The phases at whose ends the bytes that phase `number` writes are still needed, until they are written anew."""
    last, count = number, len(phases)
    for later in range(number + 1, number + count + 1):
        use = phases[later % count].get(name)
        if use is not None and use.reads:
            last = later
        if use is not None and use.writes:
            # A sum that is added to is needed until then, though nobody brings it.
            last = later if later < number + count else last
            break
    return frozenset(end % count for end in range(number, last))
