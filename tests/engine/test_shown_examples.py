"""Models of pictures and of sound train on every axis as plain torch does, by a batch that initialize is shown."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import colossal_lite as cl
from colossal_lite.data.batch import Batch
from colossal_lite.layers.roles import Role
from colossal_lite.parallel.copy_batches import few_of_rank_0, samples_of
from colossal_lite.parallel.model_loss import ModelLossError, model_loss
from colossal_lite.parallel.small_copy import small_copy
from tests.shared.pool import RankEnv, run_world

SAMPLES, CLASSES = 4, 6
SIZES: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_labels=CLASSES
)
PICTURES = SIZES | dict(image_size=16, patch_size=4)
SOUND = SIZES | dict(
    conv_dim=(16, 16), conv_stride=(5, 4), conv_kernel=(10, 8), num_feat_extract_layers=2, num_conv_pos_embeddings=8,
    num_conv_pos_embedding_groups=4, classifier_proj_size=16, layerdrop=0.0, apply_spec_augment=False, vocab_size=12,
    hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, feat_proj_dropout=0.0, final_dropout=0.0,
)  # fmt: skip
STILL = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "ViT": ("ViTForImageClassification", PICTURES | STILL),
    "Wav2Vec2": ("Wav2Vec2ForSequenceClassification", SOUND),
}
MODES: dict[str, tuple[int, dict[str, Any]]] = {
    "tensor": (2, dict(parallel=dict(tensor=2))),
    "pipeline": (2, dict(parallel=dict(pipeline=dict(size=2, micro_batches=2)))),
    "zero": (2, dict(zero=dict(stage=3), gradient_accumulation=2, activation_checkpoint="full")),
}
pytestmark = pytest.mark.filterwarnings(
    "ignore:parallel.tensor.sequence_parallel. off", "ignore:plan='auto'. left whole"
)


def model(name: str, **more: Any) -> nn.Module:
    torch.manual_seed(0)
    kind, sizes = MODELS[name]
    config = getattr(transformers, kind).config_class(**sizes | more)
    made: nn.Module = getattr(transformers, kind)(config).double()
    with torch.no_grad():
        for parameter in made.parameters():  # those that begin as zeros too
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return made


def batch(name: str, seed: int = 0, samples: int = SAMPLES) -> dict[str, Tensor]:
    shape, key = ((800,), "input_values") if name == "Wav2Vec2" else ((3, 16, 16), "pixel_values")
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, *shape, generator=generator, dtype=torch.float64)
    return {key: inputs, "labels": (torch.arange(samples) + seed) % CLASSES}


Found = tuple[float, dict[str, Tensor]]


def trains(env: RankEnv, name: str, config: dict[str, Any], own: bool, more: dict[str, Any]) -> Found:
    """Loss and gradients of a step. Each rank shows another batch."""
    base = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.1), timeout_s=60)
    with env.launch(base | config) as context:
        engine = cl.initialize(
            model(name, **more), context=context, criterion="model" if own else None,
            example=batch(name, seed=7 + context.rank),
        )  # fmt: skip
        assert not engine.ledger.rows(), "it counts what steps send"
        part = context.local_batch(SAMPLES)
        loss = engine.forward_backward({key: x[part] for key, x in batch(name).items()})
        return float(loss), engine.full_gradients()


@pytest.mark.parametrize("own", [True, False], ids=["own loss", "logits"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_every_gradient_are_those_of_plain_torch(name: str, mode: str, own: bool) -> None:
    plain, given = model(name), batch(name)
    outputs: Any = plain(**given)
    loss = outputs.loss if own else F.cross_entropy(outputs.logits, given["labels"])
    loss.backward()
    ranks, config = MODES[mode]
    for found, gradients in run_world(trains, ranks, name, config, own, {}, timeout_s=120):
        assert found == pytest.approx(loss.item(), rel=1e-12)
        right = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
        assert {n for n, g in gradients.items() if g.any()} <= right.keys() <= gradients.keys()
        largest = max(float(g.abs().max()) for g in right.values())
        for key, gradient in right.items():
            error = float((gradients[key] - gradient).abs().max())
            assert error <= 1e-10 * float(gradient.abs().max()) + 1e-13 * largest, key


def test_dropout_is_that_of_one_process() -> None:
    dropped = dict(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
    ((loss, right),) = run_world(trains, 1, "ViT", {}, True, dropped)
    assert loss != pytest.approx(run_world(trains, 1, "ViT", {}, True, {})[0][0])
    for mode in ("tensor", "pipeline"):
        ranks, config = MODES[mode]
        for found, gradients in run_world(trains, ranks, "ViT", config, True, dropped, timeout_s=120):
            assert found == pytest.approx(loss, rel=1e-12)
            for key, gradient in right.items():
                assert torch.allclose(gradients[key], gradient, rtol=1e-10, atol=1e-14), key


def refused(env: RankEnv, config: dict[str, Any], arguments: dict[str, Any]) -> str:
    with env.launch(dict(precision="fp64") | config) as context:
        try:
            cl.initialize(model("ViT"), context=context, **arguments)
        except ValueError as error:
            return str(error)
    return ""


def test_without_an_example_a_plan_and_an_own_loss_name_it() -> None:
    for found in run_world(refused, 2, MODES["tensor"][1], {}):
        assert "Legal: cl.initialize(..., example=batch), or a dict from name patterns to roles" in found
    for found in run_world(refused, 2, {}, dict(criterion="model")):
        assert "or cl.initialize(..., example=batch), if no ids are its inputs" in found


def shows_alone(env: RankEnv) -> str:
    with env.launch(dict(precision="fp64")) as context:
        try:
            cl.initialize(model("ViT"), context=context, example=batch("ViT") if context.is_main else None)
        except ValueError as error:
            return str(error)
    return ""


def test_an_example_on_some_ranks_alone_is_refused_on_all() -> None:
    assert (
        run_world(shows_alone, 2)
        == ["example: given on the ranks [0] alone; legal: on every rank, or on none"] * 2
    )


def test_an_example_of_the_wrong_form_is_refused_with_what_the_model_said() -> None:
    wrong = dict(pixel_values=torch.randn(2, 3, 8, 8, dtype=torch.float64), labels=torch.tensor([0, 1]))
    for found in run_world(refused, 2, MODES["tensor"][1], dict(example=wrong)):
        assert "does not run on random words or the example" in found and "doesn't match model" in found
    alike = dict(batch("ViT") | dict(labels=torch.ones(SAMPLES, dtype=torch.long)))
    (found,) = run_world(refused, 1, {}, dict(criterion="model", example=alike))
    assert found.startswith("example: all labels of its first samples are 1, and a proof")
    (found,) = run_world(refused, 1, {}, dict(example=dict(pixel_values=torch.randn(2, 3, 8, 8))))
    assert found.startswith("batch: a mapping of pixel_values without 'labels'")


class Pooled(nn.Module):
    """Numbers [B, 5] to the loss of a class, with a `reduction`, or of a number."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.layer, self.reduction = nn.Linear(5, CLASSES), reduction

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.layer(x)
        if labels is None:
            return logits
        if self.reduction == "numbers":
            return F.mse_loss(logits, labels), logits
        return F.cross_entropy(logits, labels, reduction=self.reduction), logits


def example(labels: Tensor) -> Batch:
    x = torch.randn(len(labels), 5, generator=torch.Generator().manual_seed(0))
    return Batch((x,), {}, labels, torch.arange(len(labels)))


def test_an_own_loss_is_proven_on_samples_with_one_label_each() -> None:
    classes = example(torch.tensor([0, 3, 5]))
    assert model_loss(Pooled("mean"), classes).ignored == -100
    with pytest.raises(ModelLossError, match="is a sum: .* of three samples"):
        model_loss(Pooled("sum"), classes)
    numbers = model_loss(Pooled("numbers"), example(torch.randn(3, CLASSES)))
    assert numbers.ignored is None and numbers.labels == "labels"


def test_samples_of_an_example_are_repeated_with_other_numbers() -> None:
    some = samples_of(example(torch.tensor([1, 40])), 5)
    assert some.labels.tolist() == [1, 40, 1, 40, 1] and some.args[0].dtype == torch.float64
    assert len(some.args[0].unique(dim=0)) == 5 and some.samples.tolist() == [*range(5)]


def shared(env: RankEnv) -> Batch | None:
    with env.launch(dict(precision="fp64")) as context:
        one = context.rank + 1
        mask = (
            torch.tensor([[True, False]]).expand(9, 2)
            if context.is_main
            else torch.zeros(2, 2, dtype=torch.bool)
        )
        given = Batch((torch.full((9, 3), one / 4),), dict(mask=mask), torch.full((9,), one), torch.arange(9))
        return few_of_rank_0(given, context.mesh.world, context.device)


def shared_labels(env: RankEnv, labels: list[int]) -> list[int]:
    with env.launch(dict(precision="fp64")) as context:
        given = Batch((torch.zeros(len(labels), 2),), {}, torch.tensor(labels), torch.arange(len(labels)))
        few = few_of_rank_0(given, context.mesh.world, context.device)
        return [] if few is None else few.labels.tolist()


@pytest.mark.parametrize(
    ("labels", "few"),
    [([0, 0, 0, 0, 0, 1], [0, 1, 0, 0]), ([1, 0, 2], [1, 0, 2]), ([4, 4], [4, 4]), ([], [])],
)
def test_of_samples_with_two_labels_two_are_shown(labels: list[int], few: list[int]) -> None:
    assert run_world(shared_labels, 1, labels) == [few]


def test_each_rank_gets_the_first_samples_of_rank_0() -> None:
    for found in run_world(shared, 2):
        assert found is not None and found.labels.tolist() == [1] * 4
        assert (
            found.args[0].tolist() == [[0.25] * 3] * 4
            and found.kwargs["mask"].tolist() == [[True, False]] * 4
        )


V = 50


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.norms, self.num_heads = nn.ModuleList(nn.LayerNorm(width) for _ in range(2)), num_heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norms[0](x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class WordsAndFeatures(nn.Module):
    """Ids [B, T] and, in the place of the first, features [B, 7]."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.pictures = nn.Embedding(V, 32), nn.Linear(7, 32)
        self.blocks, self.head = nn.ModuleList(Block(32, 4) for _ in range(2)), nn.Linear(32, V)

    def forward(self, input_ids: Tensor, features: Tensor | None = None) -> Any:
        x = self.words(input_ids)
        if features is not None:
            x = torch.cat([self.pictures(features)[:, None], x[:, 1:]], 1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def words_and_features(
    env: RankEnv, config: dict[str, Any], shows: bool
) -> tuple[float, dict[str, Tensor]] | str:
    torch.manual_seed(0)
    made = WordsAndFeatures().double()
    ids, labels = torch.randint(V, (2, SAMPLES, 6), generator=torch.Generator().manual_seed(1))
    features = torch.randn(SAMPLES, 7, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    given = dict(input_ids=ids, features=features, labels=labels)
    with env.launch(dict(precision="fp64", optimizer=dict(type="sgd", lr=0.1)) | config) as context:
        engine = cl.initialize(made, context=context, example=given if shows else None)
        try:
            found = float(engine.forward_backward(given)), engine.full_gradients()
            engine.step()
            if shows and config:
                with pytest.raises(ValueError, match=r"no features under parallel\..*; legal: all of it"):
                    engine.forward_backward((ids, labels))
        except ValueError as error:
            return str(error)
        return found


@pytest.mark.parametrize("mode", ["tensor", "pipeline"])
def test_arguments_beside_ids_are_taken_where_an_example_shows_them(mode: str) -> None:
    ((loss, right),) = run_world(words_and_features, 1, {}, False)
    ranks, config = MODES[mode]
    for found, gradients in run_world(words_and_features, ranks, config, True):
        assert found == pytest.approx(loss, rel=1e-12)
        for key, gradient in right.items():
            assert torch.allclose(gradients[key], gradient, rtol=1e-10, atol=1e-13), key
    for said in run_world(words_and_features, ranks, config, False):
        assert (
            "features under parallel." in said
            and "cl.initialize(..., example=batch) with a batch that has all" in said
        )
    for said in run_world(refused_words, 2, dict(parallel=dict(sequence=2))):
        assert "with parallel.sequence=2, which is proven with ids alone" in said


def refused_words(env: RankEnv, config: dict[str, Any]) -> str:
    try:
        return str(words_and_features(env, config, True))
    except ValueError as error:
        return str(error)


def classifier(labels: int) -> nn.Module:
    """Of sequences: classes, or one number."""
    sizes = SIZES | dict(num_labels=labels, vocab_size=50, max_position_embeddings=16) | STILL
    torch.manual_seed(0)
    made: nn.Module = transformers.BertForSequenceClassification(transformers.BertConfig(**sizes)).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return made


def sequences(labels: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(labels)
    ids = torch.randint(1, 50, (SAMPLES, 8), generator=generator)
    mask = (torch.arange(8) < torch.tensor([[8], [6], [8], [5]])).long()
    numbers = torch.randn(SAMPLES, generator=generator, dtype=torch.float64)
    return dict(
        input_ids=ids, attention_mask=mask, labels=numbers if labels == 1 else torch.arange(SAMPLES) % labels
    )


def trains_on_sequences(env: RankEnv, labels: int, config: dict[str, Any]) -> Found:
    base = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.1), timeout_s=60)
    with env.launch(base | config) as context:
        shown = sequences(labels)
        engine = cl.initialize(classifier(labels), context=context, criterion="model", example=shown)
        part = context.local_batch(SAMPLES)
        loss = engine.forward_backward({key: x[part] for key, x in shown.items()})
        return float(loss), engine.full_gradients()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("labels", [1, 3], ids=["numbers", "classes"])
def test_the_own_loss_of_a_text_classifier_is_proven_on_labels_of_samples(labels: int, mode: str) -> None:
    plain = classifier(labels)
    loss = plain(**sequences(labels)).loss
    loss.backward()
    right = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    largest = max(float(g.abs().max()) for g in right.values())
    ranks, config = MODES[mode]
    for found, gradients in run_world(trains_on_sequences, ranks, labels, config, timeout_s=120):
        assert found == pytest.approx(loss.item(), rel=1e-12)
        for key, gradient in right.items():
            error = float((gradients[key] - gradient).abs().max())
            assert error <= 1e-10 * float(gradient.abs().max()) + 1e-13 * largest, key


def unshown(env: RankEnv) -> str:
    with env.launch(dict(precision="fp64")) as context:
        try:
            cl.initialize(classifier(3), context=context, criterion="model")
        except ModelLossError as error:
            return str(error)
    return ""


def test_the_own_loss_of_a_text_classifier_without_an_example_names_it() -> None:
    (found,) = run_world(unshown, 1)
    assert (
        "cl.initialize(..., example=batch), if no ids are its inputs, or its labels are of samples" in found
    )


class Scored(nn.Module):
    """Ids [B, T] to a number of each sample, whose squared error also takes labels [B, T]."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.score = nn.Embedding(50, 8), nn.Linear(8, 1)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        scores = self.score(self.table(ids).mean(1))
        if labels is None:
            return scores
        return dict(loss=((scores - labels.view(len(ids), -1)) ** 2).mean(), logits=scores)


def test_an_example_of_samples_is_taken_before_words_on_which_a_loss_runs_too() -> None:
    ids, numbers = torch.randint(1, 50, (3, 8)), torch.tensor([0.5, 1.0, -2.0])
    assert not model_loss(Scored()).is_shown
    assert model_loss(Scored(), Batch((ids,), {}, numbers, torch.arange(3))).is_shown
    assert not model_loss(Scored(), Batch((ids,), {}, ids, torch.arange(3))).is_shown


class Tagged(nn.Module):
    """Ids [B, T] and a table of two types to three classes, of each token or of each sample, as labels are."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.types, self.tags = nn.Embedding(50, 8), nn.Embedding(2, 8), nn.Linear(8, 3)

    def forward(self, ids: Tensor, types: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.tags(torch.tanh(self.table(ids) + self.types(types)))
        if labels is None:
            return logits
        logits = logits if labels.dim() > 1 else logits.mean(1)
        return dict(loss=F.cross_entropy(logits.flatten(0, -2), labels.flatten()), logits=logits)


def tagged(labels: Tensor) -> Batch:
    ids = torch.randint(50, (len(labels), 4), generator=torch.Generator().manual_seed(0))
    return Batch((ids,), dict(types=ids % 2), labels, torch.arange(len(labels)))


def test_classes_of_an_example_are_kept_beside_a_table_of_fewer_rows() -> None:
    assert model_loss(Tagged(), tagged(torch.tensor([0, 2, 2, 0]))).ignored == -100


class Segmented(nn.Module):
    """Features [B, T, 6] to 150 classes of each place; the label 255 is ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 16), nn.Linear(16, 150)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.b(torch.tanh(self.a(x)))
        if labels is None:
            return logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=255)
        return dict(loss=loss, logits=logits)


def test_an_example_keeps_an_ignored_label_beyond_the_classes() -> None:
    """It once was taken for a class, and a mean over fewer labels for one over all."""
    labels = torch.tensor([[1, 255, 255, 255], [149, 255, 3, 37], [0, 37, 74, 111]])
    assert model_loss(Segmented(), Batch((torch.randn(3, 4, 6),), {}, labels, torch.arange(3))).ignored == 255
    kept = samples_of(Batch((torch.randn(3, 4, 6),), {}, labels, torch.arange(3)), 3).labels
    assert torch.equal(kept, labels)


def test_labels_of_words_are_cut_with_the_head_of_a_copy_and_those_of_classes_are_not() -> None:
    for classes, cut in ((50, True), (3, False)):
        model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, classes))
        small = small_copy(model, {"0": Role("embedding")} | ({"1": Role("lm_head")} if cut else {}))
        ids = torch.tensor([[1, 40], [2, 49]])
        some = small.samples_of(Batch((ids,), {}, torch.tensor([0, 45]), torch.arange(2)), 2)
        assert some.labels.tolist() == [0, 8 if cut else 45] and some.args[0].tolist() == [[1, 3], [2, 12]]
        words = small.samples_of(Batch((ids,), {}, torch.tensor([[0, 45], [1, 2]]), torch.arange(2)), 2)
        assert words.labels.tolist() == [[0, 8], [1, 2]]


def test_an_example_may_have_labels_that_are_ignored() -> None:
    tags = torch.tensor([[-100, 0, 1, -100], [-100, 2, 2, 1], [-100, 0, -100, -100]])
    assert model_loss(Tagged(), tagged(tags)).ignored == -100
    some = samples_of(tagged(tags), 3)
    assert some.labels.tolist() == [[0, 0, 1, 1], [2, 2, 2, 1], [2, 0, 1, 0]]
    with pytest.raises(ModelLossError, match="all labels of its first samples are -100"):
        model_loss(Tagged(), tagged(torch.full((3, 4), -100)))
