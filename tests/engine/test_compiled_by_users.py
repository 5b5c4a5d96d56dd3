"""What a user compiles by torch.compile, around the engine's own: the losses of the plain model, or a refusal."""

from __future__ import annotations

import gc
import pickle
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

import colossal_lite as cl
from tests.shared.pool import RankEnv, run_world
from tests.shared.refusals import told_of

CONFIG: cl.ConfigDict = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.5), timeout_s=100)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 12, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def compiled(model: Any, how: str) -> Any:
    """The model with all or some of it compiled. The backend runs traced code as it is."""
    match how:
        case "the model":
            return torch.compile(model, backend="eager")
        case "the model in place":
            model.compile(backend="eager")
        case "each block":
            model.blocks = nn.ModuleList(torch.compile(block, backend="eager") for block in model.blocks)
        case "a block":
            model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
        case "a block in place":
            model.blocks[1].compile(backend="eager")
        case "a forward":
            model.blocks[1].forward = torch.compile(model.blocks[1].forward, backend="eager")
    return model


def batch(step: int) -> tuple[Tensor, Tensor]:
    rows = torch.randint(12, (4, 7), generator=torch.Generator().manual_seed(step))
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def losses(env: RankEnv, how: str) -> list[float]:
    torch.manual_seed(0)
    with env.launch(CONFIG | dict(parallel=dict(tensor=env.world_size))) as context:
        engine = cl.initialize(compiled(Words(), how), context=context)
        return [float(engine.train_step(batch(step)).loss) for step in range(2)]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "how", ["the model", "the model in place", "each block", "a block", "a block in place"]
)
def test_what_a_user_compiles_trains_as_it_is_also_on_a_tensor_axis(how: str, ranks: int) -> None:
    plain = run_world(losses, 1, "as it is")[0]
    for found in run_world(losses, ranks, how):
        assert found == pytest.approx(plain, abs=1e-12)


class Attention(nn.Module):
    """Its code reads the sizes of the whole model."""

    def __init__(self) -> None:
        super().__init__()
        self.joined, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        samples, tokens, width = x.shape
        parts = self.joined(x).split(width, dim=2)
        q, k, v = (part.view(samples, tokens, 2, width // 2).transpose(1, 2) for part in parts)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(seen.transpose(1, 2).reshape(samples, tokens, width))
        return out


class AttentionBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.attention(x))


class WithAttention(Words):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(AttentionBlock() for _ in range(2))


def compiled_of_ours(env: RankEnv, how: str, sequence_parallel: bool) -> set[str]:
    """The files of this package that exchange, if two steps on a tensor axis have compiled code of them."""
    torch._dynamo.reset()
    torch._dynamo.utils.clear_compilation_metrics()
    torch.manual_seed(0)
    tensor = dict(size=2, sequence_parallel=sequence_parallel)
    with env.launch(CONFIG | dict(parallel=dict(tensor=tensor))) as context:
        engine = cl.initialize(compiled(Words(), how), context=context)
        for step in range(2):
            engine.train_step(batch(step))
    calls = [m for m in torch._dynamo.utils.get_compilation_metrics() if m.co_name]
    assert any(str(m.co_filename) == __file__ for m in calls)
    files = {str(m.co_filename).rpartition("/colossal_lite/")[2] for m in calls}
    return {name for name in files if name.startswith(("distributed/", "layers/tensor_1d_layers"))}


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("how", ["the model", "each block"])
def test_what_ranks_of_a_tensor_axis_exchange_within_a_compiled_module_is_not_traced(
    how: str, sequence_parallel: bool
) -> None:
    assert run_world(compiled_of_ours, 2, how, sequence_parallel) == [set(), set()]


def refused_beside(env: RankEnv, how: str, parallel: dict[str, Any]) -> str:
    torch.manual_seed(0)
    with env.launch(CONFIG | dict(parallel=parallel)) as context:
        return told_of(lambda: cl.initialize(compiled(WithAttention(), how), context=context))


@pytest.mark.parametrize(
    ("parallel", "words"),
    [(dict(tensor=2), "sees the sizes of the whole model"), (dict(sequence=2), "is shown whole sequences")],
)
@pytest.mark.parametrize(
    ("how", "which"), [("the model", "torch.compile of the model"), ("a block", "torch.compile of blocks.1")]
)
def test_compiled_code_that_would_see_whole_sizes_or_sequences_is_refused_by_name(
    how: str, which: str, parallel: dict[str, Any], words: str
) -> None:
    for told in run_world(refused_beside, 2, how, parallel):
        assert told.startswith(which) and words in told


def compiled_while_metered(env: RankEnv, how: str, meters: bool) -> tuple[list[float], set[tuple[str, bool]]]:
    """Losses of two steps: the last is metered, or the first by a budget. Compiled functions: whether a user's."""
    torch._dynamo.reset()
    torch._dynamo.utils.clear_compilation_metrics()
    torch.manual_seed(0)
    memory = {} if meters else dict(memory=dict(placement="auto", device_budget=2_000_000))
    with env.launch(CONFIG | memory) as context:
        engine = cl.initialize(compiled(Words(), how), context=context)
        found = [float(engine.train_step(batch(0)).loss)]
        with engine.metered() if meters else nullcontext():
            found.append(float(engine.train_step(batch(1)).loss))
    calls = [m for m in torch._dynamo.utils.get_compilation_metrics() if m.co_name]
    return found, {(m.co_name, str(m.co_filename) == __file__) for m in calls}


@pytest.mark.parametrize("meters", [False, True])
@pytest.mark.parametrize("how", ["the model", "the model in place", "each block"])
def test_a_metered_step_compiles_nothing_and_later_steps_compile_what_a_user_compiled(
    how: str, meters: bool
) -> None:
    plain = run_world(losses, 1, "as it is")[0]
    ((found, functions),) = run_world(compiled_while_metered, 1, how, meters)
    assert found == pytest.approx(plain, abs=1e-12)
    assert functions == {("forward", True)}


def losses_by_step(env: RankEnv, own_loop: bool) -> tuple[list[float], int]:
    """Losses by a function of a whole step, compiled, of a model with a compiled block; graphs of that block."""
    torch._dynamo.reset()  # an earlier world of this process may have compiled the block
    torch.manual_seed(0)
    with env.launch(CONFIG) as context:
        engine = cl.initialize(compiled(Words(), "a block in place"), context=context)

        def step(ids: Tensor, labels: Tensor) -> Tensor:
            if not own_loop:
                return engine.train_step((ids, labels)).loss
            logits = engine(ids)
            engine.backward(nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))
            return engine.step().loss

        compiled_step = torch.compile(step, backend="eager")
        counters = torch._dynamo.utils.counters["stats"]
        before = counters["unique_graphs"]
        found = [float(compiled_step(*batch(index))) for index in range(2)]
        return found, counters["unique_graphs"] - before


@pytest.mark.parametrize("own_loop", [False, True])
def test_a_compiled_function_of_a_whole_step_leaves_the_engine_untraced_and_compiled_blocks_compiled(
    own_loop: bool,
) -> None:
    plain = run_world(losses, 1, "as it is")[0]
    ((found, graphs),) = run_world(losses_by_step, 1, own_loop)
    assert found == pytest.approx(plain, abs=1e-12)
    assert 1 <= graphs <= 12  # the engine's own code has hundreds


def losses_in_one_graph(env: RankEnv, how: str, stage: int, config: dict[str, Any]) -> list[float]:
    """Losses where torch may not leave any code of a compiled module untraced, nor trace a hook that waits."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any = Words()
    options: Any = dict(backend="aot_eager", fullgraph=True)
    for module in {"the model": [model], "the blocks": model.blocks}.get(how, []):
        module.compile(**options)
    for block in model.blocks if how == "their forwards" else ():
        block.forward = torch.compile(block.forward, **options)
    whole = torch.compile(model, **options) if how == "the model, wrapped" else model
    with env.launch(CONFIG | dict(zero=dict(stage=stage)) | config) as context:
        engine = cl.initialize(whole, context=context)
        rows = slice(env.rank * 4 // env.world_size, (env.rank + 1) * 4 // env.world_size)
        parts = [[x[rows] for x in batch(step)] for step in range(3)]
        return [float(engine.train_step(tuple(part)).loss) for part in parts]


@pytest.mark.parametrize(("stage", "config"), [(3, {}), (1, dict(memory=dict(placement="host")))])
@pytest.mark.parametrize("how", ["the model", "the model, wrapped", "the blocks", "their forwards"])
def test_a_compiled_module_stays_one_graph_where_its_weights_are_sharded_or_updated_late(
    how: str, stage: int, config: dict[str, Any]
) -> None:
    plain = run_world(losses_in_one_graph, 1, "as it is", 0, {})[0]
    for found in run_world(losses_in_one_graph, 2, how, stage, config):
        assert found == pytest.approx(plain, abs=1e-12)


def test_the_head_of_a_model_that_is_compiled_as_one_graph_is_left_as_it_is() -> None:
    plain = run_world(losses_in_one_graph, 1, "as it is", 0, {})[0]
    assert run_world(losses_in_one_graph, 1, "the model", 0, {})[0] == pytest.approx(plain, abs=1e-12)


def called_alone(env: RankEnv) -> list[float]:
    """Losses of a model with a compiled block that another module's code enters by its parts."""
    torch.manual_seed(0)
    model: Any = Words()
    block = compiled(model, "a block in place").blocks[1]
    block.entered = partial(Block.forward, block)

    def forward(ids: Tensor) -> Tensor:
        out: Tensor = model.head(block.entered(model.blocks[0](model.embedding(ids))))
        return out

    model.forward = forward
    with env.launch(CONFIG | dict(zero=dict(stage=3 if env.world_size > 1 else 0))) as context:
        engine = cl.initialize(model, context=context)
        rows = slice(env.rank * 4 // env.world_size, (env.rank + 1) * 4 // env.world_size)
        return [float(engine.train_step(tuple(x[rows] for x in batch(step))).loss) for step in range(2)]


def test_a_compiled_block_may_also_be_entered_by_its_parts() -> None:
    plain = run_world(called_alone, 1)[0]
    for found in run_world(called_alone, 2):
        assert found == pytest.approx(plain, abs=1e-12)


def in_a_pipeline(env: RankEnv, how: str) -> str | list[float]:
    """Losses of a model in two stages, some of it compiled; or what refuses it."""
    torch.manual_seed(0)
    with env.launch(CONFIG | dict(parallel=dict(pipeline=env.world_size))) as context:
        model = compiled(Words(), how)
        if "the model" in how and env.world_size > 1:
            return told_of(lambda: cl.initialize(model, context=context))
        engine = cl.initialize(model, context=context)
        return [float(engine.train_step(batch(step)).loss) for step in range(2)]


def test_a_pipeline_takes_compiled_blocks_and_refuses_a_model_that_is_compiled_as_a_whole() -> None:
    plain = run_world(in_a_pipeline, 1, "as it is")[0]
    for how in ("each block", "a block in place"):
        for found in run_world(in_a_pipeline, 2, how):
            assert found == pytest.approx(plain, abs=1e-12)
    for how in ("the model", "the model in place"):
        for told in run_world(in_a_pipeline, 2, how):
            assert "parallel.pipeline: the model itself (Words) is compiled" in told, told


def of_a_wrapped_model(env: RankEnv, how: str, folder: str, saves: bool) -> tuple[list[str], list[float]]:
    """Names of its parameters and its losses, from a checkpoint in `folder` on, or up to it."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any = Words()
    model.blocks = nn.ModuleList(Dropping() for _ in range(2))
    given = compiled(model, how)
    names = [*given.state_dict()]
    with env.launch(CONFIG | dict(zero=dict(stage=env.world_size))) as context:
        engine = cl.initialize(given, context=context)
        if not saves:
            engine.load(folder)
        rows = slice(env.rank * 4 // env.world_size, (env.rank + 1) * 4 // env.world_size)
        found = [float(engine.train_step(tuple(x[rows] for x in batch(step))).loss) for step in range(2)]
        if saves:
            engine.save(folder)
        inner = [*engine.full_state_dict()]
        engine.close()
    assert [*given.state_dict()] == names, "the wrappers are there again"
    assert all(module._compiled_call_impl is None for module in given.modules())
    return inner, found


@pytest.mark.parametrize("how", ["the model", "each block"])
def test_a_wrapper_of_torch_compile_changes_no_name_mask_or_checkpoint(how: str, tmp_path: Path) -> None:
    def ran(how: str, name: str, saves: bool, ranks: int = 1) -> list[tuple[list[str], list[float]]]:
        return run_world(of_a_wrapped_model, ranks, how, str(tmp_path / name), saves)

    (plain,), (wrapped,) = ran("as it is", "plain", True), ran(how, "wrapped", True)
    assert wrapped[0] == plain[0] and wrapped[1] == pytest.approx(plain[1], abs=1e-12)
    ((_, on),) = ran("as it is", "plain", False)
    for each, name, ranks in ((how, "plain", 1), ("as it is", "wrapped", 1), (how, "wrapped", 2)):
        for _, found in ran(each, name, False, ranks):
            assert found == pytest.approx(on, abs=1e-12)


def of_a_function(env: RankEnv, how: str) -> tuple[list[str], list[float]]:
    """Names and losses of a model that a function builds, compiled."""
    with env.launch(CONFIG | dict(zero=dict(stage=env.world_size))) as context:
        engine = cl.initialize(lambda: compiled(Words(), how), context=context)
        rows = slice(env.rank * 4 // env.world_size, (env.rank + 1) * 4 // env.world_size)
        found = [float(engine.train_step(tuple(x[rows] for x in batch(step))).loss) for step in range(2)]
        return [*engine.full_state_dict()], found


def test_a_function_may_build_a_model_that_is_compiled() -> None:
    names, plain = run_world(of_a_function, 1, "as it is")[0]
    for how in ("the model", "each block"):
        for ranks in (1, 2):
            for given, found in run_world(of_a_function, ranks, how):
                assert given == names and found == pytest.approx(plain, abs=1e-12)


def loaded_and_copied(env: RankEnv) -> tuple[bool, Any]:
    """Whether an engine loads the state dict of a wrapper, and what a copy of the model computes after it in eval()."""
    torch.manual_seed(0)
    model: Any = Words().double()
    model.blocks = nn.ModuleList(Dropping() for _ in range(2)).double()
    given = torch.compile(model, backend="eager")
    state = {name: torch.full_like(x, 0.1) for name, x in given.state_dict().items()}
    with env.launch(CONFIG) as context:
        engine = cl.initialize(given, context=context)
        engine.load_full_state_dict(state)
        is_loaded = all(bool((x == 0.1).all()) for x in engine.full_state_dict().values())
        engine.train_step(batch(0))
        engine.close()
    pickle.dumps(model)
    model.train()
    copied = deepcopy(model).eval()
    return is_loaded, torch.equal(copied(batch(1)[0]), model.eval()(batch(1)[0]))


def test_a_wrapper_s_state_loads_and_a_model_may_be_copied_after_its_engine() -> None:
    assert run_world(loaded_and_copied, 1) == [(True, True)]


class Small(nn.Module):
    """Words whose layers a user has compiled one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.drop, self.head = (
            each if isinstance(each, nn.Embedding) else torch.compile(each, backend="eager")
            for each in (nn.Embedding(12, 8), nn.LayerNorm(8), nn.Dropout(0.2), nn.Linear(8, 12))
        )

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.drop(self.norm(self.embedding(ids))))
        return out


def after_the_engine(env: RankEnv) -> bool:
    """Whether the model has the trained weights, in names as given, and computes with them."""
    torch.manual_seed(0)
    model = Small().double()
    names = [*model.state_dict()]
    with env.launch(CONFIG) as context:
        engine = cl.initialize(model, context=context)
        engine.train_step(batch(0))
        right, loss = engine.full_state_dict(), float(engine.eval_step(batch(1)))
        engine.close()
    model.eval()
    found = {name.replace("_orig_mod.", ""): x for name, x in model.state_dict().items()}
    ids, labels = batch(1)
    own = nn.functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
    is_same = all(torch.equal(found[name], x) for name, x in right.items())
    return is_same and len(names) == len(found) and float(own) == pytest.approx(loss, abs=1e-12)


def test_layers_that_were_compiled_one_by_one_have_the_trained_weights_after_the_engine() -> None:
    assert run_world(after_the_engine, 1) == [True]


def kinds_after_the_engine(env: RankEnv, wraps: bool) -> list[str]:
    """The modules of a model with tensors that ranks share, after its engine."""
    torch.manual_seed(0)
    model: Any = Words()
    if wraps:
        model.head = torch.compile(model.head, backend="eager")
    with env.launch(CONFIG | dict(parallel=dict(tensor=2))) as context:
        engine = cl.initialize(model, context=context)
        engine.train_step(batch(0))
        engine.close()
    return [type(module).__name__ for module in model.modules()]


def test_a_layer_that_ranks_share_is_not_covered_by_its_wrapper_after_the_engine() -> None:
    assert run_world(kinds_after_the_engine, 2, True) == run_world(kinds_after_the_engine, 2, False)


def not_taken(env: RankEnv, how: str) -> str:
    """What refuses a model with a wrapper; it is left as it was given."""
    with env.launch(CONFIG | dict(parallel=dict(data=1))) as context:
        model = compiled(Words(), how)
        block = model.blocks[1]
        if how == "a hook":
            block = model.blocks[1] = torch.compile(block, backend="eager")
            block.register_forward_hook(lambda *_: None)
        else:
            for p in model.parameters():
                p.requires_grad_(False)
        found = told_of(lambda: cl.initialize(model, context=context))
        assert model.blocks[1] is block and type(block).__name__ == "OptimizedModule"
        return found


def test_a_model_that_is_refused_has_its_wrappers_as_before_and_a_hook_on_one_is_refused() -> None:
    (told,) = run_world(not_taken, 1, "a hook")
    assert "a hook is on what torch.compile has put around a Block" in told
    (told,) = run_world(not_taken, 1, "a block")
    assert "no parameter requires a gradient" in told


def left_of_an_engine(env: RankEnv) -> tuple[list[bool], bool]:
    """Whether each compiled call is its own again after the engine, and whether the engine is freed."""
    config = CONFIG | dict(zero=dict(stage=3))
    ids = torch.arange(16).view(4, 4) % 12
    with env.launch(config) as context:
        model = compiled(Words(), "a block in place")
        model.compile(backend="eager")
        calls = [model._compiled_call_impl, model.blocks[1]._compiled_call_impl]
        engine = cl.initialize(model, context=context)
        own = context.local_batch(4)
        engine.train_step((ids[own], ids.roll(1)[own]))
        seen, gone = [model, model.blocks[1]], ref(engine._weights)
        engine.close()
        del engine
        gc.collect()
        same = [now._compiled_call_impl is call for now, call in zip(seen, calls, strict=True)]
        return same, gone() is None


def test_a_compiled_module_has_its_own_call_again_after_the_engine_and_holds_nothing_of_it() -> None:
    assert run_world(left_of_an_engine, 2) == [([True, True], True)] * 2


class Dropping(Block):
    """A block with dropouts of both kinds, which reads a shape and a device behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(self.drop(super().forward(x)), 0.3, self.training)
        return x + torch.arange(x.shape[1], device=x.device)[:, None] / 8


def losses_with_dropout(env: RankEnv, how: str, stage: int) -> list[float]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any = Words()
    model.blocks = nn.ModuleList(Dropping() for _ in range(2))
    with env.launch(CONFIG | dict(zero=dict(stage=stage))) as context:
        engine = cl.initialize(compiled(model, how), context=context)
        rows = slice(env.rank * 4 // env.world_size, (env.rank + 1) * 4 // env.world_size)
        return [float(engine.train_step(tuple(x[rows] for x in batch(step))).loss) for step in range(3)]


@pytest.mark.parametrize("how", ["the model in place", "a block in place", "a forward"])
def test_dropouts_in_a_compiled_module_have_the_masks_of_the_plain_model(how: str) -> None:
    plain = run_world(losses_with_dropout, 1, "as it is", 0)[0]
    assert run_world(losses_with_dropout, 1, how, 0)[0] == pytest.approx(plain, abs=1e-12)
    for found in run_world(losses_with_dropout, 2, how, 3):
        assert found == pytest.approx(plain, abs=1e-12)


def compiled_late(env: RankEnv, how: str, stage: int) -> list[str]:
    """What refuses a model that is compiled between two steps, in a step and in an evaluation."""
    torch.manual_seed(0)
    with env.launch(CONFIG | dict(zero=dict(stage=stage))) as context:
        engine = cl.initialize(Words(), context=context)
        rows = slice(env.rank * 4 // env.world_size, (env.rank + 1) * 4 // env.world_size)
        part = tuple(x[rows] for x in batch(0))
        engine.train_step(part)
        compiled(engine.model, how)
        calls = (lambda: engine.train_step(part), lambda: engine(part[0]), lambda: engine.eval_step(part))
        return [told_of(call) for call in calls]


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("how", ["the model in place", "a block in place", "a forward"])
def test_a_module_that_is_compiled_after_the_engine_is_refused_by_name(how: str, stage: int) -> None:
    name = "the model (Words)" if how == "the model in place" else "blocks.1 (Block)"
    for told in run_world(compiled_late, 2, how, stage):
        for each in told:
            assert f"{name} was compiled since the engine was made" in each
            assert "Legal: the same compilation before cl.initialize" in each
