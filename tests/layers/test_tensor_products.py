"""1D tensor parallelism beside everything that a step may do: every pair of choices meets, and once, everything.

The campaign's products are split by -k: `pytest -m campaign tests/layers/test_tensor_products.py -k "data2-tensor4"`.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest

from tests.shared.covering import covering_array
from tests.shared.parity import Case, assert_no_further, assert_parity

FAMILIES = ("gpt2", "llama", "hf-gpt2", "hf-llama")
FACTORS: dict[str, tuple[Any, ...]] = {
    "data": (1, 2, 4),
    "tensor": (1, 2, 4),
    "cut": (True, False),
    "family": FAMILIES,
    "tied": (True, False),
    "grouped": (True, False),
    "dropout": (0.0, 0.2),
    "parts": (1, 2),
    "checkpoint": ("none", "selective", "full"),
    "clip": (None, 0.05),
    "trained": ("all", "some", "adapters"),
}
# One trained and one frozen parameter of each kind: of a column-wise and a row-wise linear, and of a norm.
FROZEN = {
    "gpt2": ("blocks.0.mlp.up.weight", "blocks.1.mlp.down.weight", "blocks.0.norm1.weight"),
    "llama": ("blocks.0.mlp.gate_up.weight", "blocks.1.mlp.down.weight", "blocks.0.norm1.weight"),
    "hf-gpt2": (
        "transformer.h.0.mlp.c_fc.weight",
        "transformer.h.1.mlp.c_proj.weight",
        "transformer.h.0.ln_1.weight",
    ),
    "hf-llama": (
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.1.mlp.down_proj.weight",
        "model.layers.0.input_layernorm.weight",
    ),
}


def is_legal(row: Mapping[str, Any]) -> bool:
    """What a model has not, or the product refuses by name."""
    family, grouped = row.get("family"), row.get("grouped")
    if family == "hf-llama" and (row.get("dropout") or grouped is False):
        return False  # it has no dropout, and ours of it has two key heads
    if family == "hf-gpt2" and grouped:
        return False
    return not (row.get("trained") == "adapters" and row.get("tensor") == 4 and grouped)


def is_candidate(row: Mapping[str, Any]) -> bool:
    """Of the legal rows so few that the search is quick, and all pairs of choices still occur; 16 ranks seldom."""
    if row["data"] * row["tensor"] == 16 and (row["family"] != "gpt2" or row["parts"] == 1):
        return False
    is_even = (row["tied"] ^ (row["parts"] == 2)) == bool(row["clip"])
    has_its_dropout = row["family"] == "hf-llama" or (row["cut"] ^ row["tied"]) == bool(row["dropout"])
    return is_legal(row) and is_even and has_its_dropout


def case_of(row: Mapping[str, Any], precision: str = "fp64") -> Case:
    family = row["family"]
    config: dict[str, Any] = dict(
        precision=precision,
        gradient_accumulation=row["parts"],
        activation_checkpoint=row["checkpoint"],
    )
    config |= dict(clip_grad_norm=row["clip"]) if row["clip"] else {}
    return Case(
        family,
        tied=row["tied"],
        dropout=row["dropout"],
        world_size=row["data"] * row["tensor"],
        config=config,
        global_batch=5,
        ragged=True,
        steps=2,
        tensor=row["tensor"],
        sequence_parallel=row["cut"],
        build="module" if family.startswith("hf-") else "callable",
        frozen=FROZEN[family] if row["trained"] == "some" else (),
        adapters=2 if row["trained"] == "adapters" else 0,
        kv_heads=None if family.startswith("hf-") else (2 if row["grouped"] else 4),
    )


def title(row: Mapping[str, Any]) -> str:
    words = [
        f"data{row['data']}", f"tensor{row['tensor']}", "cut" if row["cut"] else "whole", row["family"],
        "tied" if row["tied"] else "untied", "grouped" if row["grouped"] else "full_heads",
        "dropout" if row["dropout"] else "plain", f"{row['parts']}parts", row["checkpoint"],
        "clipped" if row["clip"] else "unclipped", row["trained"],
    ]  # fmt: skip
    return "-".join(words)


ROWS = covering_array(FACTORS, is_candidate)


@pytest.mark.parametrize("row", ROWS, ids=title)
def test_every_gradient_is_the_serial_one_where_choices_meet(row: Mapping[str, Any]) -> None:
    assert_parity(case_of(row))


NARROW = [row for row in ROWS if row["tensor"] > 1 and row["data"] * row["tensor"] <= 4]


@pytest.mark.parametrize("row", NARROW[:2], ids=title)
def test_float32_is_within_1e_5(row: Mapping[str, Any]) -> None:
    assert assert_parity(case_of(row, "fp32")) <= 1e-5


# Frozen weights have no float32 masters: read back, they are as far from the truth as they have been rounded.
@pytest.mark.parametrize("row", [row for row in NARROW if row["trained"] == "all"][:2], ids=title)
def test_bf16_is_no_further_from_the_truth_than_a_plain_run(row: Mapping[str, Any]) -> None:
    assert_no_further(case_of(row, "bf16"))


# ---- full products ----


def whole_product(**given: tuple[Any, ...]) -> list[dict[str, Any]]:
    factors = FACTORS | given
    rows = (dict(zip(factors, values, strict=True)) for values in product(*factors.values()))
    return [row for row in rows if is_legal(row)]


def _hard(row: dict[str, Any]) -> dict[str, Any]:
    """With dropout where the model has any."""
    return row | dict(dropout=0.0 if row["family"] == "hf-llama" else 0.2)


HARD: dict[str, tuple[Any, ...]] = dict(dropout=(0.0,), parts=(2,), clip=(0.05,))
PARTLY: dict[str, tuple[Any, ...]] = HARD | dict(
    checkpoint=("none", "selective"), tied=(False,), trained=("some", "adapters")
)
MESHES = [_hard(row) for row in whole_product(**HARD, trained=("all",))]
TRAINED = [_hard(row) for row in whole_product(**PARTLY)]


@pytest.mark.campaign
@pytest.mark.parametrize("row", MESHES + TRAINED, ids=title)
def test_every_gradient_is_the_serial_one_in_all(row: Mapping[str, Any]) -> None:
    assert_parity(case_of(row))


@pytest.mark.campaign
@pytest.mark.parametrize("row", [row for row in MESHES if row["tied"]], ids=title)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_mesh_in_other_precisions(row: Mapping[str, Any], precision: str) -> None:
    if precision == "bf16":
        assert_no_further(case_of(row, "bf16"))
    else:
        assert assert_parity(case_of(row, "fp32")) <= 1e-5
