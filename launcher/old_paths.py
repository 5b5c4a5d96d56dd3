"""Names the new place of a module of before version 0.2. For one release.

Note: `colossal_lite/__init__.py` asks here when an import finds nothing.  Six old modules have the names of today's
packages.  A name that is missing in one of these raises an error with the files that took it over.
"""

from __future__ import annotations

from collections.abc import Mapping

MOVED: Mapping[str, str] = {
    "agreement": "engine.step_totals",
    "auxiliary": "transforms.auxiliary_loss",
    "batch": "data.batch",
    "batchwide": "transforms.batch_statistics",
    "build": "engine.initialize",
    "checkpoint": "checkpoint.checkpointer checkpoint.writer checkpoint.rendezvous checkpoint.run_state",
    "checkpoint_files": "checkpoint.files",
    "checkpoint_tools": "checkpoint.tools",
    "cli": "launcher.command",
    "comm": "distributed.communicator distributed.ledger",
    "compare": "planner.compare",
    "compiled": "transforms.compile",
    "config": "config.config config.settings",
    "config_rules": "config.rules",
    "config_source": "config.source",
    "conjugate": "distributed.autograd_collectives",
    "context": "engine.context",
    "data": "data.dataloader data.loader data.batch_checks data.sample_order examples/gpt/corpus.py",
    "deferral": "transforms.split_backward",
    "doctor": "launcher.doctor",
    "dry_run": "planner.dry_run",
    "engine": "engine.engine",
    "exchange": "distributed.shared_memory distributed.send_buffer distributed.host_handshake",
    "handover": "engine.task_resume",
    "host_wire": "distributed.shared_memory_collectives",
    "keep": "transforms.saved_results",
    "layout": "sharding.mesh_layout",
    "legacy_keys": "config.legacy_keys",
    "loss": "parallel.loss",
    "manifest": "checkpoint.manifest",
    "memory.disk": "memory.disk_file",
    "memory.forms": "observe.shape_cache",
    "memory.host": "memory.pinned",
    "memory.lane": "memory.copy_streams",
    "memory.mover": "memory.transfers memory.link",
    "memory.pack": "memory.packing schedule.interval_packing",
    "memory.placement": "config.memory_schema",
    "memory.records": "memory.disk_layout",
    "memory.rules": "observe.shape_rules",
    "memory.store": "memory.host_store",
    "memory.timeline": "observe.memory_timeline",
    "memory.tracer": "observe.memory_meter",
    "mesh": "distributed.mesh",
    "micro_batches": "engine.micro_batches",
    "observe": "observe.run_log observe.sinks observe.timeline observe.flops",
    "optim": "numerics.optimizers numerics.lr_schedules",
    "parallel.adapter": "layers.lora",
    "parallel.alone": "parallel.standalone",
    "parallel.blockwise": "layers.ring_attention",
    "parallel.grid": "layers.tensor_grid layers.grid_layers",
    "parallel.hugging_face": "layers.hugging_face",
    "parallel.roles": "layers.roles",
    "parallel.sequence": "layers.sequence_parallel",
    "parallel.serial": "layers.replicated",
    "parallel.swap": "layers.layer_swap",
    "parallel.tensor_1d": "layers.tensor_1d",
    "parallel.tensor_2d": "layers.tensor_2d",
    "parallel.tensor_3d": "layers.tensor_3d",
    "pipeline.footprint": "schedule.footprint",
    "pipeline.profile": "pipeline.layer_profile",
    "pipeline.schedule": (
        "schedule.pipeline_schedules config.pipeline_schema "
        "pipeline.step_plan schedule.step_passes schedule.schedule_drawing"
    ),
    "pipeline.units": "pipeline.model_units pipeline.stages",
    "plan": "schedule.plan schedule.checker",
    "planned_step": "planner.step_estimate",
    "planner": "planner.planner",
    "precision": "numerics.precision",
    "problems": "config.errors",
    "recompute": "transforms.activation_checkpoint",
    "report": "engine.memory_report",
    "rng": "numerics.random",
    "run_plan": "planner.run_plan",
    "settings": "config.schema",
    "shard": "sharding.shard_spec",
    "simulate": "schedule.simulator schedule.schedule_drawing observe.schedule_report",
    "slices": "sharding.boxes",
    "staged_plan": "planner.pipeline_estimate",
    "tokens": "examples/gpt/tokens.py",
    "updates": "engine.update_timing",
    "watch": "distributed.watchdog",
    "whole": "engine.full_state",
    "zero.budget": "offload.placement offload.pieces",
    "zero.build": "zero.build_chunks",
    "zero.homes": "offload.state_storage",
    "zero.hooks": "zero.gradient_hooks",
    "zero.in_backward": "zero.deferred_updates",
    "zero.interleave": "schedule.optimizer_updates",
    "zero.norm": "zero.grad_norm",
    "zero.on_host": "offload.host_updates",
    "zero.order": "zero.parameter_order",
    "zero.owed": "zero.deferred_updates",
    "zero.own": "zero.user_optimizer",
    "zero.reside": "zero.memory_budget",
    "zero.sharded": "zero.sharded_weights",
    "zero.stages": "schedule.step_moments config.zero_stage zero.state_bytes",
    "zero.tiers": "offload.optimizer_states",
    "zero.unshard": "schedule.gather_plan",
    "zero.visits": "offload.shard_streaming",
    "zero.weights": "zero.forward_hooks",
}
"""Old module -> the modules that hold its names now, without `colossal_lite.`, or a file of the examples."""

STALE = "; the command colossal-lite of an older install asks for it: install again: pip install -e ."


def new_place(name: str) -> str | None:
    """The error for an import of the module `name` (with `colossal_lite.`); None for a name that never existed."""
    old = name.removeprefix("colossal_lite.")
    package, _, member = old.rpartition(".")
    if old in MOVED:
        return f"{name} is now {_places(old)}{STALE if old == 'cli' else ''}"
    if package in MOVED:
        return f"colossal_lite.{package} is a package now; look for {member} in {_places(package)}"
    return None


def _places(old: str) -> str:
    return ", ".join(place if "/" in place else f"colossal_lite.{place}" for place in MOVED[old].split())
