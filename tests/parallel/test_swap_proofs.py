"""A swap of layers is the model it began with, or is refused by the module's path and class; then nothing changes."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import colossal_lite as cl
from colossal_lite.config.parallel_schema import TensorConfig
from colossal_lite.distributed.emulated_ranks import EmulatedWorld
from colossal_lite.distributed.mesh import Mesh
from colossal_lite.layers.roles import Role, assign_roles, known_plan
from colossal_lite.layers.swap_checks import linear_faults
from colossal_lite.models import GPT, GPTConfig
from colossal_lite.parallel import first_swap, plan_proof
from colossal_lite.parallel.auto_plan import auto_plan
from colossal_lite.parallel.first_swap import FirstSwap
from colossal_lite.parallel.narrowing import narrowing
from colossal_lite.parallel.parallelize import parallelize
from colossal_lite.parallel.small_copy import (
    LARGE_NUMEL,
    LIMIT_BYTES,
    NoCopyError,
    deep_copy,
    set_back,
    small_copy,
)
from colossal_lite.sharding.mesh_layout import MeshLayout
from tests.shared import hugging_face
from tests.shared.own_models import HEADS, MODELS, TOKENS, WIDTH, WORDS, Model, plan_of
from tests.shared.pool import RankEnv, WorldError, run_world

WHOLE: dict[str, Any] = dict(size=2, sequence_parallel=False)
MODES: dict[str, dict[str, Any]] = {
    "1d": dict(size=2),
    "1d, whole": WHOLE,
    "1d on 4": dict(size=4),
    "2d": dict(size=4, mode="2d"),
    "2.5d": dict(size=8, mode="2.5d", depth=2),
    "3d": dict(size=8, mode="3d"),
}


def mesh_of(tensor: Mapping[str, Any]) -> Mesh:
    """Rank 0 of a mesh that cannot communicate: a plan is checked before anybody does."""
    layout = MeshLayout.build(tensor=TensorConfig(**tensor).axis())
    return Mesh.emulated(layout, EmulatedWorld(1.0))[0]


def swap(model: nn.Module, plan: Mapping[str, str], tensor: Mapping[str, Any]) -> None:
    parallelize(model, mesh_of(tensor), plan, sequence_parallel=tensor.get("sequence_parallel", True))


# ---- carried: on real ranks ----

EXACT = [
    ("padding_idx", "1d"),
    ("padding_idx", "1d on 4"),
    ("padding_idx", "2d"),
    ("padding_idx", "3d"),
    ("subclass of Embedding", "1d"),
    ("subclass of Embedding", "1d, whole"),
    ("subclass of Embedding", "2d"),
    ("subclass with padding_idx", "1d on 4"),
    ("subclass with padding_idx", "3d"),
    ("norm of 1 + w", "1d"),
    ("norm of 1 + w", "2d"),
    ("norm of 1 + w", "2.5d"),
    ("norm of 1 + w", "3d"),
    ("norm without weight", "2d"),
    ("LayerNorm without weight", "2d"),
    ("subclass of LayerNorm", "2d"),
    ("hook on a norm", "1d"),
    ("hook on a norm", "2d"),
    ("replicated, per token", "1d"),
    ("replicated, per token", "1d, whole"),
    ("replicated, across tokens", "1d, whole"),
    ("block.forward()", "1d"),
    ("attention.forward()", "1d"),
    ("attention.forward()", "1d, whole"),
    ("pairs of tokens", "1d, whole"),
]


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids, labels = (torch.randint(WORDS, (8, TOKENS), generator=generator) for _ in range(2))
    ids[:, -1], ids[:, -2] = 3, 30  # the words that are padding in some models
    return ids, labels


def plainly(name: str) -> tuple[list[float], dict[str, Tensor]]:
    model, losses = MODELS[name](), list[float]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        ids, labels = batch(step)
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def on_ranks(
    env: RankEnv, name: str, tensor: Mapping[str, Any], changes: Mapping[str, Any]
) -> tuple[list[float], dict[str, Tensor]]:
    config = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.5), seed=1, timeout_s=60, **changes)
    with env.launch(config | dict(parallel=dict(tensor=dict(tensor)))) as context:
        plan: Any = plan_of(name) if tensor["size"] > 1 else "auto"
        engine = cl.initialize(MODELS[name](), context=context, plan=plan)
        size, coord = context.mesh.size("data"), context.mesh.coord("data")
        losses = []
        for step in range(3):
            ids, labels = (each.chunk(size)[coord] for each in batch(step))
            losses.append(float(engine.train_step((ids, labels)).loss))
        return losses, engine.full_state_dict()


def assert_same(name: str, ranks: int, tensor: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
    losses, weights = plainly(name)
    for their_losses, theirs in run_world(on_ranks, ranks, name, tensor, changes):
        assert their_losses == pytest.approx(losses, rel=1e-12)
        for parameter, expected in weights.items():
            assert float((theirs[parameter] - expected).norm()) < 1e-12 * float(expected.norm()), parameter


@pytest.mark.parametrize(("name", "mode"), EXACT)
def test_what_a_layer_carries_trains_as_in_one_process(name: str, mode: str) -> None:
    assert_same(name, MODES[mode]["size"], MODES[mode], {})


# ---- refused: in one process ----

ANY = ("1d", "1d, whole", "2d", "3d")
CUT = r"Legal: roles that fit .* or tensor=1"
NO_LINEAR = r"its forward is not that of nn\.Linear"
REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "subclass of Linear": (ANY, rf"blocks\.1\.up \(ScaledLinear\): {NO_LINEAR}"),
    "weight_norm": (ANY, r"no pattern fits blocks\.1\.up\.parametrizations\.weight, which has parameters"),
    "forward replaced": (ANY, rf"blocks\.1\.up \(Linear\): {NO_LINEAR}"),
    "forward hook": (ANY, r"blocks\.1\.up \(Linear\): a forward hook, which no layer in its place carries"),
    "forward pre-hook": (ANY, r"blocks\.1\.up \(Linear\): a forward pre-hook, which no layer"),
    "backward hook": (ANY, r"blocks\.1\.up \(Linear\): a backward hook, which no layer"),
    "hook on a weight": (
        ANY,
        r"blocks\.0\.up\.weight: a hook on a parameter would see a part of its gradient",
    ),
    "max_norm": (ANY, r"words \(Embedding\): max_norm=0\.5, which no layer in its place carries; legal"),
    "scale_grad_by_freq": (ANY, r"words \(Embedding\): scale_grad_by_freq=True, which no layer"),
    "sparse": (ANY, r"words \(Embedding\): sparse=True, which no layer"),
    "embedding across tokens": (("1d", "2d"), rf"is not that of one process.*{CUT}"),
    "replicated, across tokens": (("1d",), r"With parallel\.tensor\.sequence_parallel=False they agree"),
    "pairs of tokens": (("1d",), r"With parallel\.tensor\.sequence_parallel=False they agree"),
}


@pytest.mark.parametrize(("name", "mode"), [(n, mode) for n, (modes, _) in REFUSED.items() for mode in modes])
def test_what_a_layer_would_lose_is_refused_by_path_and_class(name: str, mode: str) -> None:
    model = MODELS[name]()
    before = {n: type(m) for n, m in model.named_modules()}
    with pytest.raises(ValueError, match=REFUSED[name][1]):
        swap(model, plan_of(name), MODES[mode])
    assert before == {n: type(m) for n, m in model.named_modules()}, "nothing is changed"


@pytest.mark.parametrize("mode", ["1d", "1d, whole", "2d", "3d"])
def test_a_fused_qkv_that_is_no_qkv_is_refused_with_the_role_that_fits(mode: str) -> None:
    plan = plan_of("plain") | {"blocks.*.attention.qkv": "colwise"}
    with pytest.raises(
        ValueError,
        match=r"blocks\.0\.attention\.qkv \(Linear\) has the role colwise, and with colwise:qkv they agree",
    ):
        swap(MODELS["plain"](), plan, MODES[mode])


def drawn_by_torch(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * torch.rand(())


def drawn_by_python(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * random.random()


@pytest.mark.parametrize(
    "hook, generator", [(drawn_by_torch, "torch's own generator"), (drawn_by_python, "Python's random")]
)
def test_a_difference_of_a_model_that_draws_names_the_generator(hook: Any, generator: str) -> None:
    model = MODELS["plain"]()
    model.get_submodule("blocks.1").register_forward_hook(hook)
    with pytest.raises(
        ValueError, match=f"and code that draws from {generator}, which gives each emulated rank"
    ):
        swap(model, plan_of("plain"), MODES["1d"])


def test_ranks_refuse_alike() -> None:
    with pytest.raises(WorldError, match=r"blocks\.1\.up \(ScaledLinear\)") as error:
        run_world(on_ranks, 2, "subclass of Linear", MODES["1d"], {})
    assert error.value.ranks("raised") == [0, 1]


# ---- a sequence axis ----


class WithMean(nn.Module):
    """Adds the mean over the tokens that it sees."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x) + x.mean(1, keepdim=True)
        return y


class OwnGPT(GPT):
    """A subclass, so that it is proven."""


def own_gpt() -> GPT:
    return OwnGPT(GPTConfig(vocabulary=WORDS, layers=3, heads=HEADS, width=WIDTH, sequence=32))


SEQUENCES = {"ring": 2, "ulysses": 2, "allgather_kv": 2, "usp": 4}


def on_sequence(model: nn.Module, mode: str) -> None:
    layout = MeshLayout.build(sequence=SEQUENCES[mode], ulysses=2 if mode == "usp" else None)
    parallelize(model, Mesh.emulated(layout, EmulatedWorld(1.0))[0], sequence_mode=mode)


@pytest.mark.parametrize("mode", SEQUENCES)
@pytest.mark.parametrize("build", [own_gpt, hugging_face.gpt2, hugging_face.llama])
def test_attention_across_ranks_is_proven(build: Callable[[], nn.Module], mode: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        on_sequence(build(), mode)


@pytest.mark.parametrize(("size", "ulysses"), [(2, 1), (4, 1), (2, 2)])
def test_heads_are_proven_on_a_usp_axis_as_its_own_inner_part_divides_them(size: int, ulysses: int) -> None:
    config = GPTConfig(vocabulary=WORDS, layers=1, heads=ulysses, width=8, sequence=32)
    layout = MeshLayout.build(sequence=size, ulysses=ulysses)
    parallelize(OwnGPT(config), Mesh.emulated(layout, EmulatedWorld(1.0))[0], sequence_mode="usp")


@pytest.mark.parametrize("mode", SEQUENCES)
def test_what_mixes_tokens_beside_attention_is_refused_on_a_sequence_axis(mode: str) -> None:
    ours, theirs = own_gpt(), hugging_face.llama()
    block: Any = ours.blocks[0]
    block.mlp = WithMean(block.mlp)
    layer: Any = theirs.get_submodule("model.layers.1")
    layer.mlp = WithMean(layer.mlp)
    for model in (ours, theirs):
        with pytest.raises(
            ValueError, match="is not that of one process.*a module sees a rank's tokens.*sequence=1"
        ):
            on_sequence(model, mode)


# ---- a table that forward writes to ----


@pytest.mark.parametrize("stage", [0, 3])
def test_max_norm_is_exact_on_one_rank(stage: int) -> None:
    assert_same("max_norm", 1, dict(size=1), dict(zero=dict(stage=stage)))


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_max_norm_is_refused_where_ranks_keep_the_rows_of_each_others_words(stage: int) -> None:
    with pytest.raises(
        WorldError,
        match="words is a Embedding with max_norm=0.5: .*but not the copies under data=2. Legal: max_norm=None",
    ):
        run_world(on_ranks, 2, "max_norm", dict(size=1), dict(zero=dict(stage=stage)))


@pytest.mark.parametrize("name", ["padding_idx", "scale_grad_by_freq", "forward hook", "hook on a weight"])
def test_what_data_parallelism_does_not_swap_it_carries(name: str) -> None:
    assert_same(name, 1, dict(size=1), dict(zero=dict(stage=3)))


# ---- the proof itself ----


def roles_of(model: nn.Module, plan: Mapping[str, str]) -> dict[str, Role]:
    owners = [n for n, m in model.named_modules() if any(True for _ in m.parameters(recurse=False))]
    return assign_roles(plan, [n for n, _ in model.named_modules() if n], owners)


class Banked(nn.Module):
    """Its forward writes to a large table."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.register_buffer("bank", torch.zeros(numel, dtype=torch.int8))

    def forward(self, ids: Tensor) -> Tensor:
        self.get_buffer("bank").add_(1)
        logits: Tensor = self.head(self.table(ids))
        return logits


def test_a_proof_does_not_write_to_the_models_buffers_however_large_they_are() -> None:
    model = Banked(LARGE_NUMEL + 1)
    small = small_copy(model, {})
    small.model(torch.zeros(1, 4, dtype=torch.long))
    assert not model.get_buffer("bank").any()
    assert small.model.get_buffer("bank").dtype == torch.int8


def test_what_a_copy_shares_it_shares_again_when_it_is_set_back() -> None:
    model, row = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.zeros(3)
    for part, table in zip(model, (row, row), strict=True):
        part.register_buffer("row", table)
    model[0].register_buffer("first", row[:1])
    back = set_back(model)
    model[0].get_buffer("row").fill_(1)
    back()
    assert model[0].get_buffer("row") is model[1].get_buffer("row")
    assert not model[1].get_buffer("row").any()
    model[1].get_buffer("row").fill_(2)
    assert model[0].get_buffer("first") == 2


@pytest.mark.parametrize("name", ["plain", "pairs of tokens"])
def test_a_proof_takes_no_random_number_and_leaves_the_model_as_it_is(name: str) -> None:
    model = MODELS[name]()
    before, hooks = (
        copy.deepcopy(model.state_dict()),
        {n: len(m._forward_hooks) for n, m in model.named_modules()},
    )
    torch.manual_seed(5)
    random.seed(5)
    state, other = torch.get_rng_state(), random.getstate()
    small = small_copy(model, roles_of(model, plan_of(name)))
    small.model(torch.zeros(1, 4, dtype=torch.long))
    try:
        swap(model, plan_of(name), MODES["1d"])
    except ValueError:
        assert name == "pairs of tokens"
        assert hooks == {n: len(m._forward_hooks) for n, m in model.named_modules()}
        assert all(torch.equal(value, before[n]) for n, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state) and random.getstate() == other


def test_a_model_on_meta_is_proven_as_one_with_values_is() -> None:
    with torch.device("meta"):
        models = [Model(), MODELS["plain"]()]
    plan = plan_of("plain") | {"blocks.*.attention.qkv": "colwise"}
    for model in models:
        with pytest.raises(ValueError, match="with colwise:qkv they agree"):
            swap(model, plan, MODES["1d"])
        swap(model, plan_of("plain"), MODES["1d"])


def test_a_copy_has_two_blocks_of_a_kind_and_few_rows() -> None:
    model = MODELS["padding_idx"]()
    small = small_copy(model, roles_of(model, plan_of("padding_idx")))
    assert [n for n, _ in small.model.blocks.named_children()] == ["0", "1"]  # type: ignore[union-attr, operator]
    assert len(model.blocks) == 3
    assert small.padding == (3,) and small.words == WORDS
    assert all(p.dtype == torch.float64 for p in small.model.parameters())


def big_llama() -> nn.Module:
    config = LlamaConfig(num_hidden_layers=2, use_cache=False)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    for name, buffer in list(model.named_buffers()):
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._buffers[leaf] = torch.rand(buffer.shape)
    return model


def test_two_blocks_as_wide_as_1024_have_a_copy_where_widths_cannot_be_divided() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.TransformerEncoderLayer(1024, 16, 4096) for _ in range(24)))
    assert len(small_copy(model, {}).model) == 2  # type: ignore[arg-type]


def test_a_wide_model_is_proven_on_a_narrow_copy() -> None:
    model = big_llama()
    owners = [n for n, m in model.named_modules() if any(True for _ in m.parameters(recurse=False))]
    found = known_plan([n for n, _ in model.named_modules() if n], owners)
    assert found is not None
    roles = roles_of(model, found[1])
    with pytest.raises(NoCopyError, match=f"MiB; at most {LIMIT_BYTES >> 20} are taken"):
        small_copy(model, roles)
    narrow = narrowing(model, roles)
    assert narrow is not None
    small: Any = small_copy(model, roles, narrow).model
    assert small.model.layers[0].self_attn.head_dim == 4 and small.config.num_attention_heads == 32
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        swap(model, found[1], MODES["1d"])
    wrong = found[1] | {"model.layers.*.self_attn.q_proj": "colwise:gate_up"}
    with pytest.raises(ValueError, match="is not that of one process"):
        swap(big_llama(), wrong, MODES["1d"])


class LocalHeads(nn.Module):
    """States the width of a head, and its heads under a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.n_local_heads, self.head_dim = 8, 64
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(512, 512, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        sizes = (*x.shape[:2], self.n_local_heads, self.head_dim)
        q, k, v = (layer(x).view(sizes).transpose(1, 2) for layer in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.wo(y.transpose(1, 2).flatten(2))


def test_a_width_of_heads_that_a_module_states_makes_the_copy_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_proof, "LIMIT_BYTES", plan_proof.QUICK_BYTES)  # no copy is as wide as the model
    model = nn.Sequential(nn.Embedding(600, 512), *(LocalHeads() for _ in range(3)), nn.Linear(512, 600))
    assert auto_plan(model, 2).plan["*.wo"] == "rowwise"
    on_sequence(model, "ring")


class Counted(nn.Linear):
    copies = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        Counted.copies += 1
        return nn.Linear(self.in_features, self.out_features, device="meta")


def test_blocks_that_a_copy_has_not_are_never_copied() -> None:
    small_copy(nn.Sequential(*(nn.Sequential(Counted(4, 4)) for _ in range(12))), {})
    assert Counted.copies == 2


class OfFloats(Model):
    """Does not run on words."""

    def forward(self, ids: Tensor) -> Tensor:
        x = ids
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(self.norm(x))
        return y


def of_floats(tensor: Mapping[str, Any] = {}) -> FirstSwap:  # noqa: B006
    """What looks at the first batch of `OfFloats`, of which no warning is given at its swap."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = parallelize(OfFloats(), mesh_of(dict(size=2)), plan_of("plain"), **tensor)
    assert made.first_swap is not None
    return made.first_swap


def test_a_model_that_does_not_run_on_words_is_proven_by_its_first_batch() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        of_floats().check((torch.randn(3, TOKENS, WIDTH),), {}, 3)
    with pytest.raises(ValueError, match="first batch, .*parallel.tensor.sequence_parallel=False they agree"):
        of_floats(dict(sequence_parallel=True)).check((torch.randn(3, TOKENS, WIDTH),), {}, 3)


def test_a_model_that_runs_on_nothing_given_is_told_not_to_be_proven() -> None:
    with pytest.warns(
        UserWarning, match=r"OfFloats is not proven on a small copy \(blocks.0.norm_1: .*\); the classes"
    ):
        of_floats().check((torch.randn(3, TOKENS, WIDTH + 1),), {}, 3)


def test_a_model_too_large_for_its_first_batch_is_told_not_to_be_proven(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(first_swap, "MOST_QUICK_BYTES", 1)
    with pytest.warns(
        UserWarning, match=r"OfFloats is not proven on a small copy \(blocks.0.norm_1: .*\); the classes"
    ):
        made = parallelize(OfFloats(), mesh_of(dict(size=2)), plan_of("plain"))
    assert made.first_swap is None


class OfOneToken(Model):
    """Gives what `changed` makes of its logits, for the last token alone."""

    def __init__(self, changed: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.changed = changed

    def forward(self, ids: Tensor) -> Any:
        return self.changed(super().forward(ids))


@pytest.mark.parametrize("mode", ["1d", "2d", "2.5d"])
def test_logits_without_a_dim_of_tokens_are_proven_too(mode: str) -> None:
    swap(OfOneToken(lambda y: y[:, -1]), plan_of("plain"), MODES[mode])
    for changed in (
        lambda y: y.log_softmax(-1)[:, -1],
        lambda y: (y / y.std(-1, keepdim=True))[:, -1],
        lambda y: (y - y.mean(-1, keepdim=True))[:, -1].tanh(),
    ):
        with pytest.raises(ValueError, match="is not that of one process"):
            swap(OfOneToken(changed), plan_of("plain"), MODES[mode])


@pytest.mark.parametrize(
    "changed", [lambda y: {"start": y[..., 0], "stop": y[..., 1]}, lambda y: None, lambda y: y.argmax(-1)]
)
def test_a_model_that_gives_no_logits_is_refused_before_it_is_cut(changed: Callable[[Tensor], Any]) -> None:
    with pytest.raises(ValueError, match=r"model: forward gives .*; or parallel.tensor=1"):
        swap(OfOneToken(changed), plan_of("plain"), MODES["1d"])


def test_a_forward_of_its_own_that_cannot_be_proven_is_refused() -> None:
    model = OfFloats()
    model.words = MODELS["subclass of Embedding"]().words
    with pytest.raises(
        ValueError, match=r"words \(ScaledEmbedding\) has a forward of its own, which must be proven"
    ):
        swap(model, plan_of("plain"), MODES["1d"])


def test_sizes_are_refused_for_the_real_number_of_ranks_and_not_for_the_emulated_one() -> None:
    with pytest.raises(ValueError, match=f"tensor=8 does not divide {HEADS} heads"):
        swap(MODELS["plain"](), plan_of("plain"), dict(size=8))
    assert WIDTH % 8 == 0


class Casts(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


class OffByLittle(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.0 + 1e-7)


def test_a_class_that_acts_as_a_linear_is_told_from_one_that_is_off_in_its_seventh_digit() -> None:
    assert not list(linear_faults(Casts(6, 4)))
    assert list(linear_faults(OffByLittle(6, 4)))


def test_a_copy_is_that_of_deepcopy() -> None:
    class Stateful(nn.Linear):
        def __setstate__(self, state: Any) -> None:
            super().__setstate__(state)
            self.restored = True

    model = nn.Sequential(nn.Linear(4, 4), Stateful(4, 4), nn.MultiheadAttention(4, 2), nn.BatchNorm1d(4))
    first: Any = model[0]
    first.weight = model[1].weight
    first.notes = {"tie": model[1], "norm": model[3], "size": 1.5}
    first.same = first.notes
    first.register_forward_hook(lambda *_: None)
    made, right = deep_copy(model), copy.deepcopy(model)
    again: Any = made[0]
    assert again.weight is made[1].weight is not first.weight and again.same is again.notes is not first.notes
    assert again.notes["tie"] is made[1] and again.notes["norm"] is made[3]
    assert made[1].restored and not hasattr(model[1], "restored")
    for (name, module), (other, expected) in zip(made.named_modules(), right.named_modules(), strict=True):
        assert name == other and vars(module).keys() == vars(expected).keys()
    for key, value in right.state_dict().items():
        assert torch.equal(made.state_dict()[key], value)
    assert not {id(p) for p in made.parameters()} & {id(p) for p in model.parameters()}
    assert len(first._forward_hooks) == len(again._forward_hooks) == 1
