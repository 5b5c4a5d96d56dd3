"""Types a configuration given as a dict, so that editors and type checkers underline a misspelt key.

Note: made from the schema by `python -m tests.config.test_config_dict`. Do not edit: a test compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict


class PipelineDict(TypedDict, total=False):
    """`parallel.pipeline`; an int is the size alone."""

    size: int
    """Ranks on the `pipeline` axis. With 1 and several stages_per_rank each rank runs all stages, one after
    the other."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "bfs", "zb-h1", "zb-v", "auto"]
    """Order of the work; `colossal-lite schedule` draws it. `auto` searches within activation_cap."""
    micro_batches: int | None
    """Parts of one batch in flight; None: 4 for each rank, or as many as there are samples."""
    stages_per_rank: int
    """Stages on each rank; default: the least that the schedule allows."""
    partition: Literal["balanced", "profiled", "uniform"] | Sequence[int]
    """Units on each stage. balanced: by a cost formula. profiled: by the measured cost of one micro-batch.
    uniform: equal counts. Or the counts of all size x stages_per_rank stages."""
    activation_cap: int | None
    """Most activations that a rank may hold, each of one stage and micro-batch. `auto` searches within it;
    any other schedule that holds more is refused. None: no cap; for auto, size x stages_per_rank, as 1f1b
    holds."""


class TensorDict(TypedDict, total=False):
    """Tensor parallelism. A bare int stands for `dict(size=int)`."""

    size: int
    """Ranks over which each layer is cut."""
    mode: Literal["1d", "2d", "2.5d", "3d"]
    """1d (1909.08053); 2d: size = q*q (2104.05343); 2.5d: q*q*depth (2105.14500); 3d: l*l*l (2105.14450)."""
    sequence_parallel: bool | Literal["auto"]
    """1d: norms, dropout and residuals are sharded along the sequence (2205.05198); auto: if the model is
    proven so."""
    regather_inputs: bool
    """with sequence_parallel: backward gathers the inputs of sharded linears again; False keeps them whole
    instead."""
    depth: int
    """2.5d: layers of q*q ranks that share the batch."""


class SequenceDict(TypedDict, total=False):
    """Sequence (context) parallelism. A bare int stands for `dict(size=int)`."""

    size: int
    """Ranks over which each sequence is cut."""
    mode: Literal["ring", "ulysses", "usp", "allgather_kv", "ring_full"]
    """ring (2310.01889, zigzag); ulysses (2309.14509); usp: both (2405.07719); allgather_kv: keys and values
    gathered at once; ring_full: ring self-attention (2105.13120)."""
    ulysses: int
    """usp: size of the inner, Ulysses axis; it divides `size`."""


class ParallelDict(TypedDict, total=False):
    """How ranks divide the work: data x pipeline x sequence x tensor."""

    data: int | Literal["auto"]
    """Copies of the model that see different samples; auto: the world divided by the other axes."""
    pipeline: PipelineDict | int
    tensor: TensorDict | int
    sequence: SequenceDict | int


class ZeroDict(TypedDict, total=False):
    """What data parallelism shards (1910.02054). Every stage gives the same numbers."""

    stage: int
    """Shards over the data axis, and a sequence axis. 0: nothing; 1: optimizer state; 2: also gradients; 3:
    also weights."""
    sum_order: Literal["fast", "ordered"]
    """fast: the backend's order of sums; ordered: rank order, the same bits at every stage and placement."""
    reduce_every: Literal["step", "micro_batch"]
    """Stage 2 with several micro-batches a step. step: reduce gradients once a step (memory of stage 1).
    micro_batch: reduce after each (more traffic)."""
    reshard_after_forward: bool | int
    """Stage 3: drop gathered weights after forward and gather them again in backward. A number: keep them
    sharded over so many neighbours on the data axis until backward, and gather from these. It divides the
    ranks of a copy."""
    shard_size: int | None
    """Hybrid sharding: how many neighbours on the data axis shard one copy, a divisor of parallel.data.
    Gradients are also summed over the copies. A sequence axis always shards. None: one copy, sharded over
    all."""
    prefetch: int
    """Stage 3: blocks whose weights are gathered ahead of the block that computes. In a pipeline: visits of a
    stage."""


class HostFractionDict(TypedDict, total=False):
    """Shares of model state that are stored on the host under placement='static'."""

    weights: float
    """Share of the weights; needs zero.stage=3."""
    gradients: float
    """Share of the gradients. It needs gradients that are reduced by micro-batch and kept in shards
    (zero.stage 2 and 3), or one rank."""
    optimizer: float
    """Share of the optimizer's states, and of masters that are separate from the weights."""


class RatesDict(TypedDict, total=False):
    """Rates of a machine for one rank. A device that a CPU emulates copies no faster than these say."""

    file: str | None
    """A file of `colossal-lite calibrate`, in the place of all others."""
    host_update: float | None
    """Elements a second that are updated on the host."""
    device_update: float | None
    """Elements a second that are updated on the device."""
    up: int | str | None
    """Bytes a second from host to device; None: as fast as the machine copies."""
    down: int | str | None
    """Bytes a second from device to host; None: as `up`."""
    latency_s: float
    """Seconds of latency of each copy between device and host."""
    disk: int | str | None
    """Bytes a second from and to the disk together; None: as fast as it is."""
    host_memory: int | str | None
    """Bytes a second that the host reads and writes, for updates and copies together; None: no limit."""
    call_s: float
    """Seconds of overhead for the host update of each chunk."""
    flops: float | None
    """Floating-point operations a second of forward and backward. `plan` predicts the seconds of a step by
    it, without a pipeline."""


class MemoryDict(TypedDict, total=False):
    """Tiers of memory: device, host, disk."""

    placement: Literal["device", "host", "disk", "static", "auto"]
    """Tier that stores model state. device: all on the device. host, disk: optimizer state there. static: the
    shares of host_fraction on the host. auto: the device within device_budget, then the host. auto moves
    gradients and optimizer state, and weights at zero.stage=3. If disk_dir is set, optimizer state beyond
    host_budget is stored on disk."""
    host_fraction: HostFractionDict
    """placement='static': shares stored on the host."""
    chunk_bytes: int | str | None
    """Bytes of a chunk, in the dtype of the masters. A chunk is reduced, gathered, copied and updated at
    once. A larger parameter is a chunk by itself. None: 8 MiB on CPUs, 64 MiB on CUDA."""
    device_budget: int | str | None
    """Bytes on each device, activations included; None: all of the device's memory."""
    host_budget: int | str | None
    """Bytes of host memory for each rank; None: no limit. State that a closed engine leaves in a store counts
    too."""
    disk_dir: str | None
    """Directory of the disk tier. placement='disk' needs it. 'host' and 'auto' write optimizer state beyond
    host_budget there; without it they never use the disk."""
    update_on: Literal["device", "host", "auto"] | dict[str, int | float | Sequence[int]]
    """Where the optimizer updates state that is stored on the host or on disk. device: the state is copied
    there and back; the bits are those of state that stays on the device. host: the CPU updates it, so
    gradients are copied down and weights up. dict(every=k): of every k chunks one on the device, the others
    on the host. dict(host=share): this share of the chunks on the host. dict(host=[0, 2]): the chunks with
    these numbers. Both sides then work at once. auto: the fastest mix by `rates`; the resolved configuration
    has that mix."""
    rates: RatesDict | str | None
    """Rates of the machine, or the name of a file of `colossal-lite calibrate`. update_on='auto' without
    rates takes that file of this machine where there is one, and measures otherwise."""
    shared_base: str | None
    """A name for the frozen weights at zero.stage=3. Engines of one store that state it must have equal ones;
    others are refused. None: engines with equal frozen weights share them, and others do not."""


class PrecisionDict(TypedDict, total=False):
    """Number formats. The bare name of a dtype stands for `dict(dtype=name)`."""

    dtype: Literal["fp64", "fp32", "bf16", "fp16"]
    """Format of weights and activations in forward and backward."""
    master: Literal["auto", "fp32", "split", "none"]
    """Weights that the optimizer updates. fp32: a copy. split: the same bits, 17 of them beside each bf16
    weight. none: no copy, update in `dtype`. auto: fp32 under bf16 and fp16, none under fp32 and fp64."""
    gradient: Literal["auto", "bf16"]
    """Format in which gradients are kept and summed over ranks. auto: fp32 or better. bf16: 2 bytes a
    parameter instead of 4, under dtype bf16 and steps of one micro-batch only (precision.py says what is
    exact)."""
    loss_scale: Literal["dynamic"] | float
    """fp16 only: factor on the loss before backward; dynamic starts at 2**16 and follows overflows."""


class ParamGroupDict(TypedDict, total=False):
    """Parameters whose names match a pattern, and what differs for them. The first match holds."""

    match: str
    """Shell pattern over whole parameter names: `*` is any text, dots included."""
    type: Literal["adamw", "adam", "sgd", "lamb", "lion", "muon"] | None
    """Optimizer of the group, with its own defaults and the lr of the whole; None: the optimizer's."""
    lr: float | None
    """Peak learning rate of the group; None: the optimizer's."""
    betas: Sequence[float] | None
    """Decay of the two averages; None: the optimizer's."""
    eps: float | None
    """Added to the denominator; None: the optimizer's."""
    weight_decay: float | None
    """Weight decay; None: the optimizer's."""
    momentum: float | None
    """Momentum; None: the optimizer's."""
    nesterov: bool | None
    """Nesterov momentum; None: the optimizer's."""
    moments: Literal["auto", "bf16"] | None
    """How both averages are kept; None: the optimizer's."""


class OptimizerDict(TypedDict, total=False):
    """The optimizer. A setting that is not given has the default of its `type`."""

    type: Literal["adamw", "adam", "sgd", "lamb", "lion", "muon"]
    """AdamW (1711.05101), Adam (1412.6980), SGD, LAMB (1904.00962), Lion (2302.06675), Muon (2502.16982)."""
    lr: float
    """Peak learning rate."""
    betas: Sequence[float]
    """Decay of the averages of the gradient and of its square (Lion: of the update and of the average)."""
    eps: float
    """Added to the denominator of the update."""
    weight_decay: float
    """Weight decay: decoupled from the gradient, except in adam and sgd."""
    momentum: float
    """Momentum of sgd and muon."""
    nesterov: bool
    """Nesterov momentum in sgd and muon."""
    moments: Literal["auto", "bf16"]
    """Format of both averages of adamw and adam. auto: as wide as gradients are summed. bf16, lossy: 4 bytes
    a parameter instead of 8, rounded stochastically by counted random numbers. A load rounds wide averages of
    a checkpoint to nearest."""
    update_when: Literal["step", "backward"]
    """step: update when all gradients are summed. backward: update each chunk in the last backward of a step,
    as soon as its gradients are summed. In steps of one micro-batch gradients then need only a few slots.
    backward needs steps without clipping. A gradient that is not finite ends the run, because weights already
    have it."""
    max_skipped_steps: int | None
    """Consecutive steps that may be skipped because loss or gradient is not finite, or no token counts. Each
    gives a warning, and the last raises an error. None: no limit."""
    groups: Sequence[ParamGroupDict]
    """Parameters that have settings of their own."""


class LRSchedulerDict(TypedDict, total=False):
    """The learning rate over optimizer steps, as a factor on every group's `lr`."""

    type: Literal["constant", "cosine", "linear", "wsd", "one_cycle", "polynomial"]
    """Constant; warm-up, then cosine, linear or polynomial decay; warm-up, stable, decay; one cycle."""
    warmup_steps: int
    """Steps of linear rise at the start: step k of w, from 1, has k / (w + 1) of the peak."""
    total_steps: int | None
    """Steps after which the factor stays at `final_ratio`; every type but constant needs it."""
    final_ratio: float
    """Last learning rate over the peak."""
    power: float
    """Exponent of the polynomial decay."""
    decay_steps: int | None
    """wsd: steps of the decay at the end."""
    start_ratio: float
    """one_cycle: first learning rate over the peak."""


class CheckpointDict(TypedDict, total=False):
    """How `engine.save` writes and keeps checkpoints."""

    keep: int
    """Complete checkpoints kept; older ones are deleted."""
    asynchronous: bool
    """Write while training goes on."""
    max_failures: int
    """Consecutive saves that may fail; this many end the run, with exit code 4."""


class ConfigDict(TypedDict, total=False):
    """Every setting of a configuration. A setting that is left out has its default."""

    parallel: ParallelDict
    zero: ZeroDict
    memory: MemoryDict
    precision: PrecisionDict | Literal["fp64", "fp32", "bf16", "fp16"]
    optimizer: OptimizerDict
    lr_scheduler: LRSchedulerDict
    clip_grad_norm: float | None
    """Largest norm of all gradients together; None: no clipping."""
    gradient_accumulation: int
    """Sequential parts of the batch of one optimizer step."""
    activation_checkpoint: Literal["none", "selective", "full"]
    """Activations that are dropped in forward and computed again in backward."""
    kernels: Literal["auto", "torch", "triton"]
    """Fused kernels. auto: Triton where it runs, else torch. triton: Triton only, or an error."""
    compile: Literal["none", "block"]
    """torch.compile of each block."""
    deterministic: bool
    """Whether torch may take only kernels that give the same bits twice. An operation that has none on this
    device is refused by name. False: on CUDA attention and others may add in any order."""
    checkpoint: CheckpointDict
    backend: Literal["auto", "gloo", "nccl"]
    """Transport of collectives. auto: nccl between CUDA devices; on CPUs shared memory within a host and gloo
    between hosts. gloo: CPUs, and gloo alone."""
    timeout_s: float
    """Seconds that a collective may wait."""
    seed: int
    """Key of all random numbers: initial weights, dropout, the order of samples."""
