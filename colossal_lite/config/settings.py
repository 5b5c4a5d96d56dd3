"""Combines the schemas: every setting, with its default and meaning.

Note: each schema has a file of its own.  Rules over several sections are in `rules`; they take `Settings`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field

from colossal_lite.config.memory_schema import MemoryConfig
from colossal_lite.config.parallel_schema import SequenceConfig, TensorConfig
from colossal_lite.config.pipeline_schema import PipelineConfig
from colossal_lite.config.schema import (
    CheckpointConfig,
    Count,
    LRSchedulerConfig,
    OptimizerConfig,
    Positive,
    PrecisionConfig,
    Section,
    UnusedSetting,
    ZeroConfig,
)

A_MONTH_S = 30 * 24 * 3600


class ParallelConfig(Section):
    """How ranks divide the work: data x pipeline x sequence x tensor."""

    data: Count | Literal["auto"] = "auto"
    """Copies of the model that see different samples; auto: the world divided by the other axes."""
    pipeline: PipelineConfig = PipelineConfig()
    tensor: TensorConfig = TensorConfig()
    sequence: SequenceConfig = SequenceConfig()

    @property
    def inner(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.pipeline.size * self.sequence.size * self.tensor.size

    def unused_settings(self) -> Iterable[UnusedSetting]:
        if not self.pipeline.is_staged:
            why = "pipeline.size and pipeline.stages_per_rank are 1"
            for name in ("schedule", "partition", "activation_cap"):
                yield UnusedSetting(f"pipeline.{name}", why)
            yield UnusedSetting("pipeline.micro_batches", f"{why}; gradient_accumulation cuts a step then")


class Settings(Section):
    """Every setting of a configuration. `config.Config` adds how one is read, and the origin of each value."""

    parallel: ParallelConfig = ParallelConfig()
    zero: ZeroConfig = ZeroConfig()
    memory: MemoryConfig = MemoryConfig()
    precision: PrecisionConfig = PrecisionConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    lr_scheduler: LRSchedulerConfig = LRSchedulerConfig()
    clip_grad_norm: Positive | None = None
    """Largest norm of all gradients together; None: no clipping."""
    gradient_accumulation: Count = 1
    """Sequential parts of the batch of one optimizer step."""
    activation_checkpoint: Literal["none", "selective", "full"] = "none"
    """Activations that are dropped in forward and computed again in backward."""
    kernels: Literal["auto", "torch", "triton"] = "auto"
    """Fused kernels. auto: Triton where it runs, else torch. triton: Triton only, or an error."""
    compile: Literal["none", "block"] = "none"
    """torch.compile of each block."""
    deterministic: bool = False
    """Whether torch may take only kernels that give the same bits twice. An operation that has none on this device is
    refused by name. False: on CUDA attention and others may add in any order."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Transport of collectives. auto: nccl between CUDA devices; on CPUs shared memory within a host and gloo between
    hosts. gloo: CPUs, and gloo alone."""
    timeout_s: Annotated[float, Field(gt=0, le=A_MONTH_S)] = 600.0
    """Seconds that a collective may wait."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1024
    """Key of all random numbers: initial weights, dropout, the order of samples."""
