"""Ranks that must hold the same do: batches of one replica, buffers that a forward changes, datasets."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

import colossal_lite as cl
from colossal_lite.data.dataset_facts import dataset_facts, dataset_fault
from colossal_lite.data.fingerprint import fingerprint
from tests.shared import hugging_face
from tests.shared.pool import RankEnv, WorldError, run_world
from tests.shared.refusals import told_of
from tests.shared.written_models import STYLES

VOCABULARY = 32
SGD = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.1), seed=3, timeout_s=30)
GPT = dict(vocabulary=VOCABULARY, sequence=8, width=8, layers=2, heads=2)
MODES: dict[str, tuple[int, dict[str, Any]]] = {
    "tensor": (2, dict(parallel=dict(tensor=2))),
    "2d": (4, dict(parallel=dict(tensor=dict(size=4, mode="2d")))),
    "pipeline": (2, dict(parallel=dict(pipeline=2))),
    "ring": (2, dict(parallel=dict(sequence=2))),
    "tensor beside data": (4, dict(parallel=dict(tensor=2), zero=dict(stage=2))),
    "updates in backward": (
        2,
        dict(parallel=dict(tensor=2), optimizer=dict(type="sgd", update_when="backward")),
    ),
}


def batch_of(seed: int) -> tuple[Tensor, Tensor]:
    inputs = torch.randint(VOCABULARY, (4, 8), generator=torch.Generator().manual_seed(seed))
    return inputs, (inputs + 1) % VOCABULARY


def own_samples(env: RankEnv, config: dict[str, Any]) -> tuple[list[str], bool, float, float]:
    """A step, an evaluation and a step of the user's own loop, in which each rank has samples of its own; whether these
    have changed nothing; and the loss of the same batch on all ranks afterwards, beside that of one rank alone."""
    with env.launch(SGD | config) as context:
        torch.manual_seed(0)
        engine = cl.initialize(cl.models.GPT(cl.models.GPTConfig(**GPT)), context=context)
        before = engine.full_state_dict()
        own = batch_of(env.rank)
        told = [told_of(lambda: engine.train_step(own)), told_of(lambda: engine.eval_step(own))]
        if context.mesh.size("pipeline") == 1:
            told.append(told_of(lambda: loop_step(engine, own)))
            engine.zero_grad()
        after = engine.full_state_dict()
        same = all(torch.equal(value, before[name]) for name, value in after.items())
        alike = batch_of(100 + context.mesh.coord("data"))
        loss = float(engine.train_step(alike).loss)
        serial = cl.models.GPT(cl.models.GPTConfig(**GPT)).double()
        serial.load_state_dict(before)
        parts = [batch_of(100 + each) for each in range(context.mesh.size("data"))]
        inputs, labels = (torch.cat(each) for each in zip(*parts, strict=True))
        truth = float(F.cross_entropy(serial(inputs).flatten(0, 1), labels.flatten()))
        return told, same, loss, truth


def loop_step(engine: Any, batch: tuple[Tensor, Tensor]) -> None:
    inputs, labels = batch
    engine.backward(F.cross_entropy(engine(inputs).flatten(0, 1), labels.flatten()))
    engine.step()


@pytest.mark.parametrize("mode", MODES)
def test_ranks_of_a_replica_with_samples_of_their_own_are_refused_and_nothing_is_updated(mode: str) -> None:
    ranks, config = MODES[mode]
    config = {**config, "optimizer": SGD["optimizer"] | config.get("optimizer", {})}
    for told, same, loss, truth in run_world(own_samples, ranks, config):
        assert all(
            line.startswith("batch: ranks 0 and 1 train one replica on different samples") for line in told
        )
        assert len(told) >= 2 and same and abs(loss - truth) < 1e-12


class Counting(nn.Module):
    """A model whose forward writes to a buffer: what the batch says, or a number."""

    def __init__(self, by_batch: bool, number: float) -> None:
        super().__init__()
        self.token, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)
        self.register_buffer("seen", torch.zeros(()))
        self.by_batch, self.number = by_batch, number

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.double().mean() if self.by_batch else self.number
        out: Tensor = self.head(self.token(x))
        return out


def counted(env: RankEnv, by_batch: bool, config: dict[str, Any], number: float = 1.0) -> tuple[str, float]:
    with env.launch(SGD | config) as context:
        torch.manual_seed(0)
        engine = cl.initialize(Counting(by_batch, number), context=context)
        told = told_of(lambda: engine.train_step(batch_of(env.rank)))
        return told, float(engine.full_state_dict()["seen"])


def test_a_buffer_that_depends_on_a_ranks_part_of_the_batch_is_refused_on_every_rank() -> None:
    for told, _ in run_world(counted, 2, True, {}):
        assert "its forward changes the buffer seen, which is another on rank 1 than on rank 0" in told


@pytest.mark.parametrize("config", [dict(gradient_accumulation=2)])
def test_a_buffer_that_each_micro_batch_changes_is_refused(config: dict[str, Any]) -> None:
    for told, _ in run_world(counted, 1, False, config):
        assert "changes the buffer seen, and gradient_accumulation=2 would change it more often" in told


def counted_within_backward(env: RankEnv) -> None:
    optimizer = SGD["optimizer"] | dict(update_when="backward")
    parallel = dict(pipeline=dict(size=2, micro_batches=2))
    with env.launch(SGD | dict(parallel=parallel, optimizer=optimizer)) as context:
        torch.manual_seed(0)
        counts = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
        model = nn.Sequential(counts, nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3)).double()
        engine = cl.initialize(model, context=context, criterion=F.cross_entropy)
        engine.train_step((torch.randn(4, 6).double(), torch.arange(4) % 3))


def test_a_difference_within_the_backward_of_a_pipeline_is_told_at_once() -> None:
    """Stages cannot meet there to tell which it is. They once waited for each other until the timeout."""
    with pytest.raises(WorldError, match="or a forward changes a buffer. Nothing was updated") as error:
        run_world(counted_within_backward, 2, timeout_s=60)
    assert "Timed out" not in str(error.value)


def test_a_buffer_that_is_the_same_on_every_rank_is_none_of_our_business() -> None:
    assert run_world(counted, 2, False, {}) == [("", 1.0)] * 2
    assert run_world(counted, 1, True, {})[0][0] == ""


def test_a_buffer_that_is_written_to_and_keeps_its_value_is_not_changed() -> None:
    assert run_world(counted, 2, False, dict(gradient_accumulation=2), 0.0) == [("", 0.0)] * 2


# ---- frozen parameters ----

FROZEN: dict[str, dict[str, Any]] = {
    "data": {},
    "ZeRO-3": dict(zero=dict(stage=3)),
    "tensor": dict(parallel=dict(tensor=2)),
    "updates in backward": dict(optimizer=dict(type="sgd", lr=0.1, update_when="backward")),
}


def frozen(env: RankEnv, config: dict[str, Any], ranks: tuple[int, ...], step: int) -> list[Any]:
    """Losses of three steps; before `step` these ranks freeze the table. -1: before initialize."""
    torch.manual_seed(0)
    model, given = nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)), list[Any]()
    with env.launch(SGD | config) as context:
        cut = context.local_batch(4)

        def run() -> None:
            if step == -1 and env.rank in ranks:
                model[0].requires_grad_(False)
            engine = cl.initialize(model, context=context)
            for number in range(3):
                if number == step and env.rank in ranks:
                    model[0].requires_grad_(False)
                inputs, labels = batch_of(number)
                given.append(float(engine.train_step((inputs[cut], labels[cut])).loss))

        told = told_of(run)
    return [told, *given]


@pytest.mark.parametrize("mode", FROZEN)
def test_a_parameter_frozen_on_one_rank_is_refused_on_every_rank_before_training(mode: str) -> None:
    for found in run_world(frozen, 2, FROZEN[mode], (1,), -1):
        assert found == [
            "model: 0.weight trains on rank 0, and is frozen on rank 1 (requires_grad=False). Legal: the same "
            "parameters frozen on every rank"
        ]


@pytest.mark.parametrize("mode", ["data", "ZeRO-3", "updates in backward"])
def test_one_frozen_on_one_rank_between_two_steps_is_refused_on_every_rank(mode: str) -> None:
    for told, *losses in run_world(frozen, 2, FROZEN[mode], (0,), 1):
        assert told.startswith("model: 0.weight trains on rank 1, and is frozen on rank 0"), told
        assert len(losses) == 1


@pytest.mark.parametrize("step", [-1, 1])
def test_one_frozen_on_every_rank_trains_as_in_one_process(step: int) -> None:
    ((_, *truth),) = run_world(frozen, 1, {}, (0,), step)
    for told, *losses in run_world(frozen, 2, {}, (0, 1), step):
        assert not told and losses == pytest.approx(truth, rel=1e-12)


# ---- fingerprints ----

DTYPES = [torch.int64, torch.int32, torch.float64, torch.float32, torch.bfloat16, torch.bool]


@given(st.data())
def test_a_fingerprint_sees_every_element_its_place_its_name_and_its_form(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    numbers = data.draw(st.lists(st.integers(0, 1), min_size=2, max_size=40))
    tensor = torch.tensor(numbers).to(dtype)
    mark = int(fingerprint({"a": tensor}))
    assert 0 <= mark < 2**24 and mark == int(fingerprint({"a": tensor.clone()}))
    place = data.draw(st.integers(0, len(numbers) - 1))
    flipped = tensor.clone()
    flipped[place] = 1 - numbers[place]
    others = [{"a": flipped}, {"b": tensor}, {"a": tensor[None]}]
    marks = [*(int(fingerprint(other)) for other in others), int(fingerprint({"a": tensor}, "1"))]
    assert mark not in marks


def test_fingerprints_of_all_short_tensors_are_distinct() -> None:
    rows = [torch.tensor(row) for row in itertools.product(range(4), repeat=5)]
    assert (
        len({int(fingerprint({"a": row})) for row in rows}) >= len(rows) - 2
    )  # 1024 of 16 million: 0.03 pairs


# ---- datasets ----


def loader_of(env: RankEnv, what: str) -> str:
    with env.launch(SGD) as context:
        seed = env.rank if what == "values" else 0
        rows = torch.rand(
            10 + (env.rank if what == "length" else 0), 3, generator=torch.Generator().manual_seed(seed)
        )
        return told_of(lambda: context.dataloader(list(rows), global_batch=4))


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("same", ""),
        ("values", "sample 0 is another on rank 1"),
        ("length", "10 samples on rank 0, 11 on rank 1"),
    ],
)
def test_a_dataset_that_differs_between_ranks_is_refused_on_every_rank(what: str, words: str) -> None:
    for told in run_world(loader_of, 2, what):
        assert words in told and bool(words) == bool(told)


class Cropped:
    """A dataset that draws each sample anew."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Tensor:
        return torch.rand(3)


def test_samples_that_are_drawn_anew_are_not_compared() -> None:
    assert dataset_fault([dataset_facts(Cropped(), 5, {}) for _ in range(2)]) == ""


class Opaque:
    """A value of which nothing is known but its type."""


@pytest.mark.parametrize(
    "one", [3, 3.5, "x", b"x", None, True, [1, 2], {"a": 1}, torch.ones(2), torch.ones(2).numpy()]
)
def test_samples_of_any_plain_kind_are_compared(one: Any) -> None:
    other = {"different": one}
    facts = [dataset_facts([{"x": value, "y": Opaque()}], 1, {}) for value in (one, one, other)]
    assert dataset_fault(facts[:2]) == "" and "sample 0" in dataset_fault(facts[1:])


def test_a_buffer_of_another_dtype_than_the_weights_that_stops_a_forward_is_named() -> None:
    ids = torch.arange(32).view(4, 8)
    with cl.launch(dict(precision="bf16")) as context:
        engine = cl.initialize(STYLES["interleaved, ALiBi"]().float(), context=context)
        with pytest.raises(
            ValueError,
            match=r"model: .*(dtype|scalar type).*; its buffer .*slopes is torch.float32, .*torch.bfloat16. Legal: ",
        ):
            engine.train_step((ids, ids.roll(-1, 1)))
        engine.close()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(x))
        return out


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp64", torch.float64)])
def test_a_model_whose_buffers_have_the_dtype_of_its_weights_before_trains(
    precision: str, dtype: torch.dtype
) -> None:
    batch = torch.randn(8, 5, generator=torch.Generator().manual_seed(0)).to(dtype), torch.arange(8) % 3
    with cl.launch(dict(precision=precision)) as context:
        with pytest.raises(
            ValueError, match=rf"Legal: model.to\({dtype}\) before initialize, .to\(x.dtype\)"
        ):
            cl.initialize(Normed(), context=context).train_step(batch)
    torch.manual_seed(0)
    model = Normed().to(dtype)
    loss = nn.functional.cross_entropy(model(batch[0]).double(), batch[1])
    torch.manual_seed(0)
    with cl.launch(dict(precision=precision)) as context:
        engine = cl.initialize(Normed().to(dtype), context=context)
        assert float(engine.train_step(batch).loss) == pytest.approx(float(loss.detach()), rel=1e-6)
        state = engine.full_state_dict()
        torch.testing.assert_close(state["norm.running_mean"], model.norm.running_mean)


class Pictures(nn.Module):
    """Of [B, 3, 8, 8]. `casts`: as some models do themselves."""

    def __init__(self, casts: bool) -> None:
        super().__init__()
        self.casts, self.first, self.head = casts, nn.Conv2d(3, 4, 3), nn.Linear(144, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.head.weight.dtype) if self.casts else x
        out: Tensor = self.head(self.first(x).relu().flatten(1))
        return out


@pytest.mark.parametrize("precision, legal", [("bf16", "torch.bfloat16"), ("fp64", "torch.float64")])
def test_inputs_of_another_dtype_than_the_weights_are_named_unless_the_model_casts_them(
    precision: str, legal: str
) -> None:
    pictures = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(4)
    with cl.launch(dict(precision=precision, seed=1)) as context:
        one, other = (
            cl.initialize(partial(Pictures, casts), context=context, criterion=nn.functional.cross_entropy)
            for casts in (True, False)
        )
        loss = float(one.train_step(pictures).loss)
        for call in (other.train_step, other.eval_step):
            with pytest.raises(RuntimeError) as caught:
                call(pictures)
            (note,) = caught.value.__notes__
            assert note.startswith(
                f"batch: inputs is torch.float32, and the model's weights are {legal}. Legal: .to()"
            )
            assert note.endswith("or precision='fp32'")
        cast = pictures[0].to(getattr(torch, legal.removeprefix("torch.")))
        assert float(other.train_step((cast, pictures[1])).loss) == loss


def other_config(env: RankEnv, field: str, value: Any) -> str:
    shape = cl.models.GPTConfig(**GPT, **({field: value} if env.rank else {}))
    with env.launch(SGD) as context:
        return told_of(lambda: cl.initialize(lambda: cl.models.GPT(shape), context=context))


@pytest.mark.parametrize(("field", "value"), [("dropout", 0.2), ("eps", 1e-3), ("causal", False)])
def test_another_config_of_a_model_of_ours_is_refused(field: str, value: Any) -> None:
    """Before, ranks trained with another dropout in silence: layers of ours were not compared."""
    for told in run_world(other_config, 2, field, value):
        assert f"config.{field} is {value!r} on rank 1" in told and "legal: the same model" in told


def other_hugging_face_config(env: RankEnv, field: str, value: Any) -> str:
    import transformers

    sizes = dict(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    shape = transformers.LlamaConfig(**sizes, **({field: value} if env.rank else {}))
    torch.manual_seed(0)
    with env.launch(SGD) as context:
        inner = transformers.LlamaForCausalLM(shape)
        return told_of(lambda: cl.initialize(inner, context=context))


@pytest.mark.parametrize(("field", "value"), [("attention_dropout", 0.2), ("rms_norm_eps", 1e-3)])
def test_another_config_of_a_model_of_hugging_face_is_refused(field: str, value: Any) -> None:
    for told in run_world(other_hugging_face_config, 2, field, value):
        assert f"config.{field} is {value!r} on rank 1" in told and "legal: the same model" in told


def test_where_a_config_was_read_from_is_no_setting() -> None:
    assert run_world(other_hugging_face_config, 2, "name_or_path", "/of/this/node") == ["", ""]


def config_in_another_order(env: RankEnv) -> str:
    import transformers

    labels = {1: "second", 0: "first"} if env.rank else {0: "first", 1: "second"}
    shape = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        id2label=labels,
    )  # fmt: skip
    torch.manual_seed(0)
    with env.launch(SGD) as context:
        return told_of(lambda: cl.initialize(transformers.LlamaForCausalLM(shape), context=context))


def test_the_order_of_a_config_s_keys_is_no_setting() -> None:
    assert run_world(config_in_another_order, 2) == ["", ""]


def left_padded(kind: str) -> dict[str, Tensor]:
    """4 samples of 4, 6, 8 and 5 tokens behind padding, with next tokens as labels."""
    ids = torch.randint(1, VOCABULARY, (4, 8), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(8) >= 8 - torch.tensor([[4], [6], [8], [5]])).long()
    labels = F.pad(ids.masked_fill(mask == 0, -100)[:, 1:], (0, 1), value=-100)
    if kind != "labels of padding":
        labels = labels.masked_fill(mask == 0, -100)
    places = dict(position_ids=(mask.cumsum(1) - 1).clamp(min=0)) if kind == "position_ids" else {}
    return dict(input_ids=ids, attention_mask=mask, labels=labels) | places


def left_loss(env: RankEnv, family: str, kind: str, own_length: bool) -> float | str:
    """The loss of a step of batches that each rank has padded to its own length, or the refusal."""
    with env.launch(SGD) as context:
        torch.manual_seed(0)
        made = hugging_face.MODELS[family]().double()
        engine = cl.initialize(made, context=context)
        batch = {name: x[context.local_batch(4)] for name, x in left_padded(kind).items()}
        longest = int(batch["attention_mask"].sum(1).max()) if own_length else 8
        try:
            return float(engine.train_step({name: x[:, -longest:] for name, x in batch.items()}).loss)
        except ValueError as error:
            return str(error)


@pytest.mark.parametrize(
    ("family", "kind", "is_exact"),
    [
        ("hf-gpt2", "positions", False),
        ("hf-gpt2", "position_ids", True),
        ("hf-llama", "rotary", True),
        ("hf-llama", "labels of padding", False),
    ],
)
def test_ranks_that_pad_at_the_left_to_other_lengths_are_exact_or_refused(
    family: str, kind: str, is_exact: bool
) -> None:
    """A tokenizer with padding_side="left" once gave each number of ranks another loss, in silence."""
    (alone,) = run_world(left_loss, 1, family, kind, False)
    for said in run_world(left_loss, 2, family, kind, True):
        assert abs(said - alone) < 1e-12 if is_exact else "[6, 8] tokens on the ranks" in said
    for loss in run_world(left_loss, 2, family, kind, False):
        assert abs(loss - alone) < 1e-12


def dropped_loss(env: RankEnv, kernel: str, own_length: bool) -> float:
    """The loss of a step with dropout of attention, of batches padded at the right."""
    with env.launch(SGD) as context:
        torch.manual_seed(0)
        sizes = dict(vocab_size=VOCABULARY, n_positions=8, n_embd=8, n_layer=1, n_head=2, embd_pdrop=0.1)
        made = GPT2LMHeadModel(GPT2Config(**sizes, attn_pdrop=0.2, attn_implementation=kernel)).double()
        engine = cl.initialize(made, context=context)
        batch = {name: x.flip(1)[context.local_batch(4)] for name, x in left_padded("").items()}
        longest = int(batch["attention_mask"].sum(1).max()) if own_length else 8
        return float(engine.train_step({name: x[:, :longest] for name, x in batch.items()}).loss)


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_dropout_of_attention_has_the_masks_of_one_process_where_ranks_pad_to_other_lengths(
    kernel: str,
) -> None:
    """A mask was once counted by the number of keys, so in a shorter batch it was another, in silence."""
    (alone,) = run_world(dropped_loss, 1, kernel, False)
    for own_length in (True, False):
        for loss in run_world(dropped_loss, 2, kernel, own_length):
            assert abs(loss - alone) < 1e-12
