"""Answers keys of Hugging Face, Accelerate, DeepSpeed, Lightning and nanoGPT with the setting to write.

Note: nothing is translated.  Those keys have other defaults, and their batch sizes count differently.  So a run would
silently be another one.  `answer` is asked about unknown keys alone.  An answer is a dict of settings, which
`Config.load` accepts, or a sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Answer = Mapping[str, Any] | str

UNKNOWN = "..."
"""Stands for a value that their framework computes itself: "auto"."""
DTYPES = {
    "float32": "fp32", "float": "fp32", "single": "fp32", "32": "fp32", "no": "fp32",
    "bfloat16": "bf16", "bf16-mixed": "bf16", "bf16-true": "bf16",
    "float16": "fp16", "half": "fp16", "16": "fp16", "16-mixed": "fp16",
    "float64": "fp64", "double": "fp64",
}  # fmt: skip
PLACES = {"cpu": "host", "nvme": "disk", "cuda": "device", "gpu": "device", "none": "device"}
SAME_VALUES: Mapping[str, str] = DTYPES | PLACES
"""Their names of our values."""
BATCH = "context.dataloader(dataset, global_batch=...): samples of an optimizer step, over all ranks"
STEPS = "steps of the loop: cl.fit(..., steps=...), or run.batches(..., steps=...)"
RUN = "cl.Run(directory, engine, save_every=..., log=[...])"
LAUNCHER = "nothing: torchrun, SLURM or OpenMPI say it"
BUILT_IN = "nothing: it is done in any case"


def _at(path: str, *, then: str = "") -> Callable[[Any], Answer]:
    """The same value at a path of ours; `then` if the value is a no."""
    return lambda value: then if then and not value else nested({path: value})


def _switch(settings: Mapping[str, Any], off: str = "nothing: leave it out") -> Callable[[Any], Answer]:
    """A section or a switch that is on or off."""

    def answered(value: Any) -> Answer:
        is_on = value.get("enabled", True) if isinstance(value, Mapping) else value
        return off if is_on in (False, None, "False", "false", "no") else nested(settings)

    return answered


def _zero(value: Any) -> Answer:
    """DeepSpeed's zero_optimization."""
    if not isinstance(value, Mapping):
        return "zero=dict(stage=...)"
    found: dict[str, Any] = {"zero.stage": value.get("stage", 0)}
    return nested(found | _offloaded(value))


def _offloaded(value: Mapping[str, Any]) -> dict[str, Any]:
    places = [part.get("device", "none") for name in ("offload_optimizer", "offload_param")
              if isinstance(part := value.get(name), Mapping)]  # fmt: skip
    if "nvme" in places:
        return {"memory.placement": "disk", "memory.disk_dir": "/local/disk"}
    return {"memory.placement": "host"} if "cpu" in places or value.get("cpu_offload") else {}


def _offload(value: Any) -> Answer:
    return nested(_offloaded({"offload_optimizer": value}) or {"memory.placement": "device"})


def _mixed_precision(value: Any) -> Answer:
    return nested({"precision": DTYPES.get(str(value), value)})


def _optimizer(value: Any) -> Answer:
    """adamw_torch, adamw_torch_fused, sgd, ..."""
    name = str(value).lower().partition("_")[0]
    return nested({"optimizer.type": name}) if name in ("adamw", "adam", "sgd", "lion", "lamb", "muon") else (
        "optimizer=dict(type=...) with one of adamw, adam, sgd, lamb, lion, muon"
    )  # fmt: skip


def _optimizer_params(value: Any) -> Answer:
    """DeepSpeed's optimizer.params."""
    known = ("lr", "betas", "eps", "weight_decay", "momentum", "nesterov")
    given = value if isinstance(value, Mapping) else {}
    found = {f"optimizer.{name}": given[name] for name in known if name in given}
    return nested(found) if found else "optimizer=dict(lr=..., betas=..., eps=..., weight_decay=...)"


SCHEDULES: Mapping[str, Mapping[str, Any]] = {
    "constant": {"type": "constant"},
    "constant_with_warmup": {"type": "linear", "warmup_steps": 100, "total_steps": 1000, "final_ratio": 1.0},
    "linear": {"type": "linear", "warmup_steps": 100, "total_steps": 1000},
    "cosine": {"type": "cosine", "warmup_steps": 100, "total_steps": 1000},
    "polynomial": {"type": "polynomial", "warmup_steps": 100, "total_steps": 1000, "power": 1.0},
    "warmup_stable_decay": {"type": "wsd", "warmup_steps": 100, "total_steps": 1000, "decay_steps": 200},
    "WarmupLR": {"type": "linear", "warmup_steps": 100, "total_steps": 1000, "final_ratio": 1.0},
    "WarmupDecayLR": {"type": "linear", "warmup_steps": 100, "total_steps": 1000},
    "WarmupCosineLR": {"type": "cosine", "warmup_steps": 100, "total_steps": 1000},
    "OneCycle": {"type": "one_cycle", "total_steps": 1000},
}
"""Our equivalents of their schedules; the numbers of steps are examples."""


def _schedule(value: Any) -> Answer:
    name = value.get("type") if isinstance(value, Mapping) else value
    if (found := SCHEDULES.get(str(name))) is None:
        return "lr_scheduler=dict(type=..., warmup_steps=..., total_steps=...)"
    return {"lr_scheduler": found}


def _warmup(value: Any) -> Answer:
    return {"lr_scheduler": {"type": "cosine", "warmup_steps": value, "total_steps": 1000}}


def _fsdp(value: Any) -> Answer:
    """Hugging Face's words, Accelerate's numbers and FSDP's names of what to shard."""
    text = str(value).lower()
    stage = 2 if "grad_op" in text or text == "2" else 0 if "no_shard" in text or text == "3" else 3
    found: dict[str, Any] = {"zero.stage": stage}
    if "hybrid" in text:
        found["zero.shard_size"] = 8
    if "offload" in text:
        found["memory.placement"] = "host"
    return nested(found) if value else "nothing: leave it out"


def _strategy(value: Any) -> Answer:
    """Lightning's: ddp, fsdp, deepspeed_stage_2_offload, ..."""
    text = str(value).lower()
    if "fsdp" in text:
        return _fsdp(value)
    stage = next((int(n) for n in "123" if f"stage_{n}" in text), 0)
    return nested({"zero.stage": stage} | ({"memory.placement": "host"} if "offload" in text else {}))


_FULL = {"activation_checkpoint": "full"}
_OFF = "precision='fp32', where no other format is on: the default is bf16"
_FP16, _BF16 = _switch({"precision": "fp16"}, _OFF), _switch({"precision": "bf16"}, _OFF)

FOREIGN: Mapping[str, str | Callable[[Any], Answer]] = {
    # optimizer and schedule
    "learning_rate": _at("optimizer.lr"),
    "adam_beta1": lambda value: nested({"optimizer.betas": (value, 0.999)}),
    "adam_beta2": lambda value: nested({"optimizer.betas": (0.9, value)}),
    "adam_epsilon": _at("optimizer.eps"),
    "optim": _optimizer,
    "params": _optimizer_params,
    "max_grad_norm": _at("clip_grad_norm", then="clip_grad_norm=None, the default: no clipping"),
    "lr_scheduler_type": _schedule,
    "scheduler": _schedule,
    "warmup_steps": _warmup,
    "num_warmup_steps": _warmup,
    "warmup_iters": _warmup,
    "lr_decay_iters": "lr_scheduler=dict(type='cosine', total_steps=...)",
    "min_lr": "lr_scheduler=dict(type='cosine', total_steps=..., final_ratio=...): a share of optimizer.lr",
    "grad_clip": _at("clip_grad_norm", then="clip_grad_norm=None, the default: no clipping"),
    "gradient_clip_val": _at("clip_grad_norm", then="clip_grad_norm=None, the default: no clipping"),
    "gradient_clip_algorithm": "nothing: clip_grad_norm clips the norm of all gradients",
    "warmup_ratio": "lr_scheduler=dict(type=..., warmup_steps=..., total_steps=...): a number of steps",
    # number formats
    "bf16": _BF16,
    "bfloat16": _BF16,
    "fp16": _FP16,
    "mixed_precision": _mixed_precision,
    "torch_dtype": _mixed_precision,
    "amp": _FP16,
    "communication_data_type": "precision=dict(dtype='bf16', gradient='bf16'), or the default: sums in fp32",
    "data_types": "precision=dict(dtype='bf16', gradient='bf16'), or the default: sums in fp32",
    # the batch and the loop
    "per_device_train_batch_size": BATCH,
    "per_device_eval_batch_size": BATCH,
    "train_batch_size": BATCH,
    "train_micro_batch_size_per_gpu": BATCH,
    "batch_size": BATCH,
    "gradient_accumulation_steps": _at("gradient_accumulation"),
    "accumulate_grad_batches": _at("gradient_accumulation"),
    "num_train_epochs": STEPS,
    "max_epochs": STEPS,
    "epochs": STEPS,
    "max_iters": STEPS,
    "max_steps": STEPS,
    "steps": STEPS,
    "num_training_steps": "lr_scheduler=dict(type=..., total_steps=...)",
    "dataloader_num_workers": "context.dataloader(..., workers=...)",
    "dataloader_drop_last": "context.dataloader(..., drop_last=...)",
    "data_seed": _at("seed"),
    "label_smoothing_factor": "cl.initialize(..., criterion=...)",
    # saving and logging
    "output_dir": RUN,
    "save_steps": RUN,
    "save_strategy": RUN,
    "save_total_limit": _at("checkpoint.keep"),
    "resume_from_checkpoint": RUN,
    "logging_steps": RUN,
    "logging_dir": RUN,
    "report_to": RUN,
    "default_root_dir": RUN,
    "log_every_n_steps": RUN,
    "enable_checkpointing": RUN,
    "val_check_interval": "run.evaluate(valid) in the loop",
    "check_val_every_n_epoch": "run.evaluate(valid) in the loop",
    "eval_steps": "run.evaluate(valid) in the loop",
    "eval_strategy": "run.evaluate(valid) in the loop",
    "steps_per_print": RUN,
    "wall_clock_breakdown": RUN,
    "tensorboard": RUN,
    "wandb": RUN,
    "csv_monitor": RUN,
    # memory
    "gradient_checkpointing": _switch(_FULL),
    "activation_checkpointing": _switch(_FULL),
    "zero_optimization": _zero,
    "zero_stage": _at("zero.stage"),
    "offload_optimizer": _offload,
    "offload_param": _offload,
    "offload_optimizer_device": lambda value: _offload({"device": value}),
    "offload_param_device": lambda value: _offload({"device": value}),
    "fsdp": _fsdp,
    "fsdp_sharding_strategy": _fsdp,
    "fsdp_config": "zero=dict(stage=3)",
    "deepspeed": "zero=dict(stage=...) and the other settings of that file",
    "deepspeed_config": "zero=dict(stage=...) and the other settings of that file",
    "deepspeed_plugin": "zero=dict(stage=...) and the other settings of that file",
    # meshes, processes, compilation
    "tensor_parallel": _switch({"parallel.tensor": 2}),
    "tensor_parallel_size": _at("parallel.tensor"),
    "tensor_model_parallel_size": _at("parallel.tensor"),
    "pipeline_model_parallel_size": _at("parallel.pipeline"),
    "context_parallel_size": _at("parallel.sequence"),
    "tp": _at("parallel.tensor"),
    "pp": _at("parallel.pipeline"),
    "cp": _at("parallel.sequence"),
    "dp": _at("parallel.data"),
    "strategy": _strategy,
    "torch_compile": _switch({"compile": "block"}),
    "accelerator": LAUNCHER,
    "devices": LAUNCHER,
    "num_nodes": LAUNCHER,
    "num_processes": LAUNCHER,
    "num_machines": LAUNCHER,
    "machine_rank": LAUNCHER,
    "main_process_ip": LAUNCHER,
    "main_process_port": LAUNCHER,
    "local_rank": LAUNCHER,
    "distributed_type": LAUNCHER,
    "ddp_backend": _at("backend"),
    "ddp_timeout": _at("timeout_s"),
    "ddp_find_unused_parameters": BUILT_IN,
    "prescale_gradients": BUILT_IN,
    "gradient_predivide_factor": BUILT_IN,
    "overlap_comm": BUILT_IN,
    "contiguous_gradients": BUILT_IN,
    "reduce_scatter": BUILT_IN,
    "reduce_bucket_size": "nothing: chunks are packed by a plan",
    "allgather_bucket_size": "nothing: chunks are packed by a plan",
    "stage3_prefetch_bucket_size": "zero=dict(stage=3, prefetch=1): blocks gathered ahead",
}


_FIT = "cl.fit(..., {0}=...)"
_BOTH = f"{_FIT}, or cl.Run(..., {{0}}=...)"
_LOADER = f"{_FIT}, run.batches(..., {{0}}=...) or context.dataloader(..., {{0}}=...)"
OF_CALLS: Mapping[str, Sequence[str]] = {
    "cl.initialize(..., {0}=...)": ("context", "plan", "lr_lambda", "example", "store", "task"),
    "cl.Run(..., {0}=...)": ("facts", "fresh", "bytes_per_token", "flops_per_token"),
    _FIT: ("valid", "evaluate_every"),
    _BOTH: ("directory", "save_every", "log"),
    _LOADER: ("dataset", "global_batch", "collate", "labels", "shuffle", "drop_last", "workers"),
}
"""Arguments of calls, which are no settings, by the calls that take them."""


def place_of_argument(name: str) -> str | None:
    """The calls that take the argument `name`, as a user writes them. None if it is the argument of none."""
    return next((calls.format(name) for calls, names in OF_CALLS.items() if name in names), None)


def answer(name: str, value: object) -> str | None:
    """The setting to write in place of the key `name` of another framework. None if no known framework has the key."""
    if (found := FOREIGN.get(name)) is None:
        return None
    if isinstance(found, str):
        return found
    made = found(_plain(value))
    return made if isinstance(made, str) else written(made)


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by their paths as sections."""
    made: dict[str, Any] = {}
    for path, value in settings.items():
        section, _, name = path.rpartition(".")
        holder = made.setdefault(section, {}) if section else made
        holder[name] = value
    return made


def written(settings: Mapping[str, Any]) -> str:
    """Settings in the notation of a config: `zero=dict(stage=3), precision='bf16'`."""
    return ", ".join(f"{name}={_literal(value)}" for name, value in settings.items())


def _literal(value: object) -> str:
    if isinstance(value, Mapping):
        return f"dict({written(value)})"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"({', '.join(map(_literal, value))})"
    return UNKNOWN if value == "auto" else repr(value)


def _plain(value: object) -> Any:
    """A number that came as text, from a command line."""
    if not isinstance(value, str):
        return value
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value
