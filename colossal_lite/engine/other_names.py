"""Says what an engine has in the place of a name that models, optimizers and other frameworks' engines have."""

from __future__ import annotations

from collections.abc import Mapping

OF_MODEL = (
    "engine.model.{name}. Between steps its weights may be a part or NaN: engine.full_state_dict() has them"
)
BUFFERS = "engine.model.{name}; engine.full_state_dict() has whole weights and buffers"
MODE = "engine.model.{name}(). train_step and eval_step set training and evaluation themselves"
PLACED = "nothing. initialize has moved the model to context.device, in the dtype of precision in the config"
BEFORE = "model.{name} before cl.initialize, or engine.close() and a new engine"
RATE = "optimizer.lr and lr_scheduler of the config, or cl.initialize(lr_lambda=...). StepResult.lr tells it"
SETTINGS = (
    "optimizer of the config, or cl.initialize(optimizer=...). engine.full_optimizer_state() has its state"
)
SAVED = "engine.save(directory), which holds weights, optimizer and position; engine.full_state_dict() has the weights"
LOADED = "engine.resume(directory) or engine.load(directory); engine.load_full_state_dict(state) sets weights alone"
NORM = "clip_grad_norm of the config clips; StepResult.grad_norm is the norm before clipping"
PARTS = "gradient_accumulation of the config, or several calls of engine.backward before engine.step"

INSTEAD: Mapping[str, str] = {
    **dict.fromkeys(("parameters", "named_parameters", "get_parameter"), OF_MODEL),
    **dict.fromkeys(("buffers", "named_buffers", "get_buffer"), BUFFERS),
    **dict.fromkeys(
        ("modules", "named_modules", "children", "named_children", "get_submodule"), "engine.model.{name}"
    ),
    **dict.fromkeys(("train", "eval"), MODE),
    "training": "engine.model.training",
    "module": "engine.model",
    "forward": "engine(x), or engine.train_step(batch)",
    **dict.fromkeys(("to", "cuda", "cpu", "half", "float", "double", "bfloat16", "type"), PLACED),
    **dict.fromkeys(("apply", "requires_grad_", "register_buffer", "register_parameter"), BEFORE),
    "device": "context.device",
    "dtype": "precision of the config",
    **dict.fromkeys(("optimizer", "optimizers", "param_groups"), SETTINGS),
    **dict.fromkeys(("lr", "get_lr", "set_lr", "get_last_lr", "scheduler", "lr_scheduler"), RATE),
    **dict.fromkeys(("state_dict", "save_checkpoint"), SAVED),
    "save_pretrained": "engine.model.save_pretrained(directory, state_dict=engine.full_state_dict()), on every rank",
    "generate": "engine.model.generate, where ranks have whole weights; else a model of engine.full_state_dict()",
    **dict.fromkeys(("load_state_dict", "load_checkpoint"), LOADED),
    **dict.fromkeys(("clip_grad_norm", "clip_grad_norm_", "grad_norm", "get_global_grad_norm"), NORM),
    **dict.fromkeys(("no_sync", "accumulate", "set_gradient_accumulation_steps"), PARTS),
    "train_batch": "engine.train_step(batch)",
    "eval_batch": "engine.eval_step(batch)",
    "global_steps": "engine.steps",
    "compile": 'compile="block" in the config',
    "gradient_checkpointing_enable": 'activation_checkpoint="full" in the config',
}


def told_instead(name: str, model: object) -> str | None:
    """What to use in the place of `engine.NAME`; None for a name that neither the table nor the `model` knows."""
    told = INSTEAD.get(name)
    if told is None and not name.startswith("_") and hasattr(model, name):
        told = "engine.model.{name}, the model's own. What calls the model must call engine(x) instead"
    return None if told is None else f"engine.{name}: an engine has none. Legal: {told.format(name=name)}"


def refuse_closure(closure: object) -> None:
    """Raises ValueError for an argument of `engine.step`, which torch's optimizers call as they update."""
    if closure is not None:
        raise ValueError(
            f"engine.step: closure = {type(closure).__name__}: a step takes none. "
            f"Legal: engine.backward(loss) and then engine.step(), or engine.train_step(batch)"
        )
