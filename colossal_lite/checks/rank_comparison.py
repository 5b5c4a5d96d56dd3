"""Compares what must be equal between ranks: batches of a replica, reads of a dataset, buffers of a forward.

Note: how ranks compare.
Each rank adds a fingerprint to a sum over the world that a step makes anyway.  The first rank of a group adds its own
once for each of the others, and these subtract theirs.  So the sum is zero if all are equal, whatever their value.  It
is read before anything is updated.  So is a batch that one rank alone has left behind, after an error.  Cost: 8 bytes
in that sum, and a pass over the batch if a replica has several ranks.  A buffer costs a pass over it once, and again
each time that it is written to.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from math import isclose, isfinite
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from colossal_lite.config.config import Config
from colossal_lite.data.batch import Batch
from colossal_lite.data.batch_read import BatchRead, read_of
from colossal_lite.data.fingerprint import BITS, fingerprint
from colossal_lite.distributed.mesh import Mesh
from colossal_lite.memory.transfers import sent, to_device
from colossal_lite.numerics.precision import DTYPES
from colossal_lite.observe.printed_lines import warn
from colossal_lite.sharding.mesh_layout import AXES

REPLICA = ("pipeline", "sequence", "tensor")
STAGE = ("data", "sequence", "tensor")
"""Ranks along these axes have the same modules, or shards of them."""
SAME_WEIGHT = 1e-5
"""How far weights of labels may be apart on two ranks, as their factors may be float32."""
SHOWN = 4
"""Elements of a tensor that a message shows."""


def splits(config: Config) -> tuple[str, ...]:
    """The settings that run a module several times a step on a rank, on parts of its batch."""
    pipeline = config.parallel.pipeline
    found = {
        f"gradient_accumulation={config.gradient_accumulation}": config.gradient_accumulation > 1,
        f"pipeline.micro_batches={pipeline.micro_batches}": pipeline.is_staged
        and pipeline.micro_batches != 1,
    }
    return tuple(name for name, is_so in found.items() if is_so)


def recomputes(config: Config) -> tuple[str, ...]:
    """The setting that runs blocks twice on the same part."""
    mode = config.activation_checkpoint
    return () if mode == "none" else (f"activation_checkpoint={mode!r}",)


def changes_apart(config: Config) -> tuple[str, ...]:
    """The settings under which a forward may change no buffer. A change by the second forward of a block is found in
    backward (transforms/second_forward.py). That is too late where backward updates weights."""
    return (*splits(config), *(recomputes(config) if config.optimizer.update_when == "backward" else ()))


class RanksDifferError(ValueError):
    """Ranks have different models, batches or buffers where these must be equal. Raised on every rank. Nothing was
    updated."""


@dataclass(frozen=True)
class _Seen:
    """A tensor that was compared, for the message."""

    shape: tuple[int, ...]
    first: Tensor
    mark: Tensor | int

    @classmethod
    def of(cls, name: str, x: Tensor, salt: str) -> _Seen:
        """On the host the mark is a number: a tensor there would count as memory of the step."""
        mark = fingerprint({name: x}, salt)
        return cls(tuple(x.shape), x.reshape(-1)[:SHOWN], int(mark) if x.device.type == "cpu" else mark)

    def plain(self) -> dict[str, Any]:
        return dict(shape=[*self.shape], first=self.first.tolist(), mark=int(self.mark))


@dataclass(frozen=True)
class _Buffer:
    """A buffer and its version at its last fingerprint."""

    tensor: Tensor | None
    version: int
    mark: Tensor


@dataclass
class RankComparison:
    """Collects the fingerprints of a step on this rank; `check` raises on every rank where they differ."""

    mesh: Mesh
    model: nn.Module
    device: torch.device
    cuts: Sequence[str]
    """The settings by which one rank runs the model several times a step."""
    _batches: list[dict[str, _Seen]] = field(default_factory=list)
    _reads: list[BatchRead] = field(default_factory=list)
    _weights: list[Tensor] = field(default_factory=list)
    _means: list[Tensor] = field(default_factory=list)
    _has_warned: bool = False
    """Whether ranks had means over other numbers of labels."""
    _lengths: list[tuple[int, bool]] = field(default_factory=list)
    """Tokens of the sequences of each forward, 0: none; whether its numbers follow from padding at the left."""
    _rate: float | None = None
    loaded: int = 0
    """The mark of the last whole state that was loaded by hand."""
    _changed: set[str] = field(default_factory=set)
    _looked_at: dict[str, _Buffer] = field(default_factory=dict)
    _begun: Any = None
    """The batch of a training forward that no gradient has followed."""
    _left: int = 0
    """Batches that this rank has begun and left behind."""

    def __post_init__(self) -> None:
        self._buffers = {
            f"{path}.{name}".removeprefix("."): (module, name)
            for path, module in self.model.named_modules()
            for name in module._buffers
        }
        self._parameters = dict(self.model.named_parameters())

    # ---- the compared values ----

    def begin(self, batch: Any) -> None:
        """Before a training forward on `batch`. Another one than that of a forward without a gradient leaves that
        behind; the same tensors are tried again."""
        if self.mesh.world_size > 1:
            if self._begun is not None and not _is_same(self._begun, batch):
                self._left += 1
            self._begun = batch

    def delivered(self) -> None:
        """The gradient of the batch that was begun is there."""
        self._begun = None

    def drop(self, *, gradients: bool) -> None:
        """The step is dropped. `gradients`: with those of batches before."""
        self._left += gradients and self.mesh.world_size > 1

    def restart(self) -> None:
        """All ranks go on from one state, whatever they have left behind."""
        self._begun, self._left, self.loaded = None, 0, 0

    def add_batch(self, tensors: Mapping[str, Tensor]) -> None:
        """Add the tensors of a batch, those of the whole replica. Costs nothing if a replica is one rank."""
        if self.mesh.size(*REPLICA) == 1:
            return
        salt = f"{self.mesh.coord('data')}/{len(self._batches)}"
        self._batches.append(
            {name: _Seen.of(name, x, salt) for name, x in tensors.items() if isinstance(x, Tensor)}
        )

    def add_read(self, batch: Any) -> None:
        """Add what this rank has read of a stream for a global batch, if its `batch` carries that."""
        read = read_of(batch)
        if read is not None and self._reads[-1:] != [read]:  # parts of one batch, in a loop of the user's own
            self._reads.append(read)

    def add_weight(self, counts: Tensor | None) -> None:
        """Add what this rank's loss of a micro-batch should weigh by, where all ranks' losses weigh alike."""
        if counts is not None and self.mesh.size("data") > 1:
            self._weights.append(counts)

    def add_means(self, divisors: Tensor | None) -> None:
        """Add the divisors of the means in this rank's loss (checks/loss_means.py), until ranks have differed once."""
        if divisors is not None and not self._has_warned:
            self._means.append(divisors)

    def add_length(self, tokens: int, *, at_left: bool) -> None:
        """Add the length of the sequences of a forward, where there are several data ranks. `at_left`: its numbers
        follow from padding at the left."""
        self._lengths.append((tokens, at_left))

    def add_rate(self, factor: float) -> None:
        """Add the factor on the learning rates that the user's code gives for this step."""
        self._rate = factor

    def add_loaded(self, state: Mapping[str, Tensor], step: int) -> None:
        """Add a whole state that this rank has loaded after so many steps. It is compared until the next load."""
        if self.mesh.world_size > 1:
            marks = (int(fingerprint({name: state[name]}, f"{step}")) for name in sorted(state))
            self.loaded = 1 + crc32(repr([*marks]).encode()) % (1 << BITS)

    @contextmanager
    def forward(self, batch: Batch) -> Iterator[None]:
        """Context of a forward: notes the buffers that it changes. Raises ValueError if it changes `batch`, and if it
        fails at a buffer of another dtype than the weights. An error at an argument of another one gets a note."""
        for name in self._buffers:
            self._look_at(name)
        try:
            with batch.unchanged():
                yield
        except RuntimeError as error:
            self._explain_dtypes(error, batch)
            raise
        for name in self._buffers:
            before = self._looked_at[name]
            if self._look_at(name) is not before and int(self._looked_at[name].mark) != int(before.mark):
                self._changed.add(name)

    @property
    def changed_buffer(self) -> str:
        """A buffer that a forward of this step has changed, or ""."""
        return min(self._changed, default="")

    def _explain_dtypes(self, error: RuntimeError, batch: Batch) -> None:
        """Raises ValueError for what torch says of two dtypes, if a buffer has another one than the weights. An
        argument that has is noted. None is cast: a model that casts its own would compute with other values."""
        said, weights = str(error).partition("\n")[0], {p.dtype for p in self.model.parameters()}
        if not any(words in said for words in ("dtype", "scalar type", "bias type", "weight type")):
            return
        theirs = ", ".join(sorted(map(str, weights)))
        cast = f"model.to({theirs}) before initialize, " if len(weights) == 1 else ""
        for name in self._buffers:
            buffer = self._buffer(name)
            if buffer.is_floating_point() and buffer.dtype not in weights:
                raise ValueError(
                    f"model: {said}; its buffer {name} is {buffer.dtype}, its weights are {theirs}. Legal: "
                    f"{cast}.to(x.dtype) where the forward reads it, or precision='fp32'"
                ) from error
        for name, value in batch.tensors.items():
            is_number = isinstance(value, Tensor) and value.is_floating_point() and name != "labels"
            if is_number and value.dtype not in weights:
                other = next((f", or precision={p!r}" for p, d in DTYPES.items() if d == value.dtype), "")
                error.add_note(
                    f"batch: {name} is {value.dtype}, and the model's weights are {theirs}. Legal: .to() that dtype in "
                    f"the dataset, or first in the forward{other}"
                )

    def _look_at(self, name: str) -> _Buffer:
        """The fingerprint of a buffer; the last one if the buffer was not written to since."""
        module, key = self._buffers[name]
        now, last = module._buffers[key], self._looked_at.get(name)
        version = 0 if now is None else now._version
        if last is None or last.tensor is not now or last.version != version:
            self._looked_at[name] = last = _Buffer(now, version, fingerprint({name: self._buffer(name)}))
        return last

    def clear(self) -> None:
        """Forget the batches and buffers of a step."""
        self._batches.clear()
        self._reads.clear()
        self._weights.clear()
        self._means.clear()
        self._lengths.clear()
        self._rate = None
        self._changed.clear()

    # ---- the sum over the ranks ----

    def term(self) -> Tensor:
        """This rank's terms of three sums over the world, [3] in float64. The first is zero if all values are equal,
        the second if all lengths of sequences are. The third counts forwards whose numbers follow from padding at the
        left."""
        terms = torch.zeros(3, dtype=torch.float64, device=self.device)
        total = terms[:1]
        marks = [seen.mark for batch in self._batches for seen in batch.values()]
        if marks:
            total += sum(marks) * self._factor(*REPLICA)
        if self._reads:
            total += self._read_term()
        if self._weights:
            counts = {f"{number}": each for number, each in enumerate(self._weights)}
            total += fingerprint(counts) * self._factor(*AXES)
        if self._means:
            total += self._means_term()
        if self._rate is not None:
            total += crc32(struct.pack("d", self._rate)) * self._factor(*AXES)
        total += (self._left + self.loaded) * self._factor(*AXES)
        if factor := self._factor(*STAGE):
            total += crc32(bytes(p.requires_grad for p in self._parameters.values())) * factor
        if self._changed:
            total += 1 if self.cuts else self._buffer_mark() * self._factor(*STAGE)
        if self._lengths:
            lengths_mark = sum(crc32(f"{i}/{tokens}".encode()) for i, (tokens, _) in enumerate(self._lengths))
            lengths = lengths_mark * self._factor(*AXES), sum(at_left for _, at_left in self._lengths)
            terms[1:] += sent(torch.tensor(lengths, dtype=torch.float64), self.device)
        return terms

    def check(self, apart: float, lengths: float, at_left: float) -> float:
        """Raise `RanksDifferError` if a batch, a read or a buffer differs, or `lengths` with some padded `at_left`. The
        arguments are sums of the terms. Returns `apart` without reads that only some ranks know of, and without means
        over other numbers of labels. These make one warning. Clears. Collective if something differs."""
        told = self.mesh.world.gather_json(self._told()) if apart or (lengths and at_left) else ()
        self.clear()
        if (
            fault := _left_fault(told)
            or _loaded_fault(told)
            or _weight_fault(told)
            or _length_fault(told)
            or _rate_fault(told)
            or _read_fault(told)
            or _batch_fault(told)
            or _buffer_fault(told, self.cuts)
            or _frozen_fault(told)
        ):
            raise RanksDifferError(fault)
        if words := _means_apart(told):
            self._has_warned = True
            if self.mesh.coord(*AXES) == 0:
                warn(words)
        return apart - float(sum(row["read_term"] + row["means_term"] for row in told))

    @contextmanager
    def giving_up(self, drop: Callable[[], None]) -> Iterator[None]:
        """Context: calls `drop` for the gradients if ranks differ, so that another batch can be trained on."""
        try:
            yield
        except RanksDifferError:
            drop()
            raise

    def _read_term(self) -> int:
        return sum(read.mark for read in self._reads) * self._factor(*AXES)

    def _means_term(self) -> Tensor:
        return fingerprint({f"{i}": x[:, -1].float() for i, x in enumerate(self._means)}) * self._factor(
            *AXES
        )

    def _factor(self, *axes: str) -> int:
        return self.mesh.size(*axes) - 1 if self.mesh.coord(*axes) == 0 else -1

    def _buffer_mark(self) -> Tensor:
        return fingerprint({name: self._buffer(name) for name in sorted(self._changed)})

    def _buffer(self, name: str) -> Tensor:
        module, key = self._buffers[name]
        found = module._buffers[key]
        return torch.zeros(0, device=self.device) if found is None else to_device(found, self.device)

    def _told(self) -> dict[str, Any]:
        coords = {axis: self.mesh.coord(axis) for axis in ("pipeline", "data")}
        batches = [{name: seen.plain() for name, seen in batch.items()} for batch in self._batches]
        marks = {name: int(fingerprint({name: self._buffer(name)})) for name in sorted(self._changed)}
        reads = [dict(start=read.start, samples=read.samples, ahead=read.ahead) for read in self._reads]
        return dict(
            coords, batches=batches, reads=reads, buffers=marks, left=self._left, read_term=self._read_term(),
            rate=self._rate, loaded=self.loaded, lengths=self._lengths,
            weights=[counts.tolist() for counts in self._weights], means=[x.tolist() for x in self._means],
            means_term=int(self._means_term()) if self._means else 0,
            frozen=[name for name, p in self._parameters.items() if not p.requires_grad],
        )  # fmt: skip


def _is_same(one: Any, other: Any) -> bool:
    pairs = zip_longest(tree_leaves(one), tree_leaves(other))
    return all(a is b for a, b in pairs)


def _left_fault(told: Sequence[Mapping[str, Any]]) -> str:
    """The message for the first rank that has left more or fewer batches behind than rank 0, or ""."""
    first = told[0]["left"] if told else 0
    for rank, row in enumerate(told):
        if (left := row["left"]) != first:
            return (
                f"batch: rank {rank} has left {left} batches untrained, after errors, and rank 0 has left {first}. "
                f"They would train on parts of different batches. Nothing was updated. Legal: the same batch again "
                f"after an error of one rank, or engine.load of a checkpoint on all ranks"
            )
    return ""


def _loaded_fault(told: Sequence[Mapping[str, Any]]) -> str:
    """The message for the first rank that has loaded another state than rank 0, or none, or ""."""
    for rank, row in enumerate(told):
        if row["loaded"] != told[0]["loaded"]:
            return (
                f"load_full_state_dict: rank {rank} has loaded other values than rank 0, or one of them has loaded "
                f"none. Nothing was updated. Legal: the same state on every rank, after the same step"
            )
    return ""


def _weight_fault(told: Sequence[Mapping[str, Any]]) -> str:
    """The message for the first rank whose losses should weigh otherwise than those of rank 0, or ""."""
    names = ("samples", "valid labels", "valid labels behind the first token")
    for rank, row in enumerate(told):
        for one, other in zip_longest(told[0]["weights"], row["weights"], fillvalue=[0]):  # 0: no call
            if one != other:
                pairs = enumerate(zip_longest(one, other, fillvalue=0))
                at, (mine, theirs) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
                name = names[at if at < 2 else 2 - at % 2]  # two for each argument of labels
                return (
                    f"backward: a loss without count weighs the same on every rank. Rank 0 has {mine} {name}, "
                    f"rank {rank} has {theirs}. Nothing was updated. Legal: engine.backward(loss, count=n), where "
                    f"loss is a mean over n samples or labels"
                )
    return ""


def _means_apart(told: Sequence[Mapping[str, Any]]) -> str:
    """The warning for the first rank whose means divide by other numbers than those of rank 0, or ""."""
    every = [[numbers for one in row["means"] for numbers in one] for row in told]
    is_counted = not any(row["weights"] for row in told)
    for rank, means in enumerate(every):
        for mine, theirs in zip_longest(every[0], means):
            if mine is not None and theirs is not None:
                if not _weighs_alike(mine, theirs):
                    return _told_means(mine, theirs, rank, is_counted=is_counted)
            elif not is_counted:
                return _told_means(mine, theirs, rank, is_counted=False)
    return ""


def _weighs_alike(mine: Sequence[float], theirs: Sequence[float]) -> bool:
    """Whether the means of two ranks have one divisor, or counts or factors that make up for it. So has a mean over
    nothing."""
    pairs = list(zip(mine, theirs, strict=True))
    return any(isclose(*pair, rel_tol=SAME_WEIGHT) for pair in pairs) or not all(
        map(isfinite, (*mine, *theirs))
    )


def _told_means(
    mine: Sequence[float] | None, theirs: Sequence[float] | None, rank: int, *, is_counted: bool
) -> str:
    """The warning for two means that weigh otherwise."""
    kind = 1 if is_counted else 0
    first, other = (f"{numbers[kind]:g}" if numbers else "nothing" for numbers in (mine, theirs))
    rule = "For the mean over all labels: engine.backward(loss, count=n), where a rank's mean divides by n"
    if is_counted:
        return (
            f"backward: a mean divides by {first} times the count on rank 0, and {other} times on rank {rank}. So it "
            f"weighs otherwise than in one process. {rule}"
        )
    return (
        f"backward: without count the step takes the mean of the ranks' means. These divide by {first} on rank 0, and "
        f"by {other} on rank {rank}. {rule}"
    )


def _length_fault(told: Sequence[Mapping[str, Any]]) -> str:
    """The message for batches that ranks have padded at the left to other lengths, or ""."""
    for turn in zip(*(row["lengths"] for row in told), strict=False):
        lengths = [tokens for tokens, _ in turn]
        if any(at_left for _, at_left in turn) and len({*lengths} - {0}) > 1:
            return (
                f"batch: {lengths} tokens on the ranks, which collators pad at the left for each rank alone. Positions "
                f"or labels follow from that, so numbers would depend on the number of ranks. Nothing was updated; "
                f"legal: one length (padding='max_length' of a tokenizer), padding at the right, or data=1"
            )
    return ""


def _rate_fault(told: Sequence[Mapping[str, Any]]) -> str:
    """The message for the first rank whose learning rate is another than that of rank 0, or ""."""
    for rank, row in enumerate(told):
        if row["rate"] != told[0]["rate"]:
            return (
                f"lr_lambda: it gives {told[0]['rate']} on rank 0 and {row['rate']} on rank {rank}. Nothing was "
                f"updated. Legal: a function of the step, or of numbers that are equal on all ranks. Such are "
                f"StepResult.loss and engine.eval_step"
            )
    return ""


def _batch_fault(told: Sequence[Mapping[str, Any]]) -> str:
    """The message for the first two ranks of one replica whose batches differ, or ""."""
    first_of: dict[int, int] = {}
    for rank, row in enumerate(told):
        first = first_of.setdefault(row["data"], rank)
        for one, other in zip(told[first]["batches"], row["batches"], strict=False):
            if one != other:
                name = next(name for name in {**one, **other} if one.get(name) != other.get(name))
                return (
                    f"batch: ranks {first} and {rank} train one replica on different samples: {name} is "
                    f"{_shown(one.get(name))} on rank {first} and {_shown(other.get(name))} on rank {rank}. Nothing "
                    f"was updated; legal: the same batch on all ranks of a data coordinate. Take it from "
                    f"context.dataloader, or from a sampler with one seed, cut by context.mesh.coord('data') of "
                    f"context.mesh.size('data')"
                )
    return ""


def _read_fault(told: Sequence[Mapping[str, Any]]) -> str:
    """The message for the first rank that has read a dataset otherwise than rank 0, or ""."""
    for turn in range(min((len(row["reads"]) for row in told), default=0)):
        for rank, row in enumerate(told):
            if what := _other_read(told[0]["reads"][turn], row["reads"][turn], rank):
                kind = "a stream" if row["reads"][turn]["samples"] else "it"
                return (
                    f"dataset: {kind} {what}. Nothing was updated; legal: the same samples in the same order on "
                    f"every rank. Take them from the same files, and shuffle by one seed, as random.Random(seed + "
                    f"epoch) does. Samples that are drawn anew at each read need a steady field, such as a number "
                    f"that collate= drops"
                )
    return ""


def _other_read(first: Mapping[str, Any], other: Mapping[str, Any], rank: int) -> str:
    """How `other` on that rank is another read than `first` on rank 0, or ""."""
    start, theirs = first["start"], other["start"]
    if start != theirs:
        return f"is read from sample {start} of the run on rank 0, and from {theirs} on rank {rank}"
    ends = [start + len(read["samples"]) + read["ahead"] for read in (first, other)]
    for place, (one, two) in enumerate(zip(first["samples"], other["samples"], strict=False)):
        if one != two:
            return f"gives another sample {start + place} of the run on rank {rank} than on rank 0"
    if ends[0] != ends[1]:
        early, late = (0, rank) if ends[0] < ends[1] else (rank, 0)
        return f"ends after {min(ends)} samples of the run on rank {early}, and goes on on rank {late}"
    return ""


def _frozen_fault(told: Sequence[Mapping[str, Any]]) -> str:
    """The message for the first parameter that trains on one rank and not on another with the same stages, or ""."""
    first_of: dict[int, int] = {}
    for rank, row in enumerate(told):
        first = first_of.setdefault(row["pipeline"], rank)
        if fault := frozen_apart(first, told[first]["frozen"], rank, row["frozen"]):
            return f"{fault}. Nothing was updated"
    return ""


def frozen_apart(one: int, frozen: Sequence[str], other: int, beside: Sequence[str]) -> str:
    """The message for a parameter that is frozen on one of two ranks alone, or ""."""
    apart = [name for name in (*frozen, *beside) if (name in frozen) != (name in beside)]
    if not apart:
        return ""
    trains, rests = (other, one) if apart[0] in frozen else (one, other)
    return (
        f"model: {apart[0]} trains on rank {trains}, and is frozen on rank {rests} (requires_grad=False). Legal: the "
        f"same parameters frozen on every rank"
    )


def _shown(seen: Mapping[str, Any] | None) -> str:
    return "absent" if seen is None else f"{seen['shape']} from {', '.join(map(str, seen['first']))}"


def _buffer_fault(told: Sequence[Mapping[str, Any]], cuts: Sequence[str]) -> str:
    """The message for the first buffer that a forward changed where it must not, or ""."""
    first_of: dict[int, int] = {}
    for rank, row in enumerate(told):
        first = first_of.setdefault(row["pipeline"], rank)
        names = row["buffers"] if cuts else {**row["buffers"], **told[first]["buffers"]}
        for name in names:
            if cuts:
                return (
                    f"model: its forward changes the buffer {name}, and {' and '.join(cuts)} would change it more "
                    f"often than one run of the whole batch. Nothing was updated; legal: without these settings, or a "
                    f"model that changes no buffer"
                )
            if row["buffers"].get(name) != told[first]["buffers"].get(name):
                return (
                    f"model: its forward changes the buffer {name}, which is another on rank {rank} than on rank "
                    f"{first}, as each rank has a part of the batch. Nothing was updated; legal: a model whose buffers "
                    f"do not depend on the batch, or one rank"
                )
    return ""
