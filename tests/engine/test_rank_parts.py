"""Where a rank has a part of the model, or no values of a weight, code that would read it is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import colossal_lite as cl
from colossal_lite.models import GPT, GPTConfig
from tests.shared.pool import RankEnv, run_world
from tests.shared.refusals import told_of

SGD = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.5), seed=3, timeout_s=30)
TENSOR = dict(parallel=dict(tensor=dict(size=2)))
PIPELINE = dict(parallel=dict(pipeline=dict(size=2, micro_batches=2)))
IDS = torch.arange(40).view(4, 10) % 7


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocabulary=8, width=8, layers=2, heads=2, sequence=16))


def own_state(env: RankEnv, config: dict[str, Any]) -> tuple[list[str], list[str], float]:
    """What a model's own state_dict and load_state_dict say, also after its engine has closed; the last loss."""
    with env.launch(SGD | config) as context:
        engine = cl.initialize(gpt(), context=context)
        model, batch = engine.model, context.local_batch(4)
        engine.train_step((IDS[batch, :-1], IDS[batch, 1:]))
        whole = engine.full_state_dict()
        block = next(m for n, m in model.named_modules() if n == "blocks.0")
        gives = [told_of(model.state_dict), told_of(block.state_dict)]
        takes = [told_of(lambda: model.load_state_dict(whole))]
        engine.load_full_state_dict(whole)
        loss = float(engine.train_step((IDS[batch, :-1], IDS[batch, 1:])).loss)
        engine.close()
        gives.append(told_of(model.state_dict))
        return gives, takes, loss


@pytest.mark.parametrize("axis, config", [("tensor", TENSOR), ("pipeline", PIPELINE)])
def test_a_model_in_parts_gives_and_takes_no_state_of_its_own(axis: str, config: dict[str, Any]) -> None:
    ((_, _, truth),) = run_world(own_state, 1, {})
    for gives, takes, loss in run_world(own_state, 2, config):
        for told in gives:
            assert f"state_dict(): with parallel.{axis} this rank has a part" in told
            assert "legal: engine.full_state_dict()" in told and "save_pretrained" in told
        for told in takes:
            assert "model.load_state_dict(): with" in told and "engine.load_full_state_dict()" in told
        assert loss == pytest.approx(truth, rel=1e-12)


@pytest.mark.parametrize("config", [{}, dict(zero=dict(stage=2)), dict(parallel=dict(sequence=dict(size=2)))])
def test_a_whole_model_gives_and_takes_its_own_state(config: dict[str, Any]) -> None:
    for gives, takes, _ in run_world(own_state, 2, config):
        assert not any([*gives, *takes])


def saved(env: RankEnv, config: dict[str, Any], folder: Path) -> tuple[str, float]:
    """What `save_pretrained` of a rank's model says; how far weights are apart in what it writes of the whole state."""
    import transformers

    torch.manual_seed(0)
    sizes = dict(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    with env.launch(SGD | config) as context:
        engine = cl.initialize(
            transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)), context=context
        )
        engine.train_step((IDS[:, :-1], IDS[:, 1:]))
        told = told_of(lambda: engine.model.save_pretrained(folder / "part"))
        whole = engine.full_state_dict()
        engine.model.save_pretrained(folder / str(env.rank), state_dict=dict(whole), is_main_process=True)
    if not (
        folder / str(env.rank) / "model.safetensors"
    ).exists():  # transformers may write on one rank alone
        return told, 0.0
    again = transformers.LlamaForCausalLM.from_pretrained(folder / str(env.rank), dtype=torch.float64)
    return told, max(float((value - whole[name]).abs().max()) for name, value in again.state_dict().items())


@pytest.mark.parametrize("config", [TENSOR, PIPELINE])
def test_save_pretrained_takes_the_whole_state(config: dict[str, Any], tmp_path: Path) -> None:
    for told, apart in run_world(saved, 2, config, tmp_path):
        assert "its argument state_dict=engine.full_state_dict()" in told
        assert apart == 0.0
    assert list(tmp_path.glob("*/model.safetensors"))


class Kept(nn.Module):
    """Gives logits and what they are made of, and keeps a penalty of its own weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.inner, self.head = nn.Embedding(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.penalty = torch.zeros(())

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.inner(self.table(ids)))
        self.penalty = hidden.pow(2).mean()
        return {"logits": self.head(hidden), "hidden": hidden}


READS: dict[str, Callable[[Any, nn.Module, Tensor], Tensor]] = {
    "logits": lambda out, model, before: F.cross_entropy(out["logits"].flatten(0, 1), out["labels"]),
    "another output": lambda out, model, before: (
        READS["logits"](out, model, before) + out["hidden"].abs().mean()
    ),
    "an attribute": lambda out, model, before: READS["logits"](out, model, before) + model.penalty,
    "weights": lambda out, model, before: (
        READS["logits"](out, model, before) + 0.1 * sum(p.pow(2).sum() for p in model.parameters())
    ),
    "a weight before": lambda out, model, before: READS["logits"](out, model, before) + 0.1 * before,
}
IN_FORWARD = ("logits", "another output", "an attribute")


def own_loop(env: RankEnv, config: dict[str, Any], reads: str) -> tuple[str, list[float]]:
    """What three steps of a loop of one's own say, and their losses."""
    losses = []
    with env.launch(SGD | config) as context:
        engine = cl.initialize(Kept(), context=context)
        mine = IDS[context.local_batch(4)]
        for _ in range(3):
            with torch.no_grad():
                engine(mine[:, :-1])
            engine(mine[:, :-1])  # weights are whole afterwards where they are ever, and this graph is left
            before = engine.model.head.weight.pow(2).sum()
            out = dict(engine(mine[:, :-1]), labels=mine[:, 1:].flatten())
            loss = READS[reads](out, engine.model, before)
            if told := told_of(lambda loss=loss: engine.backward(loss)):  # type: ignore[misc]
                return told, losses
            losses.append(float(engine.step().loss))
    return "", losses


class Odd(Kept):
    """Seven words, so that the last tensor rank pads its part of the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 7)


def odd_loop(env: RankEnv) -> list[float]:
    plan = {"table": "embedding", "inner": "replicate", "head": "lm_head"}
    tensor = dict(size=env.world_size, sequence_parallel=False)  # so that hidden states have all tokens
    with env.launch(SGD | dict(parallel=dict(tensor=tensor))) as context:
        engine, losses = cl.initialize(Odd(), context=context, plan=plan), []
        for _ in range(3):
            out = engine(IDS[:, :-1])
            engine.backward(
                READS["another output"](dict(out, labels=IDS[:, 1:].flatten()), engine.model, IDS)
            )
            losses.append(float(engine.step().loss))
    return losses


def test_a_loss_reads_a_hidden_state_beside_a_vocabulary_that_is_padded() -> None:
    """Sums of padded logits were infinite in float64, and all ranks' outputs passed for the same."""
    (truth,) = run_world(odd_loop, 1)
    for losses in run_world(odd_loop, 2):
        assert losses == pytest.approx(truth, rel=1e-12)


HOST = dict(zero=dict(stage=3), memory=dict(placement="static", host_fraction=dict(weights=1.0)))


@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_loss_of_weights_that_are_elsewhere_is_refused_and_any_other_is_exact(
    stage: int, reads: str
) -> None:
    ((_, truth),) = run_world(own_loop, 1, {}, reads)
    for told, losses in run_world(own_loop, 2, dict(zero=dict(stage=stage)), reads):
        if stage == 3 and reads not in IN_FORWARD:
            assert "backward: the loss reads " in told and " outside of engine(x)" in told
            assert "zero.stage=3" in told and "optimizer.weight_decay" in told
        else:
            assert not told and losses == pytest.approx(truth, rel=1e-12)


@pytest.mark.parametrize("reads", ["an attribute", "weights"])
def test_one_rank_has_weights_unless_they_rest_on_the_host(reads: str) -> None:
    ((_, truth),) = run_world(own_loop, 1, {}, reads)
    assert run_world(own_loop, 1, dict(zero=dict(stage=3)), reads) == [("", truth)]
    ((told, losses),) = run_world(own_loop, 1, HOST, reads)
    assert "outside of engine(x)" in told if reads == "weights" else losses == pytest.approx(truth, rel=1e-12)


class Asked(nn.Module):
    """Gives its logits, and a loss if it gets labels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(8, 8), nn.Linear(8, 8)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Any:
        logits = self.head(self.table(ids))
        if targets is None:
            return logits
        return logits, F.cross_entropy(logits.reshape(-1, 8), targets.reshape(-1))


def labels_given(env: RankEnv, by_name: bool) -> list[str]:
    """What engine(x) says with labels, and without."""
    with env.launch(SGD | TENSOR) as context:
        engine = cl.initialize(Asked(), context=context)
        ids, labels = IDS[:, :-1], IDS[:, 1:]
        with torch.inference_mode():
            engine(ids)
        given = told_of(lambda: engine(ids, targets=labels) if by_name else engine(ids, labels))
        return [given, told_of(lambda: engine(ids, targets=None) if by_name else engine(ids))]


@pytest.mark.parametrize("by_name", [True, False])
def test_labels_for_a_loss_of_cut_logits_are_refused(by_name: bool) -> None:
    for given, without in run_world(labels_given, 2, by_name):
        assert given.startswith("engine(x): targets with parallel.tensor=2.") and "criterion='model'" in given
        assert without == ""


def lazily() -> nn.Module:
    return nn.Sequential(nn.Embedding(8, 4), nn.LazyLinear(8))


def lazy_model(env: RankEnv) -> list[str]:
    """What initialize says of a lazy model, of a function that builds one, and of a model that has run."""
    with env.launch(SGD) as context:
        ran = lazily()
        ran(IDS)
        models = (lazily(), lazily, ran)
        return [told_of(lambda m=m: cl.initialize(m, context=context)) for m in models]  # type: ignore[misc]


def test_a_module_that_has_no_shapes_yet_is_refused() -> None:
    ((model, builder, ran),) = run_world(lazy_model, 1)
    assert model.startswith("model: 1 is a LazyLinear") and "run the model once" in model
    assert "LazyLinear.weight: it has no shape" in builder and "has run once" in builder
    assert ran == ""


class Built:
    """Builds a model with another width, dropout or activation on rank 1."""

    def __init__(self, what: str, is_other: bool) -> None:
        self.what, self.is_other = what, is_other

    def __call__(self) -> nn.Module:
        torch.manual_seed(0)
        width = 16 if self.is_other and self.what == "width" else 8
        chance = 0.2 if self.is_other and self.what == "dropout" else 0.1
        acts = nn.ReLU() if self.is_other and self.what == "activation" else nn.GELU()
        return nn.Sequential(
            nn.Embedding(8, width), nn.Linear(width, width), acts, nn.Dropout(chance), nn.Linear(width, 8)
        )


def unlike_built(env: RankEnv, what: str, is_called: bool) -> str:
    built = Built(what, env.rank == 1)
    with env.launch(SGD) as context:
        return told_of(lambda: cl.initialize(built if is_called else built(), context=context))


@pytest.mark.parametrize("is_called", [True, False])
@pytest.mark.parametrize(
    "what, found",
    [
        ("width", "model: 0 is Embedding(8, 16) on rank 1, Embedding(8, 8) on rank 0"),
        ("dropout", "model: 3 is Dropout(p=0.2, inplace=False) on rank 1, Dropout(p=0.1"),
        ("activation", "model: 2 is ReLU() on rank 1, GELU("),
    ],
)
def test_another_model_on_one_rank_is_refused_by_its_first_layer(
    what: str, found: str, is_called: bool
) -> None:
    for told in run_world(unlike_built, 2, what, is_called):
        assert found in told and "legal: the same model on every rank" in told
