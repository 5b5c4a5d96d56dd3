"""The plan language: its text, its rules, and a naive machine that agrees with the checker about random
plans."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colossal_lite.schedule.checker import check
from colossal_lite.schedule.pipeline_schedules import SCHEDULES, generate
from colossal_lite.schedule.plan import (
    COMPUTE,
    COMPUTE_KINDS,
    CPU,
    D2H,
    DISK,
    H2D,
    MESSAGES,
    SENDS,
    Action,
    ActionKind,
    Memory,
    Plan,
    PlanError,
    Shape,
)
from colossal_lite.schedule.simulator import simulate
from colossal_lite.schedule.stage_gathers import StageWeights, add_gathers
from colossal_lite.schedule.step_passes import add_messages, add_step, one_stage

# Text ---------------------------------------------------------------------------------------------


@st.composite
def actions(draw: st.DrawFn) -> Action:
    kind = draw(st.sampled_from(list(ActionKind)))
    index = st.integers(0, 300)
    optional = st.none() | index
    needs_both = kind in COMPUTE_KINDS | MESSAGES
    stage = draw(index if needs_both else optional)
    chunk = draw(index if stage is None else optional)
    lane = {
        ActionKind.FETCH: [H2D, DISK],
        ActionKind.EVICT: [D2H, DISK],
        ActionKind.UPDATE: [COMPUTE, CPU],
        ActionKind.REDUCE: ["net:x"],
    }
    return Action(
        kind,
        draw(index),
        stage,
        draw(index if needs_both else optional),
        draw(optional),
        chunk,
        draw(st.sampled_from(["", *lane.get(kind, [])])),
    )


@given(st.lists(st.lists(actions(), max_size=5), min_size=1, max_size=3))
def test_a_plan_parses_as_it_prints(lists: list[list[Action]]) -> None:
    plan = Plan(tuple(map(tuple, lists)))
    assert Plan.parse(str(plan)) == plan


def test_words_read_as_their_grammar_says() -> None:
    assert Action.parse("2F0") == Action(ActionKind.F, stage=2, micro_batch=0)
    assert Action.parse("t1:0UPDATE#7@cpu") == Action(ActionKind.UPDATE, 1, 0, chunk=7, resource=CPU)
    assert Action.parse("12SEND_B3.4") == Action(ActionKind.SEND_B, stage=12, micro_batch=3, slice=4)


@pytest.mark.parametrize(
    "word",
    ["", "2X0", "2F", "F0", "FETCH", "2F0#", "0F0@h2d", "0FETCH#1@cpu", "0EVICT#1@h2d", "0REDUCE#1@cpu"],
)
def test_a_word_outside_the_grammar_is_refused(word: str) -> None:
    with pytest.raises(ValueError):
        Action.parse(word)


# A naive machine ----------------------------------------------------------------------------------


class StuckError(Exception):
    pass


class Machine:
    """Runs compute and messages of the lists one action at a time, in any order that blocking allows: values
    are tuples, a SEND blocks until the other side has posted a RECV, messages go in turn."""

    def __init__(self, plan: Plan, shape: Shape) -> None:
        self.plan, self.shape, self.place = plan, shape, plan.placement()
        self.at = [0] * len(plan)
        self.posted: defaultdict[tuple[int, int], deque[Action]] = defaultdict(deque)
        self.values: list[dict[object, object]] = [{} for _ in plan]
        self.sums: defaultdict[int, list[int]] = defaultdict(list)

    def run(self) -> bool:
        """Whether all ran and every stage added each micro-batch once, in order."""
        try:
            while any(self._step(rank) for rank in range(len(self.plan))):
                pass
        except StuckError:
            return False
        whole = list(range(self.shape.micro_batches))
        return (
            all(at == len(a) for at, a in zip(self.at, self.plan, strict=True))
            and all(self.sums[stage] == whole for stage in range(self.shape.stages))
            and not any(self.posted.values())
        )

    def _step(self, rank: int) -> bool:
        if self.at[rank] == len(self.plan[rank]):
            return False
        action = self.plan[rank][self.at[rank]]
        ran = self._message(rank, action) if action.kind in MESSAGES else self._compute(rank, action)
        self.at[rank] += ran
        return ran

    def _message(self, rank: int, action: Action) -> bool:
        assert action.stage is not None
        step = 1 if action.kind in (ActionKind.SEND_F, ActionKind.RECV_B) else -1
        other = self.place.get(action.stage + step)
        if other is None or other == rank:
            raise StuckError
        if action.kind not in SENDS:
            self.posted[other, rank].append(action)
            return True
        if not self.posted[rank, other]:
            return False
        value = self._take(
            rank, ("out" if action.kind is ActionKind.SEND_F else "grad", action.stage, action.micro_batch)
        )
        receive = self.posted[rank, other].popleft()
        if replace(action, kind=SENDS[action.kind], stage=action.stage + step) != receive:
            raise StuckError
        self._put(
            other,
            ("in" if action.kind is ActionKind.SEND_F else "grad_in", receive.stage, action.micro_batch),
            value,
        )
        return True

    def _take(self, rank: int, key: object) -> object:
        if key not in self.values[rank]:
            raise StuckError
        return self.values[rank].pop(key)

    def _put(self, rank: int, key: object, value: object) -> None:
        if key in self.values[rank]:
            raise StuckError
        self.values[rank][key] = value

    def _pass_on(self, rank: int, name: str, stage: int, i: object, value: object) -> None:
        neighbour = stage + (1 if name == "out" else -1)
        if not 0 <= neighbour < self.shape.stages:
            return
        if self.place.get(neighbour) == rank:
            self._put(rank, ("in" if name == "out" else "grad_in", neighbour, i), value)
        else:
            self._put(rank, (name, stage, i), value)

    def _compute(self, rank: int, action: Action) -> bool:
        stage, i = action.stage, action.micro_batch
        assert stage is not None and i is not None
        if self.place[stage] != rank:
            raise StuckError
        source = {ActionKind.F: ("in", stage > 0), ActionKind.W: ("", False)}.get(
            action.kind, ("grad_in", stage < self.shape.stages - 1)
        )
        key = (source[0], stage, i)
        if source[1] and key not in self.values[rank]:
            # It waits for a message if one is posted; otherwise what it needs will never be here.
            if not any(self.posted[a, rank] for a in range(len(self.plan))):
                raise StuckError
            return False
        if source[1]:
            self._take(rank, key)
        if action.kind is ActionKind.F:
            self._put(rank, ("saved", stage, i), i)
            self._pass_on(rank, "out", stage, i, i)
        if action.kind in (ActionKind.I, ActionKind.B):
            if ("saved", stage, i) not in self.values[rank] or ("done", stage, i) in self.values[rank]:
                raise StuckError
            self._put(rank, ("done", stage, i), i)
            self._pass_on(rank, "grad", stage, i, i)
        if action.kind in (ActionKind.W, ActionKind.B):
            self._take(rank, ("done", stage, i))
            self._take(rank, ("saved", stage, i))
            self.sums[stage].append(i)
        return True


SMALL = [
    (name, p, m)
    for name in ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")
    for p, m in ((2, 2), (2, 3), (3, 4))
]


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_the_checker_refuses_exactly_what_a_naive_machine_cannot_run(data: st.DataObject) -> None:
    name, p, m = data.draw(st.sampled_from(SMALL))
    plan = add_messages(generate(name, p, m), ahead=data.draw(st.booleans()))
    lists = [list(actions) for actions in plan]
    for _ in range(data.draw(st.integers(0, 2))):
        rank = data.draw(st.integers(0, p - 1))
        i = data.draw(st.integers(0, len(lists[rank]) - 2))
        j = min(len(lists[rank]) - 1, i + data.draw(st.integers(1, 4)))
        lists[rank][i], lists[rank][j] = lists[rank][j], lists[rank][i]
    shape = Shape.of(plan, 0)
    changed = Plan(tuple(map(tuple, lists)))
    try:
        check(changed, shapes={0: shape})
        fine = True
    except PlanError:
        fine = False
    # F and I need no order in the machine, whose sums only W sees; the language asks for it everywhere.
    ordered = all(
        sorted(mine, key=lambda a: a.micro_batch) == mine
        for actions in changed
        for kind in "FIWB"
        for stage in range(shape.stages)
        for mine in [[a for a in actions if a.kind == kind and a.stage == stage]]
    )
    assert fine == (ordered and Machine(changed, shape).run())


# Mutations ----------------------------------------------------------------------------------------


def whole_step(name: str, ranks: int, micro_batches: int) -> tuple[Plan, Shape]:
    """Every pass over a schedule, with the first and the last stage sharing a chunk."""
    plan = generate(name, ranks, micro_batches)
    shape = Shape.of(plan, 0)
    chunks = {stage: (stage,) for stage in range(shape.stages)} | {shape.stages - 1: (shape.stages - 1, 0)}
    reduce = "micro_batch" if micro_batches % 2 else "step"
    weights = StageWeights(tuple(chunks[stage] for stage in range(shape.stages)))
    return add_step(add_gathers(add_messages(plan), weights), chunks, reduce), shape


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 3), (3, 2), (4, 4)])
def test_a_plan_with_any_action_removed_or_doubled_is_refused(
    name: str, ranks: int, micro_batches: int
) -> None:
    plan, shape = whole_step(name, ranks, micro_batches)
    check(plan, shapes={0: shape})

    def mutants() -> Iterator[tuple[str, Plan]]:
        for rank, mine in enumerate(plan):
            for i, action in enumerate(mine):
                without, twice = (*mine[:i], *mine[i + 1 :]), (*mine[: i + 1], action, *mine[i + 1 :])
                for how, new in (("without", without), ("twice", twice)):
                    yield f"{how} {action}", Plan((*plan[:rank], new, *plan[rank + 1 :]))  # type: ignore[misc]

    for text, mutant in mutants():
        with pytest.raises(PlanError):
            check(mutant, shapes={0: shape})
            pytest.fail(f"passed {text}")


def lines(*rows: str) -> Plan:
    return Plan.parse("\n".join(rows))


def assert_refused(plan: Plan, words: str, **how: object) -> PlanError:
    with pytest.raises(PlanError, match=words) as caught:
        check(plan, **how)  # type: ignore[arg-type]
    return caught.value


# Rules of compute and messages --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (("0B0 0F0",), "no F of it before"),
        (("0F0 0W0 0I0",), "no I of it before"),
        (("0F0 0I0",), "0W0 is never done"),
        (("0F0 0F1 0B1 0B0",), "out of order"),
        (("0F1 0F0 0B0 0B1",), "out of order"),
        (("1F0 0F0 1B0 0B0",), "comes before what it needs"),
        (("0F0 0B0 0W0",), "done twice"),
        (("0F0 0B0", "0F0 0B0"), "done twice"),
        (("0F0", "0B0"), "not on this rank"),
        (("0F0 0F2 0B0 0B2",), "0F1 is never done"),
        (("0F0 0SEND_F0 0RECV_B0 0B0", "1F0 1RECV_F0 1B0 1SEND_B0"), "no RECV_F of it before"),
        (("0SEND_F0 0F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"), "no F of it before"),
        (("0F0 0SEND_F0 0B0 0RECV_B0", "1RECV_F0 1F0 1B0"), "has no partner"),
        (("0F0 0SEND_F0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"), "has no partner"),
        (("0F0 1F0 0SEND_F0 1B0 0B0",), "no other rank to talk to"),
        (("0F0 0F1.1 0B0 0B1.1",), "0F0.1 is never done"),
        (("0F0.0 0F0.1 0B0.0 0B0.1",), "out of order"),
    ],
)
def test_a_broken_rule_is_named(rows: tuple[str, ...], words: str) -> None:
    assert_refused(lines(*rows), words)


def test_work_outside_the_shape_is_refused() -> None:
    assert_refused(lines("0F0 0B0 0F1 0B1"), "outside 1 stages, 1 micro-batches", shapes={0: Shape(1, 1)})
    assert_refused(lines("0F0 1F0 1B0 0B0"), "outside 1 stages", shapes={0: Shape(1, 1)})


def test_slices_ascend_forward_and_descend_backward() -> None:
    assert check(lines("0F0.0 0F0.1 0B0.1 0B0.0")).live == (2,)


def test_sends_that_wait_for_each_other_are_a_deadlock_and_are_drawn() -> None:
    plan = lines(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
    )
    error = assert_refused(plan, "rank 0 0SEND_F1: waits for ever for rank 1 1SEND_B0")
    assert "rank 0 | 0F0      0SEND_F0 0F1 [0SEND_F1] 0RECV_B0" in str(error)
    assert "rank 1 | 1RECV_F0 1F0      1B0 [1SEND_B0] 1RECV_F1" in str(error)
    posted = lines(str(plan).split("\n")[0], "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1")
    check(posted)


def test_a_receive_posted_ahead_blocks_only_where_receives_block() -> None:
    plan = lines("0F0 0RECV_B0 0SEND_F0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0")
    check(plan)
    assert_refused(plan, "waits for ever", strict=True)


def test_activations_over_the_cap_are_refused() -> None:
    plan = generate("1f1b", 4, 8)
    assert check(plan, cap=4).live == (4, 3, 2, 1)
    assert_refused(plan, "rank 0 holds 4 activations where 3 are allowed", cap=3)


def test_a_frozen_stage_owes_no_weight_gradient_and_nothing_before_the_first_trainable_one() -> None:
    shape = Shape(3, 1, trainable=(False, True, False))
    plan = lines("0F0", "1F0 1B0", "2F0 2I0")
    assert check(plan, shapes={0: shape}).live == (0, 1, 1)
    assert_refused(plan, "0I0 is never done")
    assert_refused(lines("0F0", "1F0 1B0", "2F0 2B0"), "2W0 is not needed", shapes={0: shape})


def test_a_long_plan_is_drawn_around_the_fault() -> None:
    error = assert_refused(
        Plan((*generate("gpipe", 1, 40).only(ActionKind.F), ())), "is never done", shapes={0: Shape(1, 41)}
    )
    assert "actions 0 to 15 of at most 40" in str(error)
    late = [a for a in generate("gpipe", 1, 40)[0] if str(a) != "0B38"]
    assert "0B37" not in str(assert_refused(Plan((tuple(late),)), "never done"))


# Gathers, sums, updates ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("0F0 0UNSHARD 0B0 0RESHARD", "its weights are not gathered"),
        ("0UNSHARD 0F0 0B0", "stay gathered"),
        ("0UNSHARD 0UNSHARD 0F0 0B0 0RESHARD", "is gathered already"),
        ("0F0 0B0 0RESHARD", "is not gathered"),
        ("0UNSHARD#1 0UNSHARD#2 0F0 0RESHARD#2 0B0 0RESHARD#1", "its weights are not gathered"),
        ("0F0 0REDUCE#1 0B0 0UPDATE#1", "its gradient is not complete"),
        ("0F0 0B0 0REDUCE0#1 0F1 0REDUCE1#1 0B1 0UPDATE#1", "its gradient is not complete"),
        ("0F0 0B0 0REDUCE0#1 0F1 0B1 0UPDATE#1", "has no REDUCE for every micro-batch"),
        ("0F0 0B0 0UPDATE#1 0REDUCE#1", "comes before its REDUCE"),
        ("0F0 0B0 0REDUCE#1 0REDUCE#2 0UPDATE#1", "stage 0 chunk 2 has no UPDATE"),
        ("0F0 0B0 0REDUCE#1 0UPDATE#2 0UPDATE#1", "stage 0 chunk 2 has no REDUCE"),
        ("0F0 0B0 0REDUCE#1 0UPDATE#1 0UPDATE#1", "done twice"),
        ("0F0 0UPDATE#1 0B0 0REDUCE#1", "its gradient is not complete"),
    ],
)
def test_a_broken_step_is_named(row: str, words: str) -> None:
    assert_refused(lines(row), words)


def test_a_step_in_one_list() -> None:
    step = add_step(one_stage(2), {0: (0, 1)})
    assert str(step) == "0F0 0B0 0F1 0B1 0REDUCE#1 0REDUCE#0 0UPDATE#0 0UPDATE#1"
    assert check(add_step(one_stage(5), {0: (0, 1, 2)})).live == (1,)
    check(lines("0F0 0B0 0REDUCE0#1 0F1 0B1 0REDUCE1#1 0UPDATE#1"))


def test_an_update_before_the_first_use_belongs_to_the_step_before() -> None:
    check(lines("0UPDATE#1 0F0 0B0 0REDUCE#1"))


def test_a_tie_is_summed_on_every_rank_before_it_is_cut() -> None:
    end = "0TIED_REDUCE#7 0REDUCE#7"
    check(lines(f"0F0 0B0 {end}", f"1F0 1B0 {end.replace('0', '1')}"))
    assert_refused(lines(f"0F0 0B0 {end}"), "meets once on each of two or more ranks")
    three = [f"{r}F0 {r}B0 {r}TIED_REDUCE#7 {r}REDUCE#7" for r in range(3)]
    check(lines(*three))
    assert_refused(
        lines(*three[:2], three[2].replace("2TIED_REDUCE#7 ", "")), "2REDUCE#7: has no TIED_REDUCE before it"
    )
    assert_refused(
        lines("0F0 0B0 0REDUCE#7 0TIED_REDUCE#7", "1F0 1B0 1TIED_REDUCE#7 1REDUCE#7"), "before its REDUCE"
    )
    crossed = lines(
        "0F0 0B0 0TIED_REDUCE#1 0TIED_REDUCE#2 0REDUCE#1 0REDUCE#2",
        "1F0 1B0 1TIED_REDUCE#2 1TIED_REDUCE#1 1REDUCE#1 1REDUCE#2",
    )
    assert_refused(crossed, "waits for ever")


# Chunks and tiers ---------------------------------------------------------------------------------

SPILLED = (
    "0FETCH#0 1FETCH#1 0F0 0EVICT#0 2FETCH#2 1F0 1EVICT#1 2F0 2B0 "
    "1FETCH#1 2EVICT#2 0FETCH#0 1B0 1EVICT#1 0B0 0EVICT#0"
)
"""A model of three stages on one device that holds two of them: breadth first, fetched one ahead."""


def spill(row: str, device_bytes: int = 23) -> int:
    chunks = {(0, i): 10 for i in range(3)}
    memory = Memory(
        home=dict.fromkeys(chunks, "host"),
        uses={(0, i): ((0, i),) for i in range(3)},
        sizes_bytes=chunks,
        activation_bytes={(0, i): 1 for i in range(3)},
        budget_bytes={"device": device_bytes, "host": 30},
    )
    return check(lines(row), memory=memory).bytes[0]["device"]


def test_a_spilled_model_peaks_where_the_plan_says() -> None:
    # Two chunks of 10 bytes and the activations of two stages when chunk 1 comes back for its backward.
    assert spill(SPILLED) == 22
    with pytest.raises(PlanError, match="22 bytes on the device, which has 21"):
        spill(SPILLED, 21)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("1FETCH#1 0F0", "0F0", "chunk 1 is not on the device"),
        ("0F0 0EVICT#0", "0EVICT#0 0F0", "chunk 0 is not on the device"),
        ("0F0 0EVICT#0", "0F0", "22 bytes|31 bytes"),
        ("2F0 2B0", "2FETCH#2 2F0 2B0", "chunk 2 is already on the device"),
        ("0B0 0EVICT#0", "0B0", "ends on device, host and must end on host"),
        ("0B0 0EVICT#0", "0B0 0EVICT#0 0EVICT#0", "chunk 0 is not on the device"),
    ],
)
def test_a_chunk_must_be_there_when_it_is_used_and_gone_when_it_is_not(
    old: str, new: str, words: str
) -> None:
    assert old in SPILLED
    with pytest.raises(PlanError, match=words):
        spill(SPILLED.replace(old, new, 1))


def interleave(subgroups: int, stride: int) -> str:
    """The optimizer step of 2410.21316: every stride-th subgroup on the device, the others on the host."""
    words = []
    for i in range(subgroups):
        if i % stride == stride - 1:
            words += [f"FETCH#{i}", f"UPDATE#{i}", f"EVICT#{i}"]
        else:
            words += [f"UPDATE#{i}@cpu"]
    return " ".join(words)


def optimizer_memory(subgroups: int, device_bytes: int = 12) -> Memory:
    states = {(0, i): 12 for i in range(subgroups)}
    return Memory(dict.fromkeys(states, "host"), {}, states, budget_bytes={"device": device_bytes})


@given(st.integers(1, 12), st.integers(2, 12), st.data())
def test_every_subgroup_is_updated_once_and_flushed_for_any_stride(
    n: int, stride: int, data: st.DataObject
) -> None:
    row, memory = interleave(n, stride), optimizer_memory(n)
    footprint = check(lines(row), memory=memory)
    assert footprint.bytes[0].get("device", 0) == (12 if n >= stride else 0)
    words = row.split()
    lost = data.draw(st.integers(0, len(words) - 1))
    if not words[lost].startswith("UPDATE") or "@cpu" not in words[lost]:
        broken = " ".join(words[:lost] + words[lost + 1 :])
        if words[lost].startswith("UPDATE"):
            # Nothing asks for an update here; that a fetched chunk is not updated is only a waste.
            check(lines(broken), memory=memory)
        else:
            with pytest.raises(PlanError):
                check(lines(broken), memory=memory)


def test_an_update_on_the_device_must_be_written_back() -> None:
    assert_refused(
        lines("FETCH#0 UPDATE#0"),
        r"ends on device, host \(stale\) and must end on host",
        memory=optimizer_memory(1),
    )


def test_an_update_needs_its_chunk_on_the_tier_where_it_runs() -> None:
    assert_refused(lines("UPDATE#0"), "chunk 0 is not on the device", memory=optimizer_memory(1))
    assert_refused(
        lines("FETCH#0 UPDATE#0 EVICT#0 FETCH#1 UPDATE#1@cpu"), "ends on device", memory=optimizer_memory(2)
    )


def test_two_subgroups_do_not_fit_in_one_slot() -> None:
    row = "FETCH#0 FETCH#1 UPDATE#0 UPDATE#1 EVICT#0 EVICT#1"
    check(lines(row), memory=optimizer_memory(2, 24))
    assert_refused(lines(row), "24 bytes on the device, which has 12", memory=optimizer_memory(2))


def test_weights_written_on_the_host_are_stale_on_the_device_until_fetched() -> None:
    # Chunk 0: states, at home on the host; 1: weights, at home on the device; 2: gradient, on the device.
    memory = Memory(
        home={(0, 0): "host", (0, 1): "device", (0, 2): "device"},
        uses={(0, 0): ((0, 1),)},
        reads={(0, 0): ((0, 2),)},
        writes={(0, 0): ((0, 1),)},
    )
    deferred = "0EVICT#2 0UPDATE#0@cpu 0FETCH#2 0FETCH#1"
    check(lines(f"{deferred} 0F0 0B0"), memory=memory)
    assert_refused(
        lines(f"{deferred} 0F0 0B0".replace(" 0FETCH#1", "")), "chunk 1 is stale on the device", memory=memory
    )
    assert_refused(lines("0UPDATE#0@cpu 0FETCH#1 0F0 0B0"), "chunk 2 is not on the host", memory=memory)


def test_a_chunk_passes_through_the_host_on_its_way_from_the_disk() -> None:
    memory = Memory({(0, 4): "disk"}, {(0, 0): ((0, 4),)}, {(0, 4): 8}, budget_bytes={"host": 8, "device": 8})
    row = "0FETCH#4@disk 0FETCH#4 0F0 0B0 0UPDATE#4 0EVICT#4 0EVICT#4@disk"
    assert check(lines(row), memory=memory).bytes[0] == {"disk": 8, "host": 8, "device": 8}
    assert_refused(lines(row.replace("0FETCH#4@disk ", "")), "chunk 4 is not on the host", memory=memory)
    assert_refused(lines(row.replace(" 0EVICT#4@disk", "")), "must end on disk", memory=memory)


def test_activations_can_wait_on_the_host() -> None:
    row = "0F0 0EVICT0 0F1 0EVICT1 0FETCH0 0B0 0FETCH1 0B1"
    memory = Memory({}, {}, activation_bytes={(0, 0): 5}, budget_bytes={"device": 5})
    assert check(lines(row), memory=memory, cap=1).live == (1,)
    assert_refused(
        lines(row.replace(" 0FETCH1", "")),
        "activations of stage 0 micro-batch 1 slice 0 is not on the device",
    )
    assert_refused(lines("0F0 0F1 0B0 0B1"), "10 bytes on the device, which has 5", memory=memory)


def test_several_models_share_a_list() -> None:
    row = "0F0 t1:0F0 t1:0F1 0B0 t1:0B0 0F1 0B1 t1:0B1"
    assert check(lines(row)).live == (3,)
    assert_refused(lines(row.replace("t1:0B0 0F1 0B1 t1:0B1", "t1:0B1 0F1 0B1 t1:0B0")), "out of order")
    with pytest.raises(PlanError, match="t1:0B1|t1:0W1 is never done"):
        check(lines(row.replace(" t1:0B1", "")))
    assert_refused(lines(row), "no such task", shapes={0: Shape(1, 2)})


# Task 0 stays on device 0, task 2 on device 1; task 1 runs a mini-batch on each, and its update lies between.
WRAPPED = (
    "0F0 0B0 0REDUCE0#0 0UPDATE0#0 t1:0F0 t1:0B0 t1:0REDUCE0#0 t1:0UPDATE0#0",
    "t2:0F0 t2:0B0 t2:0REDUCE0#0 t2:0UPDATE0#0 t1:0F1 t1:0B1 t1:0REDUCE1#0 t1:0UPDATE1#0",
)


def test_a_model_moves_between_devices_with_its_update_between() -> None:
    check(lines(*WRAPPED))
    spans = simulate(
        lines(*WRAPPED), lambda a: {"F": 1.0, "B": 2.0 + 4 * (a.task == 0)}.get(a.kind, 0.0)
    ).spans
    start = {str(s.action): s.start_s for s in spans}
    assert start["t1:0F0"] == 7 and start["t1:0F1"] == 10
    assert_refused(
        lines(WRAPPED[0].replace(" t1:0UPDATE0#0", ""), WRAPPED[1]), "moves here from rank 0 with no UPDATE"
    )
    assert_refused(lines(WRAPPED[0], WRAPPED[1].replace(" t1:0UPDATE1#0", "")), "has no UPDATE")
    assert_refused(
        lines("0F0 0B0 0F1 0B1 0REDUCE0#0 0UPDATE0#0 0REDUCE1#0 0UPDATE1#0"),
        "before the update that it needs",
    )
    assert_refused(lines("0F0 0B0 0UPDATE0#0 0REDUCE0#0"), "comes before its REDUCE")


def test_two_models_with_one_device_take_turns_in_its_memory() -> None:
    memory = Memory(
        home={(0, 0): "host", (1, 0): "host"},
        uses={(0, 0): ((0, 0),), (1, 0): ((1, 0),)},
        sizes_bytes={(0, 0): 6, (1, 0): 8},
        budget_bytes={"device": 8},
    )
    row = "0FETCH#0 0F0 0B0 0EVICT#0 t1:0FETCH#0 t1:0F0 t1:0B0 t1:0EVICT#0"
    assert check(lines(row), memory=memory).bytes[0]["device"] == 8
    early = "0FETCH#0 t1:0FETCH#0 0F0 0B0 0EVICT#0 t1:0F0 t1:0B0 t1:0EVICT#0"
    assert_refused(lines(early), "task 1 chunk 0: 14 bytes on the device, which has 8", memory=memory)
