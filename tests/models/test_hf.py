"""GPT-2 and Llama to and from Hugging Face: bits one way and back, and the logits of the reference library."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from colossal_lite.checkpoint.checkpointer import Checkpointer
from colossal_lite.checkpoint.files import inspect, listed
from colossal_lite.checkpoint.manifest import CheckpointError
from colossal_lite.checkpoint.run_state import HeldTensor, RunFacts
from colossal_lite.checkpoint.tools import export, import_
from colossal_lite.distributed.key_value_store import LocalStore
from colossal_lite.launcher import command
from colossal_lite.launcher.command import main
from colossal_lite.models import GPT, GPTConfig
from colossal_lite.models.hf import config_from_hf, config_to_hf, from_hf, load_pretrained, to_hf, write_hf
from colossal_lite.sharding.mesh_layout import MeshLayout
from colossal_lite.sharding.shard_spec import ShardSpec, dims_of
from tests.shared.pool import RankEnv, run_world

LLAMA: dict[str, Any] = dict(position="rotary", norm="rms", activation="swiglu", bias=False)
SIZES: dict[str, Any] = dict(vocabulary=61, layers=2, heads=4, width=32, sequence=16)
CONFIGS: dict[str, GPTConfig] = {
    "gpt2": GPTConfig(**SIZES),
    "gpt2 untied, narrow": GPTConfig(**SIZES, tied=False, ffn=48, eps=1e-6),
    "llama": GPTConfig(**SIZES, **LLAMA, tied=False),
    "llama grouped, tied": GPTConfig(**SIZES, **LLAMA, kv_heads=2, rotary_base=5e5, eps=1e-6),
    "llama with biases": GPTConfig(**SIZES, **LLAMA | dict(bias=True), kv_heads=1, tied=False, ffn=40),
}


def model_of(config: GPTConfig) -> GPT:
    """A model no part of which is trivial: biases and norms are random too."""
    torch.manual_seed(1)
    model = GPT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2)
    return model.eval()


def saved(folder: Path, model: Any, step: int = 3, facts: dict[str, Any] | None = None) -> Path:
    """A checkpoint of the model, as a run would leave it."""
    held = [
        HeldTensor(f"model/{n}", ShardSpec(n, dims_of(p.shape)), p.detach())
        for n, p in model.named_parameters()
    ]
    disk = Checkpointer(MeshLayout.build(), 0, LocalStore(), keep=3, timeout_s=5, heard=str)
    run = RunFacts(step, 0, 0, {"seed": 0}, facts or vars(model.config), {}, {})
    return disk.save(folder, held, run, asynchronous=False).wait()


IDS = torch.randint(61, (3, 16), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def auto() -> Iterator[Any]:
    importlib.import_module(
        "tests.shared.hugging_face"
    )  # first: it imports transformers the way a source tree must
    from transformers import AutoModelForCausalLM

    yield AutoModelForCausalLM


@pytest.mark.parametrize("name", CONFIGS)
def test_an_export_opens_with_from_pretrained_and_gives_the_same_logits(
    name: str, tmp_path: Path, auto: Any
) -> None:
    model = model_of(CONFIGS[name])
    saved(tmp_path / "run", model)
    export(tmp_path / "run", tmp_path / "hf")
    theirs, found = auto.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(found[key] for key in found if key.endswith("_keys")), found
    with torch.no_grad():
        ours, logits = model(IDS), theirs.eval()(IDS).logits
        assert float((ours - logits).abs().max()) <= 1e-5 * float(ours.abs().max())
        assert torch.equal(load_pretrained(tmp_path / "hf").eval()(IDS), ours)


class Adapted(torch.nn.Module):
    """A linear with a term of low rank, as a user writes it."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = torch.nn.Linear(base.in_features, 2, bias=False)
        self.up = torch.nn.Linear(2, base.out_features, bias=False)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["ours", "theirs"])
def test_a_model_with_adapters_is_no_export_and_one_that_is_merged_is(
    kind: str, tied: bool, tmp_path: Path, auto: Any
) -> None:
    model: Any = model_of(GPTConfig(**SIZES, **LLAMA, tied=tied))
    facts = vars(model.config)
    if kind == "theirs":
        config = importlib.import_module("transformers").AutoConfig.for_model(**config_to_hf(model.config))
        model, facts = auto.from_config(config), config.to_dict()
    block = model.model.layers[0].self_attn if kind == "theirs" else model.blocks[0].attention
    name = "q_proj" if kind == "theirs" else "qkv"
    plain = getattr(block, name)
    for folder, module in (("adapted", Adapted(plain)), ("merged", plain)):
        setattr(block, name, module)
        saved(tmp_path / folder, model, facts=facts)
    with pytest.raises(
        ValueError, match=rf"unexpected: .*{name}\.base\.weight[\s\S]*legal: .*merge adapters"
    ):
        export(tmp_path / "adapted", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    export(tmp_path / "merged", tmp_path / "out")
    _, found = auto.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(found[key] for key in found if key.endswith("_keys")), found


@pytest.mark.parametrize("name", CONFIGS)
def test_what_their_library_saved_gives_its_logits(name: str, tmp_path: Path, auto: Any) -> None:
    import transformers

    config = transformers.AutoConfig.for_model(**config_to_hf(CONFIGS[name]))
    torch.manual_seed(2)
    theirs = auto.from_config(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0.0, 0.2)
        theirs.save_pretrained(tmp_path / "hf")
        ours = load_pretrained(tmp_path / "hf").eval()
        logits = theirs(IDS).logits
        assert float((ours(IDS) - logits).abs().max()) <= 1e-5 * float(logits.abs().max())


@pytest.mark.parametrize("name", CONFIGS)
def test_there_and_back_no_bit_changes(name: str) -> None:
    config = CONFIGS[name]
    state = model_of(config).state_dict()
    theirs = to_hf(config, state)
    back = from_hf(config, theirs)
    assert back.keys() == state.keys() and all(torch.equal(back[key], state[key]) for key in state)
    assert config_from_hf(config_to_hf(config)) == config_from_hf(
        config_to_hf(config_from_hf(config_to_hf(config)))
    )
    assert GPT(config_from_hf(config_to_hf(config))).state_dict().keys() == state.keys()


def test_an_import_is_a_checkpoint_of_step_0_that_a_run_starts_from(tmp_path: Path) -> None:
    model = model_of(CONFIGS["llama"])
    write_hf(tmp_path / "hf", config_to_hf(model.config), to_hf(model.config, model.state_dict()))
    path = import_(tmp_path / "hf", tmp_path / "run")
    assert inspect(path).step == 0 and inspect(path).model == vars(model.config) | {"kv_heads": 4, "ffn": 128}
    for state, steps in run_world(start_from, 2, str(tmp_path / "run")):
        assert steps == 0 and all(
            torch.equal(state[name], value) for name, value in model.state_dict().items()
        )


def start_from(env: RankEnv, folder: str) -> tuple[dict[str, Tensor], int]:
    import colossal_lite as cl

    with env.launch(dict(precision="fp32", optimizer=dict(type="adamw", lr=1e-3))) as context:
        engine = cl.initialize(lambda: GPT(CONFIGS["llama"]), context=context)
        part = context.local_batch(2)
        engine.train_step((IDS[:2][part], IDS[:2].roll(-1)[part]))
        loaded = engine.load(folder)
        moments = engine.full_optimizer_state()
        assert not any(value.any() for kinds in moments.values() for value in kinds.values())
        engine.train_step((IDS[:2][part], IDS[:2].roll(-1)[part]))
        engine.load(folder)
        state = engine.full_state_dict()
        engine.close()
        return state, loaded.step


def test_large_models_are_cut_into_files_with_an_index(
    tmp_path: Path, auto: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from colossal_lite.models import hf

    monkeypatch.setattr(hf, "FILE_BYTES", 20_000)
    model = model_of(CONFIGS["gpt2"])
    write_hf(tmp_path / "hf", config_to_hf(model.config), to_hf(model.config, model.state_dict()))
    assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) > 2
    with torch.no_grad():
        assert torch.equal(load_pretrained(tmp_path / "hf").eval()(IDS), model(IDS))
        logits = auto.from_pretrained(tmp_path / "hf").eval()(IDS).logits
        assert torch.allclose(logits, model(IDS), rtol=1e-5, atol=1e-5)


BAD: dict[str, tuple[Callable[[dict[str, Any]], object], GPTConfig, str]] = {
    "no family": (lambda c: None, GPTConfig(**SIZES, position="rotary"), "Hugging Face has no family for it"),
    "an encoder": (lambda c: None, GPTConfig(**SIZES, causal=False), "Hugging Face has no family for it"),
    "an encoder of theirs": (lambda c: c.update(is_causal=False), CONFIGS["llama"], "is_causal=False"),
    "scaled rope": (
        lambda c: c.update(rope_parameters={"rope_type": "llama3"}),
        CONFIGS["llama"],
        "rope_scaling",
    ),
    "another activation": (
        lambda c: c.update(activation_function="relu"),
        CONFIGS["gpt2"],
        "activation_function='relu'",
    ),
    "another model": (lambda c: c.update(model_type="bert"), CONFIGS["gpt2"], "model_type='bert'"),
    "a width of heads": (lambda c: c.update(head_dim=64), CONFIGS["llama"], "head_dim=64"),
    "half of the biases": (lambda c: c.update(mlp_bias=True), CONFIGS["llama"], "mlp_bias=True"),
    "a quantized model": (
        lambda c: c.update(quantization_config={"quant_method": "gptq"}),
        CONFIGS["llama"],
        "quantization_config={'quant_method': 'gptq'}; legal: None",
    ),
    "a size in quotes": (
        lambda c: c.update(hidden_size="32"),
        CONFIGS["llama"],
        "width='32'; legal is a whole",
    ),
    "a size with a point": (lambda c: c.update(n_layer=2.0), CONFIGS["gpt2"], "layers=2.0; legal is a whole"),
    "a number in quotes": (
        lambda c: c.update(rms_norm_eps="1e-6"),
        CONFIGS["llama"],
        "eps='1e-6'; legal is a",
    ),
    "a word for a truth": (
        lambda c: c.update(tie_word_embeddings="no"),
        CONFIGS["llama"],
        "tied='no'; legal are",
    ),
    "nothing": (lambda c: c.pop("vocab_size"), CONFIGS["llama"], "vocab_size is missing"),
}


LEAST: dict[str, dict[str, Any]] = {
    "gpt2": dict(vocab_size=50, n_layer=2, n_head=4, n_embd=32, n_positions=16),
    "llama": dict(
        vocab_size=50, num_hidden_layers=2, num_attention_heads=4, hidden_size=32, intermediate_size=48,
        max_position_embeddings=16,
    ),
    "llama, another base": dict(
        vocab_size=50, num_hidden_layers=2, num_attention_heads=4, hidden_size=32, intermediate_size=48,
        max_position_embeddings=16, rope_theta=5e5,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LEAST)
def test_what_a_config_leaves_out_is_what_transformers_takes(name: str, auto: Any) -> None:
    from transformers import AutoConfig

    kind = name.partition(",")[0]
    whole = AutoConfig.for_model(kind, **LEAST[name], bos_token_id=None, eos_token_id=None).to_dict()
    ours, theirs = (config_from_hf(facts) for facts in ({"model_type": kind} | LEAST[name], whole))
    assert replace(ours, kv_heads=ours.key_heads) == replace(theirs, kv_heads=theirs.key_heads)


DROPOUTS: dict[str, tuple[dict[str, float], str]] = {
    "gpt2": (dict(attn_pdrop=0.1), "attn_pdrop=0.1, and GPT trains with 0.0"),
    "gpt2, of embeddings": (
        dict(embd_pdrop=0.2, resid_pdrop=0.1),
        "embd_pdrop=0.2, and GPT trains with 0.1",
    ),
    "llama": (dict(attention_dropout=0.1), "attention_dropout=0.1, and GPT trains with 0.0"),
}


@pytest.mark.parametrize("name", DROPOUTS)
def test_a_dropout_that_a_gpt_has_not_is_named_where_a_folder_is_read(
    name: str, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """It once was left out in silence, so a user trained another model."""
    changes, says = DROPOUTS[name]
    config = CONFIGS[name.partition(",")[0]]
    words, tensors = config_to_hf(config), to_hf(config, model_of(config).state_dict())
    write_hf(tmp_path / "same", words, tensors)
    write_hf(tmp_path / "other", words | changes, tensors)
    write_hf(tmp_path / "none", words | dict.fromkeys(changes), tensors)
    load_pretrained(tmp_path / "same")
    if "resid_pdrop" not in changes and "attn_pdrop" not in changes:
        load_pretrained(tmp_path / "none")
    import_(tmp_path / "same", tmp_path / "same checkpoints")
    assert not recwarn.list
    with pytest.warns(UserWarning, match=says):
        load_pretrained(tmp_path / "other")
    with pytest.warns(UserWarning, match=says):
        import_(tmp_path / "other", tmp_path / "other checkpoints")


@pytest.mark.parametrize("name", BAD)
def test_what_has_no_other_form_is_refused_by_name(name: str) -> None:
    change, config, says = BAD[name]
    with pytest.raises(ValueError) as caught:
        words = config_to_hf(config)
        change(words)
        config_from_hf(words)
    assert says in str(caught.value)


def test_wrong_tensors_are_listed(tmp_path: Path) -> None:
    config = CONFIGS["llama"]
    theirs = to_hf(config, model_of(config).state_dict())
    theirs["extra"] = theirs.pop("model.norm.weight")
    with pytest.raises(ValueError, match="missing: model.norm.weight\n  unexpected: extra"):
        from_hf(config, theirs)
    theirs["model.norm.weight"] = theirs.pop("extra")[:-1]
    with pytest.raises(ValueError, match=r"shape: norm.weight is \(31,\), its config says \(32,\)"):
        from_hf(config, theirs)


UP = "model.layers.0.mlp.up_proj.weight"
QUERY = "model.layers.1.self_attn.q_proj.weight"
MISFITS: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "turned": (lambda t: t.update({UP: t[UP].t()}), f"shape: {UP} is (32, "),
    "rows of the next": (
        lambda t: t.update({UP: t[UP][1:], UP.replace("up", "gate"): torch.cat([t[UP], t[UP][:1]])}),
        f"shape: {UP} is (127, 32), its config says (128, 32)",
    ),
    "too many dimensions": (lambda t: t.update({QUERY: t[QUERY][None]}), f"shape: {QUERY} is (1, 32, 32)"),
    "whole numbers": (
        lambda t: t.update({UP: t[UP].long()}),
        f"dtype: {UP} is torch.int64; legal: torch.float64",
    ),
    "8 bits": (
        lambda t: t.update({UP: t[UP].to(torch.float8_e4m3fn)}),
        f"dtype: {UP} is torch.float8_e4m3fn",
    ),
    "another head": (
        lambda t: t.update({"lm_head.weight": -t["model.embed_tokens.weight"]}),
        "tied: lm_head.weight is not the embedding, and its config ties them. Legal: tie_word_embeddings=false",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_tensors_that_would_be_joined_cast_or_dropped_are_refused_by_name(name: str) -> None:
    """Rows that are missing in one and too many in the next once made a model, and another head was dropped."""
    config, (change, says) = CONFIGS["llama grouped, tied"], MISFITS[name]
    theirs = to_hf(config, model_of(config).state_dict())
    change(theirs)
    with pytest.raises(ValueError) as caught:
        from_hf(config, theirs)
    assert says in str(caught.value)
    if name == "another head":  # the legal choices hold
        assert set(from_hf(replace(config, tied=False), theirs)) >= {"head.weight", "token.weight"}
        theirs["lm_head.weight"] = theirs["model.embed_tokens.weight"]
        assert from_hf(config, theirs)


def test_weights_of_several_dtypes_keep_their_digits(tmp_path: Path) -> None:
    """The dtype of the first tensor once rounded all others."""
    config = CONFIGS["llama"]
    theirs = to_hf(config, model_of(config).state_dict())
    theirs["model.embed_tokens.weight"] = theirs["model.embed_tokens.weight"].bfloat16()
    write_hf(tmp_path / "hf", config_to_hf(config), theirs)
    found = load_pretrained(tmp_path / "hf").state_dict()
    assert all(torch.equal(found[name], value.float()) for name, value in from_hf(config, theirs).items())


def test_a_folder_with_two_models_or_a_number_for_a_file_is_refused(tmp_path: Path) -> None:
    config = CONFIGS["llama"]
    write_hf(tmp_path / "hf", config_to_hf(config), to_hf(config, model_of(config).state_dict()))
    index = tmp_path / "hf" / "model.safetensors.index.json"
    for value, says in (
        ("model-1.safetensors", "which are two models; legal: one of them"),
        (3, "the file 3;"),
    ):
        index.write_text(json.dumps({"weight_map": {UP: value, QUERY: "model-2.safetensors"}}))
        if value == 3:
            (tmp_path / "hf" / "model.safetensors").unlink()
        with pytest.raises(ValueError, match=says):
            load_pretrained(tmp_path / "hf")


def test_an_export_goes_where_an_earlier_one_was_killed_and_a_place_that_cannot_be_is_told_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = model_of(CONFIGS["gpt2"])
    written = config_to_hf(model.config), to_hf(model.config, model.state_dict())
    (tmp_path / ".hf.part").mkdir()
    (tmp_path / ".hf.part" / "model-00001-of-00009.safetensors").write_text("half")
    write_hf(tmp_path / "hf", *written)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["config.json", "hf", "model.safetensors"]
    assert main(["ckpt", "from-hf", str(tmp_path / "hf"), str(tmp_path / "checkpoints")]) == 0
    (tmp_path / "file").write_text("")
    code = main(["ckpt", "to-hf", str(tmp_path / "checkpoints"), str(tmp_path / "file" / "out")])
    told = capsys.readouterr().err
    assert code == 2 and "Not a directory; legal: a path that can be read or written" in told
    assert "Errno" not in told


def test_a_folder_is_never_written_over_and_never_read_outside(tmp_path: Path) -> None:
    model = model_of(CONFIGS["gpt2"])
    folder = tmp_path / "hf"
    write_hf(folder, config_to_hf(model.config), to_hf(model.config, model.state_dict()))
    with pytest.raises(ValueError, match="is there already"):
        write_hf(folder, {}, {})
    (folder / "model.safetensors").rename(tmp_path / "outside.safetensors")
    with pytest.raises(ValueError, match="weights as safetensors"):
        load_pretrained(folder)
    index = {"weight_map": {"a": "../outside.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="names the file '../outside.safetensors'"):
        load_pretrained(folder)


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = command.main([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = model_of(CONFIGS["llama"])
    for step in (3, 4):
        saved(tmp_path / "run", model, step)
    newest, older = listed(tmp_path / "run")
    code, out, _ = run(capsys, "ckpt", "ls", tmp_path / "run")
    assert (
        code == 0 and out.splitlines()[0].startswith("step-00000004  step 4  samples 0") and "1 rank" in out
    )
    assert run(capsys, "ckpt", "verify", tmp_path / "run") == (0, f"{newest}: whole\n{older}: whole\n", "")
    (file,) = newest.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-3] ^= 8
    file.write_bytes(data)
    code, out, _ = run(capsys, "ckpt", "verify", newest)
    assert code == 1 and f"{newest}: damaged" in out and f"{file}: tensor model/" in out
    code, out, _ = run(capsys, "ckpt", "to-hf", tmp_path / "run", tmp_path / "hf", "--dtype", "bf16")
    assert code == 0 and f"written from {older}" in out
    code, out, _ = run(capsys, "ckpt", "from-hf", tmp_path / "hf", tmp_path / "again")
    assert code == 0 and inspect(listed(tmp_path / "again")[0]).tensors["model/norm.weight"].dtype == "BF16"
    (newest / "manifest.json").unlink()
    code, out, _ = run(capsys, "ckpt", "ls", tmp_path / "run")
    assert code == 1 and "DAMAGED" in out
    code, out, err = run(capsys, "ckpt", "to-hf", newest, tmp_path / "hf2")
    assert (code, out) == (2, "") and "holds no checkpoint" in err
    code, out, err = run(capsys, "ckpt", "ls", tmp_path / "none")
    assert (code, out) == (2, "") and "holds no checkpoint" in err


def test_a_damaged_checkpoint_alone_is_no_export(tmp_path: Path) -> None:
    path = saved(tmp_path / "run", model_of(CONFIGS["gpt2"]))
    next(path.glob("*.safetensors")).unlink()
    with pytest.raises(CheckpointError, match="holds no whole checkpoint"):
        export(tmp_path / "run", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_a_setting_that_is_infinite_is_exported(tmp_path: Path, auto: Any) -> None:
    """It once was null in config.json, and `from_pretrained` and the export refused it."""
    theirs = importlib.import_module("transformers")
    config = theirs.Mamba2Config(
        hidden_size=16, num_hidden_layers=1, num_heads=4, head_dim=8, state_size=4, vocab_size=32, expand=2,
        n_groups=1, chunk_size=4,
    )  # fmt: skip
    model = theirs.Mamba2ForCausalLM(config).eval()
    saved(tmp_path / "run", model, facts=config.to_dict() | {"architectures": ["Mamba2ForCausalLM"]})
    export(tmp_path / "run", tmp_path / "hf")
    again = auto.from_pretrained(tmp_path / "hf").eval()
    assert tuple(again.config.time_step_limit) == (0.0, float("inf"))
    with torch.no_grad():
        assert torch.equal(again(IDS[:, :8] % 32).logits, model(IDS[:, :8] % 32).logits)


def test_a_configuration_with_21843_labels_is_saved(tmp_path: Path) -> None:
    """A run of a model of ImageNet-22k could once not be saved: its configuration had too many items."""
    labels = {str(i): f"a label as long as those of ImageNet, {i}" for i in range(21843)}
    facts = {"model_type": "vit", "id2label": labels, "label2id": {v: int(k) for k, v in labels.items()}}
    path = saved(tmp_path, torch.nn.Linear(4, 6), facts=facts)
    assert inspect(path).model == facts


def test_counts_keep_their_values_in_an_export_of_a_narrow_format(tmp_path: Path) -> None:
    """All tensors were once rounded: a BatchNorm that had seen 1,001 batches had seen 1,000."""
    theirs = importlib.import_module("transformers")
    config = theirs.ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1], num_labels=2)
    model = theirs.ResNetForImageClassification(config)
    facts = config.to_dict() | {"architectures": ["ResNetForImageClassification"]}
    held = [
        HeldTensor(f"model/{name}", ShardSpec(name, dims_of(value.shape)), value)
        for name, value in model.state_dict().items()
    ]
    for name, value in model.named_buffers():
        if name.endswith("num_batches_tracked"):
            value.fill_(1001)
    disk = Checkpointer(MeshLayout.build(), 0, LocalStore(), keep=3, timeout_s=5, heard=str)
    disk.save(
        tmp_path / "run", held, RunFacts(3, 0, 0, {"seed": 0}, facts, {}, {}), asynchronous=False
    ).wait()
    export(tmp_path / "run", tmp_path / "hf", "bf16")
    again = theirs.ResNetForImageClassification.from_pretrained(tmp_path / "hf")
    assert {int(v) for n, v in again.named_buffers() if n.endswith("num_batches_tracked")} == {1001}
