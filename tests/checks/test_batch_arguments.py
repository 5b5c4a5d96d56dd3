"""Steps on batches of several arguments, and on labels of other shapes than the inputs, are the serial model's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import colossal_lite as cl
from tests.shared.plain_loop import OfBlocks
from tests.shared.pool import RankEnv, WorldError, run_world

V, D, CLASSES, STEPS = 20, 16, 3, 3
SGD: dict[str, Any] = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.2), timeout_s=60, seed=3)
PLAN = {
    "words": "embedding", "blocks.*": "block", "blocks.*.norm": "norm", "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise", "head": "lm_head",
}  # fmt: skip


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(D), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Text(OfBlocks):
    """Ids [B, T] to logits [B, classes]."""

    def __init__(self, dropout: float) -> None:
        super().__init__(V, D, (Block(dropout) for _ in range(2)))
        self.head = nn.Linear(D, CLASSES)

    def forward(self, ids: Tensor) -> Any:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Pictures(nn.Module):
    """Pictures [B, 3, 4, 4] to logits [B, classes], by patches, as a vision transformer has them."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.patches, self.blocks = nn.Conv2d(3, D, 2, 2), nn.ModuleList(Block(dropout) for _ in range(2))
        self.head = nn.Linear(D, CLASSES)

    def forward(self, pixel_values: Tensor) -> Any:
        x = self.patches(pixel_values).flatten(2).mT
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Two(nn.Module):
    """Vectors [B, 5], ids [B, T] and weights of samples [B] to logits [B, classes]."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first, self.words = nn.Linear(5, D), nn.Embedding(V, D)
        self.blocks, self.head = nn.ModuleList(Block(dropout) for _ in range(2)), nn.Linear(D, CLASSES)

    def forward(self, x: Tensor, ids: Tensor, scale: Tensor | None = None) -> Any:
        x = torch.tanh(self.first(x))[:, None] + self.words(ids)
        for block in self.blocks:
            x = block(x)
        x = x.mean(1)
        return self.head(x if scale is None else x * scale[:, None])


def seq2seq(dropout: float) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    shape = dict(d_model=D, d_kv=4, d_ff=32, num_layers=2, num_heads=4, dropout_rate=dropout)
    model = T5ForConditionalGeneration(
        T5Config(vocab_size=V, **shape, decoder_start_token_id=0, use_cache=False)
    )
    # Its own norm rounds to float32, and parity is measured in float64.
    for owner in list(model.modules()):
        for name, child in list(owner.named_children()):
            if isinstance(child, T5LayerNorm):
                setattr(owner, name, nn.RMSNorm(D, eps=child.variance_epsilon))
    return model


def global_batch(form: str, step: int) -> Any:
    draw = torch.Generator().manual_seed(step)
    ids = torch.randint(1, V, (7, 6), generator=draw)
    classes = torch.randint(CLASSES, (7,), generator=draw)
    x = torch.randn(7, 5, dtype=torch.float64, generator=draw)
    words = torch.randint(1, V, (7, 4), generator=draw)
    words = words.masked_fill(torch.arange(4)[None] > torch.arange(7)[:, None] % 4, -100)
    seen = F.pad(words[:, :-1], (1, 0)).clamp(min=0)
    mask = (torch.arange(6)[None] <= torch.arange(7)[:, None]).long()
    pictures = torch.randn(7, 3, 4, 4, dtype=torch.float64, generator=draw)
    return {
        "classes": (ids, classes),
        "some classes": (ids, classes.masked_fill(torch.arange(7) < 4, -100)),
        "numbers": (ids, torch.randn(7, CLASSES, dtype=torch.float64, generator=draw)),
        "tuple": ((x, ids), classes),
        "names": dict(ids=ids, x=x, scale=x[:, 0], labels=classes),
        "pictures": dict(pixel_values=pictures, labels=classes),
        "words": dict(input_ids=ids, attention_mask=mask, decoder_input_ids=seen, labels=words),
    }[form]


MODELS: dict[str, tuple[Callable[[float], nn.Module], Any]] = {
    "classes": (Text, None),
    "some classes": (Text, F.cross_entropy),
    "numbers": (Text, F.mse_loss),
    "tuple": (Two, None),
    "names": (Two, F.cross_entropy),
    "pictures": (Pictures, None),
    "words": (seq2seq, None),
}


def built(form: str, dropout: float) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[form][0](dropout)


def trained(env: RankEnv, form: str, config: dict[str, Any], dropout: float, plan: Any = "auto") -> Any:
    """The losses of a few steps and of an evaluation, and the weights."""
    with env.launch(SGD | config) as context:
        engine = cl.initialize(built(form, dropout), context=context, criterion=MODELS[form][1], plan=plan)
        losses = [
            float(engine.train_step(context.local_batch(global_batch(form, step))).loss)
            for step in range(STEPS)
        ]
        losses.append(float(engine.eval_step(context.local_batch(global_batch(form, 0)))))
        return losses, engine.full_state_dict()


def plain(form: str) -> tuple[list[float], dict[str, Tensor]]:
    """The serial model in a loop of torch's."""
    model = built(form, 0.0).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)

    def loss_of(batch: Any) -> Tensor:
        if isinstance(batch, dict):
            out, labels = model(**{n: x for n, x in batch.items() if n != "labels"}), batch["labels"]
        else:
            out, labels = model(*batch[0]) if isinstance(batch[0], tuple) else model(batch[0]), batch[1]
        logits = getattr(out, "logits", out)
        if form == "numbers":
            return F.mse_loss(logits, labels)
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten())

    losses = []
    for step in range(STEPS):
        loss = loss_of(global_batch(form, step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return [*losses, float(loss_of(global_batch(form, 0)).detach())], model.state_dict()


def assert_same(found: Any, truth: Any) -> None:
    assert found[0] == pytest.approx(truth[0], rel=1e-10)
    for name, value in truth[1].items():
        torch.testing.assert_close(found[1][name], value.detach().double(), rtol=1e-9, atol=1e-10, msg=name)


CONFIGS: dict[str, dict[str, Any]] = {
    "data": {},
    "sharded": dict(zero=dict(stage=3)),
    "accumulated": dict(gradient_accumulation=3),
    "recomputed": dict(activation_checkpoint="full"),
}


@pytest.mark.parametrize("form", MODELS)
def test_a_step_is_that_of_the_serial_model(form: str) -> None:
    truth = plain(form)
    assert_same(run_world(trained, 1, form, {}, 0.0)[0], truth)
    for config in CONFIGS.values():
        for row in run_world(trained, 2, form, config, 0.0):
            assert_same(row, truth)


@pytest.mark.parametrize("form", ["classes", "numbers"])
def test_labels_of_samples_train_on_a_tensor_axis_and_in_a_pipeline(form: str) -> None:
    truth = plain(form)
    tensor = dict(parallel=dict(tensor=dict(size=2, sequence_parallel=False)))
    for config, plan in ((tensor, PLAN), (dict(parallel=dict(pipeline=2)), "auto")):
        for row in run_world(trained, 2, form, config, 0.0, plan):
            assert_same(row, truth)


@pytest.mark.parametrize("form", ["classes", "tuple", "names", "words"])
def test_dropout_draws_the_same_masks_on_every_mesh(form: str) -> None:
    (truth,) = run_world(trained, 1, form, {}, 0.3)
    for config in (CONFIGS["data"], CONFIGS["accumulated"], CONFIGS["recomputed"]):
        for row in run_world(trained, 2, form, config, 0.3):
            assert_same(row, truth)


def fitted(env: RankEnv, directory: str, form: str, how: str) -> list[float]:
    """The losses of a run with a loader, and of its held-out samples."""
    batch = global_batch(form, 0)
    if isinstance(batch, dict):
        samples: list[Any] = [{n: x[i] for n, x in batch.items()} for i in range(6)]
    else:
        samples = [((batch[0][0][i], batch[0][1][i]), batch[1][i]) for i in range(6)]
    with env.launch(SGD) as context:
        engine = cl.initialize(built(form, 0.0), context=context, criterion=MODELS[form][1])
        losses: list[float] = []
        engine.on_step(lambda result: losses.append(float(result.loss)))
        cl.fit(
            engine, samples, valid=samples[:3], directory=f"{directory}/{form}{how}", global_batch=3, steps=3
        )
        return [*losses, float(engine.eval_step(context.local_batch(batch)))]


@pytest.mark.parametrize("form", ["tuple", "names"])
def test_loaders_cut_and_stack_several_arguments(form: str, tmp_path: Any) -> None:
    (truth,) = run_world(fitted, 1, str(tmp_path), form, "one")
    for row in run_world(fitted, 2, str(tmp_path), form, "two"):
        assert row == pytest.approx(truth, rel=1e-10)


def refused(
    env: RankEnv, build: Callable[[], nn.Module], config: Any, criterion: Any, plan: Any, batch: Any
) -> str:
    with env.launch(SGD | config) as context:
        engine = cl.initialize(build(), context=context, criterion=criterion, plan=plan)
        with pytest.raises(ValueError) as caught:
            engine.train_step(context.local_batch(batch))
        return str(caught.value)


class Summed(OfBlocks):
    """Logits of tokens; `bias` changes them."""

    def __init__(self) -> None:
        super().__init__(V, D, (Block(0.0) for _ in range(2)))
        self.head = nn.Linear(D, V)

    def forward(self, ids: Tensor, bias: Tensor | None = None) -> Any:
        logits = super().forward(ids)
        return logits if bias is None else logits + bias


class OurGPT(cl.models.GPT):
    def __init__(self) -> None:
        super().__init__(cl.models.GPTConfig(vocabulary=V, layers=2, heads=4, width=D, sequence=8))


IDS = torch.randint(V, (4, 8), generator=torch.Generator().manual_seed(0))
SHAPED = dict(ids=IDS, bias=torch.ones(4, 8, V).double(), labels=IDS.roll(-1, 1))
TENSOR = dict(parallel=dict(tensor=2))
WHOLE = dict(parallel=dict(tensor=dict(size=2, sequence_parallel=False)))


def mean_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.mean(1), labels)


@pytest.mark.parametrize(
    ("build", "config", "criterion", "plan", "batch", "words"),
    [
        (Summed, WHOLE, None, PLAN, SHAPED, "batch: bias under parallel.tensor=2, where Summed is proven with"),
        (Summed, dict(parallel=dict(pipeline=2)), None, "auto", SHAPED, "batch: bias under parallel.pipeline=2"),
        (Summed, WHOLE, None, PLAN, ((IDS, SHAPED["bias"]), SHAPED["labels"]), "batch: inputs[0], inputs[1] under"),
        (OurGPT, dict(parallel=dict(sequence=2)), mean_of, "auto", (IDS, IDS[:, 0]), "cut by parallel.sequence on 2"),
        (OurGPT, TENSOR, mean_of, "auto", (IDS, IDS[:, 0]), "cut by parallel.tensor.sequence_parallel on 2 ranks"),
        (Summed, {}, None, "auto", (IDS, IDS[:, 0]), "labels: shape (2,) for logits (2, 8, 20). Legal: a label for"),
    ],
)  # fmt: skip
def test_what_a_mesh_cannot_cut_or_carry_is_refused_by_name(
    build: Any, config: Any, criterion: Any, plan: Any, batch: Any, words: str
) -> None:
    for said in run_world(refused, 2, build, config, criterion, plan, batch):
        assert words in said


def ragged(env: RankEnv) -> str:
    """Ranks whose collator has padded ids beside vectors to lengths of their own."""
    with env.launch(SGD) as context:
        engine = cl.initialize(built("tuple", 0.0), context=context)
        (x, ids), classes = context.local_batch(global_batch("tuple", 0))
        with pytest.raises(ValueError) as caught:
            engine.train_step(((x, ids[:, : 5 + env.rank]), classes))
        return str(caught.value)


def test_arguments_of_other_lengths_on_other_ranks_are_refused() -> None:
    for said in run_world(ragged, 2):
        assert "batch: its arguments have other shapes on other data ranks" in said


def of_a_replica(env: RankEnv) -> float:
    """A second argument that tensor ranks have in two forms."""
    with env.launch(SGD | WHOLE) as context:
        engine = cl.initialize(OurGPT(), context=context)
        batch = dict(input_ids=IDS, attention_mask=torch.ones_like(IDS), labels=IDS.roll(-1, 1))
        batch["attention_mask"][0, 0] = env.rank
        return float(engine.train_step(batch).loss)


def test_a_further_argument_is_compared_between_the_ranks_of_a_replica() -> None:
    with pytest.raises(WorldError, match="attention_mask is"):
        run_world(of_a_replica, 2)


def summed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.mse_loss(logits, labels, reduction="sum")


@pytest.mark.parametrize(
    ("form", "criterion"),
    [("numbers", summed), ("classes", partial(F.cross_entropy, weight=torch.arange(3.0)))],
)
def test_a_criterion_of_samples_whose_parts_do_not_add_up_is_refused(form: str, criterion: Any) -> None:
    with cl.launch(SGD | dict(precision="fp32", gradient_accumulation=2)) as context:
        engine = cl.initialize(built(form, 0.0), context=context, criterion=criterion)
        inputs, labels = global_batch(form, 0)
        with pytest.raises(ValueError, match="criterion: it gives .* Two parts"):
            engine.train_step((inputs, labels.float() if labels.is_floating_point() else labels))


def test_a_number_of_minus_100_is_no_label_to_be_ignored() -> None:
    inputs, numbers = global_batch("numbers", 0)
    numbers[0, 0] = -100.0
    with cl.launch(SGD | dict(gradient_accumulation=3)) as context:
        engine = cl.initialize(built("numbers", 0.0), context=context, criterion=F.mse_loss)
        loss = F.mse_loss(built("numbers", 0.0).double()(inputs), numbers)
        assert float(engine.train_step((inputs, numbers)).loss) == pytest.approx(
            float(loss.detach()), rel=1e-12
        )
