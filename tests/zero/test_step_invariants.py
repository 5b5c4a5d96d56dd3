"""Checks invariants of a step: reads see the newest weights, every future is awaited before it is dropped, all ranks of
a group make the same collectives; and the same bits for every way to run."""

from __future__ import annotations

import gc
import math
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

import colossal_lite as cl
from colossal_lite.distributed.communicator import Communicator, PendingCollective
from colossal_lite.distributed.mesh import Mesh
from colossal_lite.distributed.watchdog import differences
from colossal_lite.engine.engine import Engine
from colossal_lite.memory.chunk import Chunk
from colossal_lite.memory.link import Transfer
from colossal_lite.memory.transfers import GradientOffloadBuffer
from colossal_lite.zero import build_chunks as build
from colossal_lite.zero.optimizer import ChunkOptimizer
from tests.shared.covering import covering_array, name_of
from tests.shared.parity import Case, start, steps_of
from tests.shared.pool import RankEnv, WorldError, run_world
from tests.zero.test_memory_budget import DEEP, config_of
from tests.zero.test_zero import SMALL, assert_same_bits, bits

STATIC = dict(placement="static", host_fraction=dict(weights=0.5, gradients=1.0, optimizer=0.8))


def placed(case: Case, placement: str, directory: Path) -> Case:
    """The case with what rests off the device there."""
    memory = STATIC if placement == "static" else dict(placement=placement)
    memory = memory | (dict(disk_dir=str(directory)) if placement == "disk" else {})
    return replace(case, config=dict(case.config) | dict(memory=memory))


def batch_of(case: Case, context: cl.Context, number: int) -> tuple[Tensor, Tensor]:
    inputs, labels = case.batch(number)
    cut = context.local_batch(case.global_batch)
    return inputs[cut], labels[cut]


# ---- I3: what is read is what the optimizer wrote last ----

Read = tuple[int, str, int]
"""Chunk, parameter, and how many updates its chunk has had."""


@contextmanager
def watched(engine: Engine, read: dict[Read, int]) -> Iterator[None]:
    """Note what modules read, and hold this rank's part of it against what its last update wrote."""
    places = {p: (c, e) for c in engine._chunks for e, p in zip(c.spec.entries, c._parameters, strict=True)}
    written, updates = dict[int, Tensor](), Counter[int]()
    update = ChunkOptimizer.update

    def noted(self: ChunkOptimizer, chunk: Chunk, used: Any, **more: Any) -> None:
        update(self, chunk, used, **more)
        updates[chunk.spec.id] += 1
        written[chunk.spec.id] = chunk.local_shard.clone()

    def look(module: nn.Module, *_: Any) -> None:
        for parameter in module._parameters.values():
            if parameter not in places:
                continue
            chunk, entry = places[parameter]
            flat = parameter.detach().contiguous().view(-1)
            assert updates[chunk.spec.id] == engine.steps, f"{entry.name}: its update is owed"
            if chunk.spec.id in written and (part := chunk.part_of(entry)):
                local, first = part
                own = written[chunk.spec.id][local]
                assert torch.equal(flat[first : first + len(own)], own), f"{entry.name}: not what was written"
            key = chunk.spec.id, entry.name, engine.steps
            crc = zlib.crc32(flat.view(torch.uint8).numpy().tobytes())
            assert read.setdefault(key, crc) == crc, f"{entry.name}: changed within a step"

    handle = register_module_forward_hook(look)
    with patch.object(ChunkOptimizer, "update", noted):
        yield
    handle.remove()


def reads_of(env: RankEnv, case: Case, fault: str = "") -> dict[Read, int]:
    with env.launch(case.full_config) as context, ExitStack() as stack:
        engine, read = start(case, context), dict[Read, int]()
        if fault:
            stack.enter_context(FAULTS_I3[fault][0]())
        stack.enter_context(watched(engine, read))
        for number in range(3):
            engine.train_step(batch_of(case, context, number))
        return read


def assert_newest(case: Case, fault: str = "") -> None:
    """All ranks that hold the same parameters have read the same bytes of each version, and each its own part."""
    first, *others = run_world(reads_of, case.world_size, case, fault)
    assert len({name for _, name, _ in first}) > 20 and {step for _, _, step in first} == {0, 1, 2}
    assert all(other == first for other in others), "ranks have read other weights"


ROWS_I3 = covering_array(
    dict(
        stage=[0, 1, 2, 3],
        placement=["device", "host", "static"],
        precision=["fp32", "bf16"],
        prefetch=[0, 1, 2],
        accumulation=[1, 2],
    ),
    lambda row: (
        (row["stage"] == 3 or row["prefetch"] == 1)
        and (row["stage"] in (0, 3) or row["placement"] == "host")
        and (row["stage"] != 0 or row["placement"] == "host")
    ),
)
SHALLOW = replace(DEEP, dropout=0.0, layers=2)


@pytest.mark.parametrize("row", ROWS_I3, ids=name_of)
def test_i3_weights_that_are_read_are_what_their_last_update_wrote_on_every_rank(
    row: dict[str, Any], tmp_path: Path
) -> None:
    row = dict(row)
    placement = row.pop("placement")
    config = config_of(**row, sum_order="fast")
    assert_newest(placed(replace(SHALLOW, config=config), placement, tmp_path))


def _the_others_shard_is_old() -> Any:
    finish = Chunk.finish_gather

    def with_a_hole(self: Chunk) -> None:
        was_coming = self._gathering is not None
        finish(self)
        if was_coming and self.shards.coord == 0:
            self.full_weight.view(2, -1)[1].mul_(0.5)

    return patch.object(Chunk, "finish_gather", with_a_hole)


def _what_an_update_wrote_is_lost() -> Any:
    run_deferred = Chunk.start_gather

    def before(self: Chunk) -> None:
        self.local_shard[:8].zero_()
        run_deferred(self)

    return patch.object(Chunk, "start_gather", before)


FAULTS_I3: dict[str, tuple[Callable[[], Any], str]] = {
    "the other's shard is old": (_the_others_shard_is_old, "ranks have read other weights"),
    "what an update wrote is lost": (_what_an_update_wrote_is_lost, "not what was written"),
}


@pytest.mark.parametrize("fault", FAULTS_I3)
def test_i3_goes_red_where(fault: str) -> None:
    with pytest.raises((AssertionError, WorldError), match=FAULTS_I3[fault][1]):
        assert_newest(replace(SHALLOW, config=config_of(1, sum_order="fast")), fault)


# ---- I6: a future is awaited before it is dropped ----


class Futures:
    """Operations of groups and copies over links, as they are made; who is let go of by all, was never waited for and
    was not revoked before it began is lost."""

    def __init__(self) -> None:
        self._made: list[tuple[weakref.ref[Any], str]] = []
        self._awaited = set[int]()
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def noting(self, kind: type, what: Callable[[Any], str], waits: str) -> ExitStack:
        begin, wait, stack = kind.__init__, getattr(kind, waits), ExitStack()

        def init(future: Any, *args: Any, **more: Any) -> None:
            begin(future, *args, **more)
            self._numbers[future] = len(self._made)
            self._made.append((weakref.ref(future), what(future)))

        def waited(future: Any) -> Any:
            found = wait(future)
            self._awaited.add(self._numbers[future])
            return found

        stack.enter_context(patch.object(kind, "__init__", init))
        stack.enter_context(patch.object(kind, waits, waited))
        return stack

    def noting_revoked(self) -> Any:
        revoke = Transfer.revoke

        def revoked(copy: Transfer) -> bool:
            never_begins = revoke(copy)
            if never_begins:
                self._awaited.add(self._numbers[copy])
            return never_begins

        return patch.object(Transfer, "revoke", revoked)

    def lost(self) -> list[str]:
        gc.collect()
        return [what for n, (ref, what) in enumerate(self._made) if n not in self._awaited and ref() is None]

    @property
    def kinds(self) -> Counter[str]:
        """How many there were, by their first word."""
        return Counter(what.split()[0] for _, what in self._made)


def futures_of(env: RankEnv, case: Case, fault: str = "") -> tuple[list[str], list[str], Counter[str]]:
    """What a run has lost by the end of any of its steps, what is then not done though everything was to be, and what
    there was."""
    seen = Futures()
    with ExitStack() as stack:
        stack.enter_context(seen.noting(PendingCollective, lambda one: one._what, "wait"))
        stack.enter_context(seen.noting(Transfer, lambda one: f"copy {one.link.name}", "handed"))
        stack.enter_context(seen.noting_revoked())
        if fault:
            stack.enter_context(FAULTS_I6[fault]())
        context = stack.enter_context(env.launch(case.full_config))
        engine, lost = start(case, context), []
        for number in range(3):
            engine.train_step(batch_of(case, context, number))
            lost += seen.lost()
        engine.eval_step(batch_of(case, context, 3))
        engine._state.rest()
        alive = [ref() for ref, _ in seen._made]
        open_copies = [one.link.name for one in alive if isinstance(one, Transfer) and not one.is_handed]
        open_calls = [one._what for one in alive if isinstance(one, PendingCollective) and one._works]
        return lost + seen.lost(), open_copies + open_calls, seen.kinds


def assert_none_is_lost(case: Case, kinds: set[str], fault: str = "") -> None:
    for lost, still_open, found in run_world(futures_of, case.world_size, case, fault):
        assert not lost and not still_open, (lost, still_open)
        assert kinds <= set(found), found


PIPED = dict(pipeline=dict(size=2, schedule="zb-h1", micro_batches=2), global_batch=4)
CASES_I6: dict[str, tuple[Case, str, set[str]]] = {
    "stage 0 on two ranks": (replace(SHALLOW, config=config_of(0)), "device", {"all_reduce"}),
    "stage 1, records on disk": (
        replace(SHALLOW, config=config_of(1, accumulation=2)),
        "disk",
        {"reduce_scatter", "all_gather", "copy"},
    ),
    "stage 3, half of it on the host": (
        replace(SHALLOW, config=config_of(3, sum_order="fast", precision="bf16", prefetch=2)),
        "static",
        {"reduce_scatter", "all_gather", "copy"},
    ),
    "a pipeline": (replace(SHALLOW, **PIPED), "device", {"send", "receive"}),
    "cut layers and a ring": (
        replace(SHALLOW, world_size=4, tensor=2, sequence=2),
        "device",
        {"send", "all_gather", "reduce_scatter"},
    ),
}


@pytest.mark.parametrize("name", CASES_I6)
def test_i6_whoever_lets_go_of_a_future_has_waited_for_it(name: str, tmp_path: Path) -> None:
    case, placement, kinds = CASES_I6[name]
    assert_none_is_lost(placed(case, placement, tmp_path), kinds)


def _sums_are_not_awaited() -> Any:
    return patch.object(GradientOffloadBuffer, "flush", lambda self: self._sent.clear())


def _a_gather_is_forgotten() -> Any:
    finish = Chunk.finish_gather

    def forgetting(self: Chunk) -> None:
        if self._gathering is not None and self.spec.id == 1:
            self._gathering = self.shards.all_gather_async(self.local_shard, self.full_weight)
        finish(self)

    return patch.object(Chunk, "finish_gather", forgetting)


FAULTS_I6: dict[str, Callable[[], Any]] = {
    "sums on the host are not awaited": _sums_are_not_awaited,
    "a gather is forgotten": _a_gather_is_forgotten,
}


@pytest.mark.parametrize("fault", FAULTS_I6)
def test_i6_goes_red_where(fault: str, tmp_path: Path) -> None:
    stage, placement = (3, "static") if fault.startswith("sums") else (1, "device")
    case = replace(SHALLOW, steps=2, config=config_of(stage, sum_order="fast"))
    with pytest.raises(AssertionError):
        assert_none_is_lost(placed(case, placement, tmp_path), set(), fault)


# ---- I8: the ranks of a group make the same collectives ----

Call = tuple[str, str, tuple[int, ...], str]
"""Operation, axis, shape and dtype."""
Calls = dict[tuple[int, ...], list[Call]]
"""By the ranks of the group."""


def calls_of(env: RankEnv, case: Case, fault: str = "") -> tuple[Calls, int]:
    """Every collective of a run, messages of two ranks left out, and how many steps were skipped."""
    calls: Calls = {}
    run = Communicator._run

    def told(self: Communicator, counted: str | None, payload: Tensor, *args: Any, **more: Any) -> Any:
        if self.size > 1 and not more.get("peers"):
            what = counted or more.get("what") or ""
            calls.setdefault(self.ranks, []).append(
                (what, self.axis, tuple(payload.shape), str(payload.dtype))
            )
        return run(self, counted, payload, *args, **more)

    with patch.object(Communicator, "_run", told), env.launch(case.full_config) as context:
        engine = start(case, context)
        if fault:
            is_other = env.rank == 1 and fault == "another dtype"
            numbers = torch.zeros(8) if is_other else torch.zeros(4, dtype=torch.float64)
            context.mesh.world.all_reduce(numbers, "max" if env.rank == 1 and not is_other else "sum")
        skipped = sum(engine.train_step(batch_of(case, context, number)).skipped for number in range(2))
        engine.eval_step(batch_of(case, context, 2))
        return calls, skipped


def assert_one_sequence(case: Case, fault: str = "", calls: Callable[..., Any] = calls_of) -> None:
    found = run_world(calls, case.world_size, case, fault)
    groups = {ranks for made, _ in found for ranks in made}
    assert tuple(range(case.world_size)) in groups
    for ranks in groups:
        sequences = [found[rank][0].get(ranks) for rank in ranks]
        assert all(made == sequences[0] for made in sequences), f"ranks {ranks}"
    assert {skipped for _, skipped in found} == {2 if case.precision == "fp16" else 0}


MESHES_I8: dict[str, dict[str, Any]] = {
    "data 2": dict(world_size=2),
    "data 2 x 1d 2": dict(world_size=4, tensor=2),
    "2d 4": dict(world_size=4, tensor=4, mode="2d"),
    "data 2 x ring 2": dict(world_size=4, sequence=2),
    "data 2 x pipeline 2": dict(world_size=4, pipeline=dict(size=2, micro_batches=2)),
    "2 copies of 2": dict(world_size=4),
}
MORE_I8 = MESHES_I8 | {
    "data 2 x ulysses 2": dict(world_size=4, sequence=2, sequence_mode="ulysses"),
    "data 2 x zb-v 2": dict(world_size=4, layers=4, pipeline=dict(size=2, schedule="zb-v", micro_batches=2)),
    "2.5d 8": dict(world_size=8, tensor=8, mode="2.5d", depth=2),
    "3d 8": dict(world_size=8, tensor=8, mode="3d"),
}
OVERFLOWS = dict(dtype="fp16", loss_scale=2.0**60)
STAGE_AND_MESH = [
    *((3, "data 2"), (2, "data 2"), (3, "data 2 x 1d 2"), (1, "2d 4"), (2, "data 2 x ring 2")),
    *((1, "data 2 x pipeline 2"), (3, "2 copies of 2")),
]


def is_built(stage: int, mesh: str) -> bool:
    return (stage < 3 or "pipeline" not in MORE_I8[mesh]) and (stage > 0 or "copies" not in mesh)


def may_be_empty(row: Mapping[str, Any]) -> bool:
    """Micro-batches and the rows of a grid need as many samples as there are of them."""
    changes = MORE_I8[row["where"][1]]
    return row["batch"] == "full" or ("pipeline" not in changes and "mode" not in changes)


OTHERS_I8 = dict(
    accumulation=[1, 2],
    batch=["full", "empty"],
    precision=["fp32", "overflows"],
    sum_order=["fast", "ordered"],
    prefetch=[0, 2],
)
ROWS_I8 = covering_array(dict(where=STAGE_AND_MESH) | OTHERS_I8, may_be_empty)
ALL_I8 = covering_array(
    dict(where=[(stage, mesh) for mesh in MORE_I8 for stage in range(4) if is_built(stage, mesh)])
    | OTHERS_I8,
    may_be_empty,
)


def assert_one_sequence_of(row: Mapping[str, Any], **more: Any) -> None:
    """An empty batch: fewer samples than data ranks; the last of these has none."""
    (stage, mesh), accumulation = row["where"], row["accumulation"]
    changes = MORE_I8[mesh]
    zero: dict[str, Any] = dict(stage=stage, sum_order=row["sum_order"])
    zero |= dict(prefetch=row["prefetch"]) if stage == 3 else {}
    zero |= dict(shard_size=2) if "copies" in mesh else {}
    config = dict(
        zero=zero,
        gradient_accumulation=accumulation,
        precision=OVERFLOWS if row["precision"] == "overflows" else "fp32",
        clip_grad_norm=0.05,
    )
    full = 4 * accumulation * 2
    case = replace(SHALLOW, dropout=0.1, global_batch=1 if row["batch"] == "empty" else full, **changes)
    assert_one_sequence(replace(case, config=config), **more)


@pytest.mark.parametrize("row", ROWS_I8, ids=name_of)
def test_i8_the_ranks_of_a_group_make_the_same_collectives(row: dict[str, Any]) -> None:
    assert_one_sequence_of(row)


@pytest.mark.campaign
@pytest.mark.parametrize("row", ALL_I8, ids=name_of)
def test_i8_the_ranks_of_a_group_make_the_same_collectives_in_every_mode(row: dict[str, Any]) -> None:
    assert_one_sequence_of(row)


ELSEWHERE = replace(SHALLOW, config=dict(backend="gloo"))


def calls_of_all(env: RankEnv, case: Case, fault: str) -> tuple[Calls, int]:
    """As `calls_of`, where nobody compares them in the run."""
    with patch.object(Mesh, "check_together", lambda self, apart: None):
        return calls_of(env, case, fault)


def test_i8_goes_red_where_a_rank_makes_another_one_that_its_group_takes() -> None:
    """As many bytes, of another dtype: gloo does not notice."""
    with pytest.raises(AssertionError, match="ranks"):
        assert_one_sequence(ELSEWHERE, "another dtype", calls_of_all)


@pytest.mark.parametrize("fault", ["another dtype", "another operation"])
def test_i8_such_a_one_is_told_by_every_rank_before_anything_is_updated(fault: str) -> None:
    """Without shared memory, where nothing else would tell."""
    with pytest.raises(WorldError) as caught:
        run_world(calls_of, 2, ELSEWHERE, fault)
    for failure in caught.value.failures:
        said = "all_reduce of [8] float32" if fault == "another dtype" else "all_reduce of [4] float64 (max)"
        assert failure.kind == "raised" and "nothing was updated" in failure.summary
        assert f"of rank 1 was {said} on axis 'world'" in failure.text
        assert "that of rank 0 all_reduce of [4] float64 on axis 'world'" in failure.text


def test_i8_of_calls_that_are_not_kept_any_more_the_groups_are_told() -> None:
    told = [[dict(ranks=[0, 1], calls=40, mark=mark, last=["all_reduce"] * 32)] for mark in (1, 2)]
    told += [[dict(ranks=[2, 3], calls=calls, mark=calls, last=["all_reduce"])] for calls in (7, 8)]
    assert differences(told) == (
        "in the group of ranks [0, 1], rank 1 has made others than rank 0 before the last 32; "
        "in the group of ranks [2, 3], rank 3 has made 8 collectives, rank 2 7"
    )


# ---- P2: fast sums of two ranks have the bits of stage 0, those of more ranks the same wherever things rest ----


def assert_same_numbers(found: Any, expected: Any) -> None:
    """Every bit but those of norms, whose terms depend on how a chunk is cut."""
    for (ours, our_state), (theirs, their_state) in zip(found, expected, strict=True):
        same = [replace(a, grad_norm=b.grad_norm) for a, b in zip(ours, theirs, strict=True)]
        assert all(
            math.isclose(a.grad_norm, b.grad_norm, rel_tol=1e-6) for a, b in zip(ours, theirs, strict=True)
        )
        assert_same_bits([(same, our_state)], [(theirs, their_state)])


ROWS_P2 = covering_array(
    dict(
        where=[(1, "device"), (1, "host"), (2, "device"), (2, "disk"), (3, "device"), (3, "static")],
        ranks=[1, 2],
        precision=["fp32", "bf16"],
        reduce=["step", "micro_batch"],
    ),
    lambda row: row["where"][0] == 2 or row["reduce"] == "step",
)


@pytest.mark.parametrize("row", ROWS_P2, ids=name_of)
def test_p2_fast_sums_of_two_ranks_have_the_bits_of_stage_0(row: dict[str, Any], tmp_path: Path) -> None:
    (stage, placement), config = row["where"], config_of(0, sum_order="fast", precision=row["precision"])
    zero = dict(stage=stage) | (dict(reduce_every=row["reduce"]) if stage == 2 else {})
    plain = replace(DEEP, layers=2, world_size=row["ranks"], config=config)
    other = placed(replace(plain, config=config | dict(zero=zero)), placement, tmp_path)
    assert_same_numbers(run_world(bits, row["ranks"], other), run_world(bits, row["ranks"], plain))


def test_p2_fast_sums_of_four_ranks_have_the_same_bits_wherever_things_rest(tmp_path: Path) -> None:
    """And are those of stage 0 but for rounding."""
    config = config_of(3, sum_order="fast", accumulation=2, clip=True)
    case = replace(DEEP, layers=2, world_size=4, config=config)
    expected = run_world(bits, 4, case)
    for placement in ("host", "static"):
        assert_same_bits(run_world(bits, 4, placed(case, placement, tmp_path)), expected)
    plain = run_world(bits, 4, replace(case, config=config | dict(zero=dict(stage=0))))
    for (steps, _), (theirs, _) in zip(expected, plain, strict=True):
        for name, value in theirs[-1].parameters.items():
            assert torch.allclose(steps[-1].parameters[name], value, rtol=2e-3, atol=2e-5), name


# ---- P4: what is saved in one way goes on in another ----

WAYS: dict[str, tuple[dict[str, Any], str, int | None]] = {
    "0": (dict(stage=0), "device", None),
    "1 on disk": (dict(stage=1), "disk", SMALL // 2),
    "2 on the host": (dict(stage=2), "host", SMALL),
    "3, half on the host": (dict(stage=3, prefetch=2), "static", SMALL // 2),
}


def handed_over(env: RankEnv, first: Case, second: Case, folder: str) -> Any:
    """As `bits`: a step of the first, which is saved, and another of the second, which loads it."""
    steps = []
    for number, case in enumerate((first, second)):
        with env.launch(case.full_config) as context:
            engine = start(case, context)
            if number:
                engine.load(folder)
            steps += steps_of(engine, context, case, [number])
            state = engine.full_optimizer_state()
            if not number:
                engine.save(folder)
    return steps, state


@pytest.mark.parametrize(
    ("here", "there"),
    [
        ("0", "3, half on the host"),
        ("3, half on the host", "1 on disk"),
        ("1 on disk", "2 on the host"),
        ("2 on the host", "0"),
    ],
)
def test_p4_a_run_that_goes_on_in_another_way_has_the_bits_of_stage_0(
    here: str, there: str, tmp_path: Path
) -> None:
    config = config_of(0, precision="bf16", clip=True)
    plain = replace(DEEP, chunk_bytes=None, config=config)

    def case_of(way: str) -> Case:
        zero, placement, chunk_bytes = WAYS[way]
        zero = zero | dict(sum_order="ordered")
        return placed(
            replace(plain, config=config | dict(zero=zero), chunk_bytes=chunk_bytes), placement, tmp_path
        )

    found = run_world(handed_over, 2, case_of(here), case_of(there), str(tmp_path / "saved"))
    assert_same_bits(found, run_world(bits, 2, plain))


# ---- P7: a step that is not finite leaves every bit as it was ----


def with_a_bad_step(env: RankEnv, case: Case, factor: float, peek: bool) -> Any:
    """Two steps, between them one whose loss is not finite on the last rank, if `factor` is not 1: what it left of
    weights and optimizer state, if somebody looks, and everything at the end."""
    with (
        env.launch(case.full_config) as context,
        patch.object(build, "CHUNK_BYTES", case.chunk_bytes),
    ):
        is_bad = False

        def criterion(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            wide = logits.flatten(0, 1).float()
            loss = nn.functional.cross_entropy(wide, labels.flatten(), ignore_index=-100, reduction="sum")
            bad = is_bad and env.rank == env.world_size - 1
            return (loss * factor if bad else loss), (labels != -100).sum()

        engine = cl.initialize(case.model, context=context, criterion=criterion)
        same = True
        engine.train_step(batch_of(case, context, 0))
        if factor != 1:
            before = state_of(engine) if peek else {}
            is_bad = True
            assert engine.train_step(batch_of(case, context, 1)).skipped
            is_bad = False
            after = state_of(engine) if peek else {}
            same = all(torch.equal(value, before[name]) for name, value in after.items())
        assert not engine.train_step(batch_of(case, context, 2)).skipped
        return same, state_of(engine)


def state_of(engine: Engine) -> dict[str, Tensor]:
    moments = engine.full_optimizer_state()
    state = {f"{kind} of {name}": value for name, kinds in moments.items() for kind, value in kinds.items()}
    return state | engine.full_state_dict()


BAD: dict[str, tuple[int, int, str, str, float, bool]] = {
    "0": (0, 2, "device", "fp32", math.inf, True),
    "0 on disk": (0, 1, "disk", "bf16", math.nan, False),
    "1 on the host": (1, 2, "host", "bf16", math.nan, False),
    "2": (2, 2, "device", "bf16", math.inf, True),
    "3": (3, 2, "device", "fp32", math.nan, False),
    "3, half on the host": (3, 2, "static", "bf16", math.inf, True),
}


@pytest.mark.parametrize("name", BAD)
def test_p7_a_step_that_is_not_finite_leaves_every_bit_as_it_was(name: str, tmp_path: Path) -> None:
    """Weights, moments and counts of steps; and what follows is what would have followed without it."""
    stage, ranks, placement, precision, factor, peek = BAD[name]
    case = replace(SHALLOW, world_size=ranks, config=config_of(stage, precision=precision, accumulation=2))
    case = placed(case, placement, tmp_path)
    found = run_world(with_a_bad_step, ranks, case, factor, peek)
    for (same, ours), (_, theirs) in zip(
        found, run_world(with_a_bad_step, ranks, case, 1.0, False), strict=True
    ):
        assert same and ours.keys() == theirs.keys()
        assert [name for name, value in ours.items() if not torch.equal(value, theirs[name])] == []
