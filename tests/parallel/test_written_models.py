"""Models as people write them train unchanged under plan="auto" in tensor 1d: exact, or left whole and told so."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import colossal_lite as cl
from colossal_lite.config.parallel_schema import TensorConfig
from colossal_lite.distributed.emulated_ranks import EmulatedWorld
from colossal_lite.distributed.mesh import Mesh
from colossal_lite.launcher.command import main
from colossal_lite.layers.whole_sizes import Cut, CutError, Part, viewed
from colossal_lite.parallel import plan_proof, swap_proof
from colossal_lite.parallel.auto_plan import shares_of
from colossal_lite.parallel.parallelize import Parallelized, parallelize
from colossal_lite.sharding.mesh_layout import MeshLayout
from tests.shared import written_models
from tests.shared.pool import RankEnv, run_world
from tests.shared.written_models import HEADS, LEFT_WHOLE, STYLES, TOKENS, WIDTH, WORDS

COLWISE = {
    "fused, tied": "colwise:qkv",
    "fused, dropout": "colwise:1+1+1",
    "interleaved, ALiBi": "colwise",
    "einops": "colwise:2+1+1",
}


def parallel(model: nn.Module, plan: Any = "auto", **tensor: Any) -> Parallelized:
    layout = MeshLayout.build(tensor=TensorConfig(**tensor).axis())
    mesh = Mesh.emulated(layout, EmulatedWorld(1.0))[0]
    return parallelize(model, mesh, plan, sequence_parallel=tensor.get("sequence_parallel", "auto"))


# ---- roles and forms: in one process, by the proof ----


@pytest.mark.parametrize("cut", [True, False], ids=["cut", "whole"])
@pytest.mark.parametrize("style", STYLES)
def test_every_style_is_proven_by_roles_from_a_run(style: str, cut: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is left whole
        made = parallel(STYLES[style](), size=2, sequence_parallel=cut)
    roles = list(made.plan.values())
    assert roles.count("rowwise") == 2 and sum(role.startswith("colwise") for role in roles) >= 2
    assert COLWISE.get(style, "colwise") in roles
    assert made.form.sequence_parallel == cut and made.form.whole_sizes


def test_a_linear_of_a_block_that_is_as_wide_as_the_words_is_no_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written_models, "WORDS", 4 * WIDTH)
    made = parallel(STYLES["einops"](), size=2)
    assert made.plan["transformer.h.*.mlp.w12"] == "colwise:1+1" and made.plan["lm_head"] == "lm_head"


def test_a_plan_that_was_printed_can_be_given() -> None:
    found = parallel(STYLES["einops"](), size=2)
    assert parallel(STYLES["einops"](), dict(found.plan), size=2).form == found.form


def test_a_model_without_a_list_of_blocks_is_sharded_at_its_embedding_and_its_head() -> None:
    body = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH)
    made = parallel(nn.Sequential(nn.Embedding(WORDS, WIDTH), *body, nn.Linear(WIDTH, WORDS)), size=2)
    assert made.plan["0"] == "embedding" and made.plan["5"] == "lm_head"
    assert {made.plan["2"], made.plan["4"]} == {"replicate"}


def test_key_heads_that_ranks_share_are_narrowed_from_whole_ones() -> None:
    made = parallel(STYLES["grouped, rotary"](), size=4)
    assert made.form.whole_sizes and made.plan["transformer.h.*.attn.wk"] == "replicate"
    assert made.plan["transformer.h.*.attn.wq"] == "colwise"


def test_heads_that_do_not_divide_are_left_whole_and_told() -> None:
    with pytest.warns(UserWarning, match="left whole, exact but with no saving: .*attn.*need the same rows"):
        made = parallel(STYLES["fused, tied"](), size=8)
    assert made.plan["transformer.h.*.attn.c_attn"] == "replicate"
    assert made.plan["transformer.h.*.mlp.c_fc"] == "colwise"


def test_an_attention_that_is_left_whole_sees_whole_sequences() -> None:
    with pytest.warns(UserWarning, match="left whole, exact but with no saving: .*attn.heads.0.key"):
        made = parallel(LEFT_WHOLE["heads apart, dropout"](), size=2, sequence_parallel=True)
    assert made.form.sequence_parallel and made.plan["transformer.h.*.attn"] == "replicate:whole"
    assert made.plan["transformer.h.*.mlp.c_fc"] == "colwise"


@pytest.mark.parametrize(
    ("owners", "parts", "shares"),
    [
        ([0, 0, 1, 1], 2, (1,)),
        ([0, 1] * 3, 2, (1, 1, 1)),
        ([0] * 4 + [1] * 4 + [0, 1] * 2, 2, (4, 1, 1)),
        ([0, -1, 1, 1, 0, 0, -1, 1], 2, (1, 1)),  # units that were off in the run
        ([0, 1, 1, 0], 2, None),
        ([0, 0, 0, 1], 2, None),
    ],
)
def test_blocks_of_rows_are_read_from_the_parts_that_need_them(
    owners: list[int], parts: int, shares: tuple[int, ...] | None
) -> None:
    assert shares_of(owners, parts) == shares


# ---- what code sees ----


def part(whole: Tensor, cut: Cut) -> Part:
    blocks = whole.unflatten(cut.dim, (-1, cut.blocks[0]))
    own = cut.blocks[0] // cut.parts
    mine = blocks.narrow(cut.dim + 1, cut.part * own, own).flatten(cut.dim, cut.dim + 1)
    return Part.of(mine, Mesh.serial().axis(), cut)


def test_a_part_has_the_sizes_of_the_whole_and_computes_its_part() -> None:
    whole = torch.randn(2, 3, 3 * WIDTH)
    x = part(whole, Cut(2, 3 * WIDTH, (WIDTH,), part=1, parts=2))
    B, T, C = x.shape
    assert (B, T, C) == whole.shape and x.size(-1) == 3 * WIDTH and x.numel() == whole.numel()
    q, _, v = x.split(WIDTH, dim=2)
    heads = q.view(B, T, HEADS, C // 3 // HEADS).transpose(1, 2)
    right = whole[..., :WIDTH].view(B, T, HEADS, -1).transpose(1, 2)
    assert heads.shape == right.shape and torch.equal(heads.as_subclass(Tensor), right[:, HEADS // 2 :])
    scores = heads @ v.view(B, T, HEADS, -1).transpose(1, 2).transpose(-2, -1)
    biased = scores + torch.arange(HEADS).view(1, HEADS, 1, 1)  # whole on every rank
    assert torch.equal((biased - scores).as_subclass(Tensor)[0, :, 0, 0].round(), torch.tensor([2.0, 3.0]))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: x.view(2, 3, 6, 8), r"6 heads or features do not divide into 4 parts"),
        (lambda x: x.split(20, dim=2), "are not whole blocks of the linear's rows"),
        (lambda x: x[..., 5], "an index int along heads or features"),
        (lambda x: x.sum(-1), "cannot be computed on a part"),
        (lambda x: x.softmax(-1), "softmax over heads or features"),
        (lambda x: x.cumsum(dim=2), "cumsum over heads or features"),
        (lambda x: float(x.flatten()[:1]), "are not whole blocks"),
        (lambda x: bool(x), "reads values of which a rank has a part"),
    ],
)
def test_what_cannot_be_computed_on_a_part_is_refused_with_the_line_of_the_code(
    call: Any, words: str
) -> None:
    x = part(torch.randn(2, 3, 48), Cut(2, 48, (48,), part=0, parts=4))
    with pytest.raises(CutError, match=words) as error:
        call(x)
    assert "test_written_models.py" in str(error.value)


def test_a_view_keeps_the_cut_where_it_lies() -> None:
    fused = Cut(2, 48, (16,), 0, 2)
    assert viewed((2, 5, 48), fused, (2, 5, 3, 4, 4)) == Cut(3, 4, (4,), 0, 2)
    heads = Cut(1, 4, (4,), 0, 2)
    assert viewed((2, 4, 5, 4), heads, (8, 5, 4)) == Cut(0, 8, (4,), 0, 2)
    unequal = Cut(2, 32, (16, 8, 8), 0, 2)
    assert viewed((2, 5, 32), unequal, (2, 5, 8, 4)) == Cut(2, 8, (4, 2, 2), 0, 2)


# ---- on real ranks ----


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids, labels = (torch.randint(WORDS, (4, TOKENS), generator=generator) for _ in range(2))
    return ids, labels


def trained(env: RankEnv, style: str, parallel: Mapping[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    config = dict(
        precision="fp64", optimizer=dict(type="sgd", lr=0.5), seed=1, timeout_s=60, parallel=dict(parallel)
    )
    with env.launch(config) as context:
        engine = cl.initialize((STYLES | LEFT_WHOLE)[style](), context=context)
        losses = [float(engine.train_step(batch(step)).loss) for step in range(3)]
        return losses, engine.full_state_dict()


@pytest.mark.parametrize(
    ("style", "tensor"),
    [
        ("fused, tied", dict(size=2)),
        ("fused, dropout", dict(size=2)),
        ("fused, dropout", dict(size=2, sequence_parallel=False)),
        ("grouped, rotary", dict(size=4)),
        ("interleaved, ALiBi", dict(size=2)),
        ("einops", dict(size=2)),
        ("heads apart, dropout", dict(size=2, sequence_parallel=True)),
    ],
    ids=str,
)
def test_a_model_as_written_trains_as_on_one_rank_with_its_own_dropout(
    style: str, tensor: dict[str, Any]
) -> None:
    ((losses, weights),) = run_world(trained, 1, style, {})
    for theirs, found in run_world(trained, tensor["size"], style, dict(tensor=tensor)):
        assert theirs == pytest.approx(losses, rel=1e-12)
        for name, expected in weights.items():
            assert float((found[name] - expected).norm()) < 1e-12 * float(expected.norm()), name


# ---- the command ----


def test_the_command_prints_a_plan_that_python_reads(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from tests.shared.written_models import STYLES\n\n\ndef build():\n    return STYLES['einops']()\n"
    )
    assert main(["roles", f"{file}:build"]) == 0
    scope: dict[str, Any] = {}
    exec(capsys.readouterr().out, scope)
    assert scope["plan"]["transformer.h.*.attn.qkv"] == "colwise:2+1+1"
    assert main(["roles", f"{file}:missing"]) == 2
    assert "has no function missing" in capsys.readouterr().err
    file.write_text("def build():\n    raise KeyError('no such size')\n")
    assert main(["roles", f"{file}:build"]) == 2
    told = capsys.readouterr().err
    assert "KeyError: 'no such size'" in told and "Traceback" not in told


class Experts(nn.Module):
    """Each token goes through one of many small linears, picked by values that a cut changes nothing of."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.Flatten(0, -1), nn.Unflatten(0, (-1, 2 * width)),
                          nn.Linear(2 * width, width))
            for _ in range(count)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        picked = self.router(flat).argmax(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            at = torch.where(picked == number)[0]
            if len(at):
                out = out.index_add(0, at, expert(flat[at]))
        return x + out.view_as(x)


class ExpertModel(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.token = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Experts(WIDTH, count) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


def test_many_experts_that_cannot_be_cut_take_few_proofs(monkeypatch: pytest.MonkeyPatch) -> None:
    proofs = list[None]()

    def counted(*args: Any) -> Any:
        proofs.append(None)
        return swap_proof.prove(*args)

    monkeypatch.setattr(plan_proof, "prove", counted)
    with pytest.warns(UserWarning, match="left whole"):
        made = parallel(ExpertModel(20), size=2, sequence_parallel=True)
    assert len(proofs) <= 30, len(proofs)
    assert made.plan["layers.*"] == "block"
