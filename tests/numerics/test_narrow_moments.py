"""bf16 moments: half the bytes, the same bits wherever state is cut and rests, and a loss that stays beside that of
float32 ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from colossal_lite.config.config import Config
from colossal_lite.config.errors import ConfigError
from colossal_lite.kernels import TORCH, Draws
from colossal_lite.numerics.optimizers import Group, rule_of
from colossal_lite.planner import planner
from colossal_lite.zero import optimizer as chunk_optimizer
from tests.shared.parity import Case, start
from tests.shared.pool import RankEnv, run_world
from tests.zero.test_zero import SMALL, VOCABULARY, assert_same_bits, bits, loads, saves

NARROW = dict(type="adamw", lr=1e-2, betas=(0.9, 0.999), moments="bf16")
WIDE = NARROW | dict(moments="auto")
CASE = Case(
    layers=2, vocabulary=VOCABULARY, chunk_bytes=SMALL // 2, steps=2, ragged=True,
    config=dict(precision="bf16", optimizer=NARROW, zero=dict(stage=0, sum_order="ordered"), clip_grad_norm=0.05),
)  # fmt: skip


def under(case: Case, **config: Any) -> Case:
    return replace(case, config={**case.config, **config})


# ---- the same bits ----

SPLIT = dict(precision=dict(dtype="bf16", master="split"))
HALF_AWAY = dict(placement="static", host_fraction=dict(weights=0.5, gradients=1.0, optimizer=0.5))
ELSEWHERE: dict[str, dict[str, Any]] = {
    "1, on the host, other chunks": dict(
        zero=dict(stage=1, sum_order="ordered"), memory=dict(placement="host")
    ),
    "2, on disk": dict(zero=dict(stage=2, sum_order="ordered"), memory=dict(placement="disk")),
    "2, on disk, updated on the host": dict(
        zero=dict(stage=2, sum_order="ordered"), memory=dict(placement="disk", update_on="host")
    ),
    "3, half of it on the host, split masters": dict(
        zero=dict(stage=3, sum_order="ordered"), memory=HALF_AWAY | dict(update_on="host"), **SPLIT
    ),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_narrow_moments_have_the_same_bits_at_any_stage_chunk_size_and_placement(
    name: str, tmp_path: Path
) -> None:
    config = dict(ELSEWHERE[name])
    if config["memory"].get("placement") == "disk":
        config["memory"] = config["memory"] | dict(disk_dir=str(tmp_path))
    other = replace(under(CASE, **config), chunk_bytes=None if "other chunks" in name else CASE.chunk_bytes)
    truth, found = run_world(bits, 2, CASE), run_world(bits, 2, other)
    assert_same_bits(found, truth)
    states = found[0][1]
    assert all(
        v.dtype == torch.bfloat16 for state in states.values() for k, v in state.items() if k != "step"
    )


def counted_by_chunk(env: RankEnv, case: Case) -> Any:
    def moved(key: Any, first: int) -> Draws:
        return Draws(key, 0)

    with patch.object(chunk_optimizer, "Draws", moved):
        return bits(env, case)


def test_words_that_a_shard_counts_for_itself_are_told() -> None:
    sharded = under(CASE, zero=dict(stage=1, sum_order="ordered"))
    with pytest.raises(AssertionError):
        assert_same_bits(run_world(counted_by_chunk, 2, sharded), run_world(bits, 2, CASE))


# ---- bytes ----


def held(
    env: RankEnv, case: Case
) -> tuple[dict[tuple[str, str], tuple[int, int | None]], int, dict[str, int]]:
    with env.launch(case.full_config) as context:
        engine = start(case, context)
        rows = {(r.kind, r.tier): (r.now_bytes, r.forecast_bytes) for r in engine.memory_report()}
        made = planner.plan(
            context.config, case.model, batch=case.global_batch, sequence=case.tokens,
            world_size=case.world_size, rank=env.rank, one_host=context.mesh.shares_memory,
        )  # fmt: skip
        owned = sum(chunk.owned[1] - chunk.owned[0] for chunk in engine._chunks)
        return rows, owned, {row.kind: row.bytes for row in made.memory}


@pytest.mark.parametrize("placement", ["device", "host"])
def test_narrow_moments_take_four_bytes_beside_a_parameter_and_the_plan_says_so(placement: str) -> None:
    case = under(CASE, zero=dict(stage=1), memory=dict(placement=placement))
    for rows, owned, predicted in run_world(held, 2, case):
        tier = "cpu" if placement == "device" else "host"
        assert rows["optimizer", tier] == (4 * owned, 4 * owned)
        assert predicted["optimizer"] == 4 * owned
        if placement == "host":  # three slots for the largest record: moments, and float32 masters
            assert rows["visiting", "cpu"][0] == rows["visiting", "cpu"][1] == predicted["visiting"]


# ---- checkpoints ----


def assert_nearest(found: dict[str, dict[str, Any]], saved: dict[str, dict[str, Any]]) -> None:
    """What was saved, in the dtypes that it was loaded in."""
    for name, values in saved.items():
        assert all(
            torch.equal(found[name][kind], v.to(found[name][kind].dtype)) for kind, v in values.items()
        )


def test_checkpoints_go_from_narrow_moments_to_wide_ones_exactly_and_back_to_the_nearest(
    tmp_path: Path,
) -> None:
    narrow, wide = under(CASE, zero=dict(stage=3)), under(CASE, optimizer=WIDE, zero=dict(stage=0))
    _, state = run_world(saves, 2, narrow, str(tmp_path / "narrow"))[0]
    _, of_wide = run_world(saves, 1, wide, str(tmp_path / "wide"))[0]
    for _, found in run_world(loads, 1, replace(wide, world_size=1), str(tmp_path / "narrow")):
        assert_nearest(found, state)
        assert found["token.weight"]["exp_avg"].dtype == torch.float32
    for _, found in run_world(loads, 2, narrow, str(tmp_path / "wide")):
        assert_nearest(found, of_wide)
        assert found["token.weight"]["exp_avg"].dtype == torch.bfloat16


# ---- training ----


def losses(env: RankEnv, case: Case) -> list[float]:
    with env.launch(case.full_config) as context:
        engine = start(case, context)
        return [float(engine.train_step(case.batch(step % 4)).loss) for step in range(50)]


def test_a_loss_of_fifty_steps_stays_within_two_percent_of_that_of_wide_moments() -> None:
    case = replace(under(CASE, precision="fp32", optimizer=WIDE), world_size=1)
    wide, narrow = (run_world(losses, 1, under(case, optimizer=some))[0] for some in (WIDE, NARROW))
    assert wide[-1] < 0.7 * wide[0]
    assert narrow != wide
    furthest = max(abs(a - b) / a for a, b in zip(wide, narrow, strict=True))
    assert furthest < 0.02, furthest


@pytest.mark.parametrize("kind", ["adam", "adamw"])
def test_a_first_step_with_narrow_moments_is_torchs_own(kind: str) -> None:
    """The step uses moments that are not rounded yet, so its numbers are those of float32 ones."""
    start, gradient = torch.randn(2, 512, generator=torch.Generator().manual_seed(0))
    theirs = torch.nn.Parameter(start.clone())
    theirs.grad = gradient.clone()
    own = dict(adam=torch.optim.Adam, adamw=torch.optim.AdamW)[kind]
    own([theirs], lr=0.1, betas=(0.8, 0.9), weight_decay=0.5).step()
    group = Group("*", kind, 0.1, (0.8, 0.9), 1e-8, 0.5, 0.0, False, "bf16")
    rule, ours = rule_of(group), start.clone()
    state = {name: torch.zeros(512, dtype=rule.narrow) for name in rule.states}
    rule.update(
        TORCH, group, ours, gradient * 4, state, step=1, lr=0.1, grad_scale=4.0, draws=Draws((1, 2), 0)
    )
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-6, atol=1e-6)


# ---- refusals ----


def test_narrow_moments_are_refused_beside_float64_and_said_to_have_no_effect_elsewhere() -> None:
    for given in (NARROW, WIDE | dict(groups=[dict(match="*.bias", moments="bf16")])):
        with pytest.raises(ConfigError, match=r"optimizer.*moments = 'bf16': .*float64"):
            Config.load(dict(precision="fp64", optimizer=given)).check_built()
    (line,) = Config.load(dict(optimizer=dict(type="sgd", moments="bf16"))).warnings()
    assert "optimizer.moments" in line and "no effect" in line
