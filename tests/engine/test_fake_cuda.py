"""On a CUDA device that is not there a step has no mixed devices, waits once for it, and copies from pinned memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.shared.fake_rank import LLAMA, Case, case, made_guard, rows_of, stuck


def ring(rank: int, fault: str = "none") -> Case:
    return case(2, rank, fault=fault, parallel=dict(sequence=dict(size=2, mode="ring")))


def tensor(size: int, mode: str, **more: Any) -> dict[str, Any]:
    return dict(parallel=dict(tensor=dict(size=size, mode=mode, **more)))


ROOM = (70 << 30) * 16 // 17
"""Of a device that has 70 of 80 GiB free."""
PIPELINE = dict(pipeline=dict(size=2, micro_batches=2))
QUICK: dict[str, Case] = {
    "llama, host, accumulated": case(model=LLAMA, memory=dict(placement="host"), gradient_accumulation=2),
    "zero 3, dropout": case(2, 1, dict(dropout=0.1), zero=dict(stage=3)),
    "1d llama": case(2, 1, LLAMA, **tensor(2, "1d")),
    "fp64": case(precision="fp64"),
    **{f"pipeline/{rank}": case(2, rank, dict(layers=2), parallel=PIPELINE) for rank in range(2)},
    **{f"GPT of {layers}": case(model=dict(layers=layers)) for layers in (2, 3)},
    **{f"Llama of {layers}": case(model=LLAMA | dict(layers=layers)) for layers in (2, 3)},
    "ring 0": ring(0),
    "ring 1": ring(1),
    "too near": case(memory=dict(placement="auto", device_budget="70GiB")),
    "as told": case(memory=dict(placement="auto", device_budget=ROOM)),
    "host tensor": case(fault="host tensor"),
    "read number": case(fault="read number"),
    "pageable batch": case(fault="pageable batch"),
}
FAULTY = ("too near", "host tensor", "read number", "pageable batch")
LONG: dict[str, Case] = {
    "alone": case(),
    "in turn 0": ring(0, "exchange in turn"),
    "in turn 1": ring(1, "exchange in turn"),
    "torch": case(kernels="torch"),
    "fp16": case(precision="fp16"),
    "split": case(precision=dict(dtype="bf16", master="split")),
    "narrow moments": case(optimizer=dict(type="adamw", moments="bf16")),
    "full": case(activation_checkpoint="full"),
    "selective": case(activation_checkpoint="selective"),
    "updated on the host": case(memory=dict(placement="host", update_on="host")),
    "budget": case(memory=dict(placement="auto", device_budget="1GiB"), zero=dict(stage=3)),
    "sgd": case(optimizer=dict(type="sgd", lr=0.1)),
    "lion": case(optimizer=dict(type="lion", lr=0.1)),
    **{f"zero {stage}": case(2, 1, zero=dict(stage=stage)) for stage in (0, 1, 2)},
    "zero 3, host": case(2, 0, zero=dict(stage=3), memory=dict(placement="host")),
    "ordered": case(2, 1, zero=dict(stage=1, sum_order="ordered")),
    "2d": case(4, 1, **tensor(4, "2d")),
    "2.5d": case(8, 5, **tensor(8, "2.5d", depth=2)),
    "3d": case(8, 3, **tensor(8, "3d")),
    "ulysses": case(2, 1, parallel=dict(sequence=dict(size=2, mode="ulysses"))),
    "allgather_kv": case(2, 1, parallel=dict(sequence=dict(size=2, mode="allgather_kv"))),
    "usp": case(4, 1, parallel=dict(sequence=dict(size=4, mode="usp", ulysses=2))),
}


@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return made_guard(tmp_path_factory.mktemp("guard"))
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def rows(guard: Path) -> dict[str, Any]:
    return rows_of(guard, QUICK)


def assert_waits_once(name: str, row: dict[str, Any]) -> None:
    """Where the totals of the step are read."""
    assert "error" not in row, (name, row)
    places = {place.split(" at ")[1].split(":")[0]: count for place, count in row["waits"].items()}
    assert places == {"communicator.py": 1}, (name, row["waits"])
    assert sum(row["evaluated"].values()) == 1, (name, row["evaluated"])
    assert not row["pageable"] and row["kernels"], (name, row)


@pytest.mark.timeout(600)
def test_a_step_waits_for_the_device_at_its_totals_and_copies_from_pinned_memory(
    rows: dict[str, Any],
) -> None:
    for name in QUICK.keys() - set(FAULTY):
        assert_waits_once(name, rows[name])
        assert rows[name]["triton"] or name == "fp64", name
        assert rows[name]["saved"]["saved"] > 10 < rows[name]["saved"]["loaded"]


def test_times_of_actions_and_waits_are_those_of_events_on_the_device(rows: dict[str, Any]) -> None:
    """Whose clock goes on by whole milliseconds, which no clock of the host does."""
    for name in QUICK.keys() - set(FAULTY):
        spans, waited = rows[name]["timed"]
        assert spans and all(round(one) >= 1 and abs(one - round(one)) < 1e-3 for one in spans), name
        assert waited >= 1 or QUICK[name]["ranks"] == 1, name
        if "dropout" not in name:  # whose ranks tell each other their samples by way of the host
            assert waited == pytest.approx(round(waited), abs=1e-6), name


def test_initial_values_are_drawn_on_the_device_a_launch_for_millions(rows: dict[str, Any]) -> None:
    for name in QUICK.keys() - set(FAULTY):
        on_host, launches = rows[name]["drawn"]
        assert on_host == 0 and 0 < launches <= 16, (name, rows[name]["drawn"])


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_so_it_does_in_every_mode(guard: Path) -> None:
    rows = rows_of(guard, LONG)
    in_turn = {rank: rows.pop(f"in turn {rank}")["messages"] for rank in range(2)}
    assert stuck(in_turn) == {0: [("send", 1)], 1: [("send", 0)]}
    for name, row in rows.items():
        assert_waits_once(name, row)


def test_a_ring_goes_round_on_nccl_and_would_not_message_by_message(rows: dict[str, Any]) -> None:
    logs = {rank: rows[f"ring {rank}"]["messages"] for rank in range(2)}
    assert all(logs.values()) and stuck(logs) == {}
    in_turn = {
        rank: [(group, [one]) for group, at_once in log for one in at_once] for rank, log in logs.items()
    }
    assert stuck(in_turn) == {0: [("send", 1)], 1: [("send", 0)]}


def test_a_budget_leaves_room_for_drivers_communicators_and_gaps(rows: dict[str, Any]) -> None:
    assert (
        f"at most {ROOM}" in rows["too near"]["error"] and "hold 10,737,418,240" in rows["too near"]["error"]
    )
    assert "error" not in rows["as told"]


def test_no_group_is_made_beside_the_default_one_of_all_ranks(rows: dict[str, Any]) -> None:
    for name in QUICK.keys() - set(FAULTY):
        assert all(len(ranks) < QUICK[name]["ranks"] for ranks in rows[name]["groups"]), (
            name,
            rows[name]["groups"],
        )


def test_blocks_of_a_ring_take_flash_attention_both_ways_and_no_kernel_of_ours(rows: dict[str, Any]) -> None:
    for rank in range(2):
        names = " ".join([*rows[f"ring {rank}"]["kernels"], *rows[f"ring {rank}"]["triton"]])
        assert "flash_attention.default" in names and "flash_attention_backward.default" in names
        assert "_attend" not in names


def test_a_layer_launches_at_most_forty_kernels(rows: dict[str, Any]) -> None:
    """Of a step: what a model of three layers launches beyond one of two."""
    for family in ("GPT", "Llama"):
        two, three = (
            sum(sum(rows[f"{family} of {layers}"][key].values()) for key in ("kernels", "triton"))
            for layers in (2, 3)
        )
        assert 20 < three - two <= 40, (family, three - two)


def test_planted_faults_are_seen(rows: dict[str, Any]) -> None:
    assert "device" in rows["host tensor"]["error"]
    assert any("engine.py" in place.split(" < ")[0] for place in rows["read number"]["waits"])
    assert rows["pageable batch"]["pageable"]
    assert any("loader.py" in place for place in rows["pageable batch"]["waits"])
