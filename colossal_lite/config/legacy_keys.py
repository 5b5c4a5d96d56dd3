"""Translates Colossal-AI's configuration keys with one line of notice each, or rejects them with the new name.

Note: `translate` is the only place that knows these keys.  It maps one nested dict to another.  A key without meaning
here is dropped with the reason.  A key whose meaning would be lost is rejected.  The keys are those that Colossal-AI's
engine and examples read from their config dict.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from colossal_lite.config.errors import ABSENT, Problem, get_path, shown
from colossal_lite.config.renamed import RENAMED

# old path -> new path, same value
MOVED: Mapping[str, str] = {
    "NUM_MICRO_BATCHES": "parallel.pipeline.micro_batches",
    "gradient_clipping": "clip_grad_norm",
    "SEED": "seed",
}
# old path -> why nothing replaces it
DROPPED: Mapping[str, str] = {
    "TENSOR_SHAPE": "stages agree on shapes at the first step",
    "SEQ_LENGTH": "stages agree on shapes at the first step",
    "SEQ_LEN": "the batch has it",
    "HIDDEN_SIZE": "the model has it",
    "gradient_handler": "each parameter's layout says how its gradient is summed",
    "torch_ddp": "data parallelism is built in, and parameters may be unused or frozen",
    "cudnn_deterministic": "the same mesh gives the same bits in any case",
    "cudnn_benchmark": "set torch.backends.cudnn.benchmark in the script if the model has convolutions",
    "zero.model_config.shard_strategy": "chunks are packed by a plan",
    "zero.model_config.reduce_scatter_bucket_size_mb": "chunks are packed by a plan",
    "zero.model_config.fp32_reduce_scatter": "gradients are accumulated in fp32 in any case",
    "zero.model_config.gradient_predivide_factor": "gradients are summed and divided once by the token count",
    "zero.model_config.reuse_fp16_shard": "the memory plan reuses what it can",
    "zero.model_config.offload_config": "memory.placement says where model state lives",
    "zero.optimizer_config.gpu_margin_mem_ratio": "memory.device_budget says how much the device may hold",
    "zero.optimizer_config.cpu_offload": "memory.placement says where model state lives",
}
# old path -> what to write instead
REFUSED: Mapping[str, str] = {
    "BATCH_SIZE": "context.dataloader(dataset, global_batch=...): samples per optimizer step, over all ranks",
    "GLOBAL_BATCH_SIZE": "context.dataloader(dataset, global_batch=...)",
    "NUM_EPOCHS": "a loop in the script",
    "LOG_PATH": "an argument of the script",
    "model": "cl.initialize(model, context=context)",
    "loss": "cl.initialize(..., criterion=...)",
    "loss_fn": "cl.initialize(..., criterion=...)",
    "criterion": "cl.initialize(..., criterion=...)",
    "hooks": "engine.on_step(callback)",
    "train_data": "context.dataloader(dataset, global_batch=...)",
    "test_data": "context.dataloader(dataset, global_batch=...)",
    "dataloader": "context.dataloader(dataset, global_batch=...)",
    "parallel.order": "nothing: ranks are ordered pipeline, data, sequence, tensor, the last one fastest",
}
SCALER_KEYS = (
    "backoff_factor",
    "growth_factor",
    "growth_interval",
    "hysteresis",
    "max_scale",
    "min_scale",
    "verbose",
)
PLACEMENTS = {"cpu": "host", "cuda": "device", "auto": "auto"}


@dataclass
class Translation:
    """A configuration with our keys, the paths set in it, notices, and the keys that were not translated."""

    raw: dict[str, Any]
    moved: set[str] = field(default_factory=set)
    notices: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def take(self, path: str) -> Any:
        """Remove the value at `path`, with the sections it leaves empty, and return it, or ABSENT."""
        section, _, name = path.rpartition(".")
        holder = get_path(self.raw, section)
        if not isinstance(holder, dict) or name not in holder:
            return ABSENT
        value = holder.pop(name)
        if section and not holder:
            self.take(section)
        return value

    def put(self, old: str, value: object, path: str, new: object, *, note: str = "") -> None:
        """Set `path` and add a notice, unless the new name is given as well."""
        if (given := get_path(self.raw, path)) is not ABSENT:
            if given == new:
                self.drop(old, value, f"{path} says the same")
            else:
                clash = f"contradicts {path}={shown(given)}"
                self.problems.append(Problem(old, value, clash, f"{path} alone"))
            return
        holder = self.raw
        for step in path.split(".")[:-1]:
            inside = holder.setdefault(step, {})
            if not isinstance(inside, dict):
                return  # validation refuses the section itself
            holder = inside
        holder[path.rpartition(".")[2]] = new
        self.moved.add(path)
        self.notices.append(f"{old}={shown(value)} is now {path}={shown(new)}{note}")

    def drop(self, old: str, value: object, why: str) -> None:
        self.notices.append(f"{old}={shown(value)} is ignored: {why}")


def translate(raw: dict[str, Any]) -> Translation:
    """Rewrite Colossal-AI's keys, and our own of earlier releases. `raw` is changed in place; others pass untouched."""
    done = Translation(raw)
    for old, new in RENAMED.items():
        if (value := done.take(old)) is ABSENT:
            continue
        if get_path(raw, new) is ABSENT:
            done.put(old, value, new, value)
        else:
            done.problems.append(
                Problem(old, value, f"is the old name of {new}, which is given too", f"{new} alone")
            )
    for old, new in MOVED.items():
        if (value := done.take(old)) is not ABSENT:
            done.put(old, value, new, value)
    for special in (_num_chunks, _fp16, _tensor_mode, _zero):
        special(done)
    for old, why in DROPPED.items():
        if (value := done.take(old)) is not ABSENT:
            done.drop(old, value, why)
    for old, new in REFUSED.items():
        if (value := done.take(old)) is not ABSENT:
            done.problems.append(
                Problem(old, value, "is Colossal-AI's and has no place in this configuration", new)
            )
    return done


def _num_chunks(done: Translation) -> None:
    """The presence of model.num_chunks switched interleaving on."""
    if (value := done.take("model.num_chunks")) is not ABSENT:
        done.put("model.num_chunks", value, "parallel.pipeline.stages_per_rank", value)
        if (
            get_path(done.raw, "parallel.pipeline.schedule") is ABSENT
            and isinstance(value, int)
            and value > 1
        ):
            done.put("model.num_chunks", value, "parallel.pipeline.schedule", "interleaved")


def _fp16(done: Translation) -> None:
    """fp16=dict(mode=AMP_TYPE.x, scaler settings); a mode of None switched it off."""
    value = get_path(done.raw, "fp16")
    is_foreign = isinstance(value, bool) or (
        isinstance(value, Mapping) and "enabled" in value and "mode" not in value
    )
    if is_foreign or done.take("fp16") is ABSENT:  # Hugging Face's and DeepSpeed's: foreign_keys.py answers
        return
    settings: dict[str, Any] = dict(value) if isinstance(value, Mapping) else {"mode": value}
    mode = settings.pop("mode", None)
    name = str(getattr(mode, "name", mode)).upper()  # a string, or a member of AMP_TYPE
    if name not in ("TORCH", "APEX", "NAIVE", "NONE"):
        legal = "precision='fp16', or better precision='bf16', which needs no loss scale"
        done.problems.append(
            Problem("fp16", value, "has no mode that is known: TORCH, APEX, NAIVE or None", legal)
        )
        return
    if name == "NONE":
        done.drop("fp16", value, "its mode is None")
        return
    done.put("fp16", value, "precision.dtype", "fp16", note="; bf16 would need no loss scale")
    for key, setting in settings.items():
        if key in (
            "init_scale",
            "initial_scale",
            *SCALER_KEYS,
            "loss_scale",
            "log_num_zeros_in_grad",
            "enabled",
        ):
            done.drop(f"fp16.{key}", setting, "the dynamic loss scale starts at 2**16 and follows overflows")
        else:
            legal = "precision=dict(dtype='fp16', loss_scale='dynamic')"
            done.problems.append(Problem(f"fp16.{key}", setting, "is not translated", legal))


def _tensor_mode(done: Translation) -> None:
    """Sequence parallelism was a mode of the tensor axis; a mode of None meant no tensor parallelism."""
    tensor = get_path(done.raw, "parallel.tensor")
    mode = tensor.get("mode", ABSENT) if isinstance(tensor, dict) else ABSENT
    if mode is None and tensor.get("size", 1) == 1:
        done.take("parallel.tensor.mode")
        done.drop("parallel.tensor.mode", None, "a size of 1 means no tensor parallelism")
    elif mode == "sequence":
        done.take("parallel.tensor")
        size = tensor.get("size", 1)
        done.put(
            "parallel.tensor", tensor, "parallel.sequence.size", size, note=": it combines with tensor now"
        )


def _zero(done: Translation) -> None:
    """zero=dict(model_config=..., optimizer_config=...) was ZeRO-3, and said where the state lives."""
    zero = get_path(done.raw, "zero")
    if not isinstance(zero, dict) or not zero.keys() & {"model_config", "optimizer_config"}:
        return
    old = {key: zero[key] for key in ("model_config", "optimizer_config") if key in zero}
    if "stage" not in zero:
        done.put("zero", old, "zero.stage", 3)
    policy = done.take("zero.model_config.tensor_placement_policy")
    if policy is not ABSENT:
        _placement(done, policy)
    if (value := done.take("zero.model_config.bf16")) is not ABSENT and value is True:
        done.put("zero.model_config.bf16", value, "precision.dtype", "bf16")
    elif value is not ABSENT:
        done.drop("zero.model_config.bf16", value, "precision says the number format")
    for key in ("initial_scale", *SCALER_KEYS):
        path = f"zero.optimizer_config.{key}"
        if (value := done.take(path)) is not ABSENT:
            done.drop(path, value, "precision.loss_scale says how the loss is scaled")
    for section in ("zero.model_config", "zero.optimizer_config"):
        if get_path(done.raw, section) in ({}, None):
            done.take(section)


def _placement(done: Translation, policy: object) -> None:
    path = "zero.model_config.tensor_placement_policy"
    new = PLACEMENTS.get(policy) if isinstance(policy, str) else None
    if new is None:
        legal = ", ".join(f"memory.placement={place!r}" for place in PLACEMENTS.values())
        done.problems.append(Problem(path, policy, "is not one of cpu, cuda, auto", legal))
    else:
        done.put(path, policy, "memory.placement", new)
