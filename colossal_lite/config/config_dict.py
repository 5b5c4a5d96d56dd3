"""Types a configuration given as a dict, so that editors and type checkers underline a misspelt key.

Note: made from the schema by `python -m tests.config.test_config_dict`. Do not edit: a test compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict


class PipelineDict(TypedDict, total=False):
    """`parallel.pipeline`; an int is the size alone."""

    size: int
    """Ranks on the `pipeline` axis."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "bfs", "zb-h1", "zb-v", "auto"]
    """Order of the work; `colossal-lite schedule` draws it. `auto` searches within activation_cap."""
    micro_batches: int | None
    """Parts of one batch in flight; None is 4 for each rank, or as many as there are samples."""
    stages_per_rank: int
    """Stages on each rank; left out, the least that the schedule is defined for."""
    partition: Literal["balanced", "profiled", "uniform"] | Sequence[int]
    """Units on each stage: balanced by cost, by formula or as one micro-batch shows it (profiled), equal
    counts, or the counts of all size x stages_per_rank stages."""
    activation_cap: int | None
    """Most activations, of one stage and micro-batch each, that a rank may hold: `auto` searches within it,
    any other schedule that holds more is refused. None: what the schedule holds; for auto, size x
    stages_per_rank, as 1f1b does."""


class TensorDict(TypedDict, total=False):
    """Tensor parallelism. A bare int stands for `dict(size=int)`."""

    size: int
    """Ranks over which each layer is cut."""
    mode: Literal["1d", "2d", "2.5d", "3d"]
    """1d (1909.08053); 2d: size = q*q (2104.05343); 2.5d: q*q*depth (2105.14500); 3d: l*l*l (2105.14450)."""
    sequence_parallel: bool | Literal["auto"]
    """1d: norms, dropout and residuals are cut along the sequence (2205.05198); auto: where the model is
    proven so."""
    regather_inputs: bool
    """with sequence_parallel: inputs of cut linears are gathered again in backward; False keeps them whole
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
    """How the world is cut: data x pipeline x sequence x tensor ranks."""

    data: int | Literal["auto"]
    """Copies of the model that see different samples; auto: what the other axes leave of the world."""
    pipeline: PipelineDict | int
    tensor: TensorDict | int
    sequence: SequenceDict | int


class ZeroDict(TypedDict, total=False):
    """What data parallelism shards (1910.02054). Every stage gives the same numbers."""

    stage: int
    """Sharded over the data axis, and a sequence axis: 0 nothing, 1 optimizer state, 2 also gradients, 3 also
    weights."""
    sum_order: Literal["fast", "ordered"]
    """fast: the backend's order of sums; ordered: rank order, the same bits at every stage and placement."""
    reduce_every: Literal["step", "micro_batch"]
    """Stage 2, in steps of several micro-batches: reduce gradients once a step (memory of stage 1) or after
    each micro-batch (more traffic)."""
    reshard_after_forward: bool | int
    """Stage 3: drop gathered weights after forward and gather them again in backward. A number: keep them
    sharded over so many neighbours on the data axis until backward, a divisor of the ranks of a copy, and
    gather from these."""
    shard_size: int | None
    """Hybrid sharding: how many neighbours on the data axis shard one copy, a divisor of parallel.data;
    gradients are also summed over the copies. A sequence axis is sharded over in any case. None: one copy,
    over all."""
    prefetch: int
    """Stage 3: blocks whose weights are gathered ahead of the one that computes. In a pipeline these are
    stages, whose weights stay gathered from one micro-batch to the next while no other stage of the rank
    computes."""


class HostFractionDict(TypedDict, total=False):
    """Shares of model state that rest on the host under placement='static'."""

    weights: float
    """Of the weights, which can rest there at zero.stage=3."""
    gradients: float
    """Of the gradients, which can rest there where they are reduced by micro-batch and kept in shards
    (zero.stage 2 and 3), or on one rank."""
    optimizer: float
    """Of the optimizer's states, the masters included where they are apart from the weights."""


class RatesDict(TypedDict, total=False):
    """Rates of a machine for one rank, for update_on="auto": all of the first four, or none, and they are measured."""

    host_update: float | None
    """Elements a second that are updated on the host."""
    device_update: float | None
    """Elements a second that are updated on the device."""
    up: int | str | None
    """Bytes a second from host to device."""
    down: int | str | None
    """Bytes a second from device to host."""
    host_memory: int | str | None
    """Bytes a second that the host reads and writes, for updates and copies together; None: it does not limit
    them."""
    call_s: float
    """Seconds that the update of a chunk costs on the host beside its elements."""


class MemoryDict(TypedDict, total=False):
    """Tiers of memory: device, host, disk."""

    placement: Literal["device", "host", "disk", "static", "auto"]
    """Where model state rests: all on the device; optimizer state on the host, or on disk; static: shares of
    it on the host (host_fraction); auto: on the device what device_budget allows, weights (at zero.stage=3),
    gradients and optimizer state on the host where it does not. Of optimizer state that host and auto keep
    off the device, what host_budget does not allow rests on disk, if there is a disk_dir."""
    host_fraction: HostFractionDict
    """placement='static': what rests on the host."""
    device_budget: int | str | None
    """Bytes on each device, activations included; None: what the device has."""
    host_budget: int | str | None
    """Bytes of host memory for each rank; None: no limit. What an engine leaves in a store when it is closed
    is among them."""
    disk_dir: str | None
    """Directory of the disk tier: for placement='disk', and for what 'host' and 'auto' keep off the device
    beyond host_budget; without that nothing of theirs goes to disk."""
    link_bandwidth: int | str | None
    """Bytes a second each way between device and host, emulated on a CPU; None: as fast as it copies."""
    update_on: Literal["device", "host", "auto"] | dict[str, int | float]
    """Where optimizer state that rests on the host or on disk is updated. device: it is copied there and
    back, and the device's op gives the bits that it gives to state that stays there. host: with the CPU's op,
    and gradients go down and weights up in its place. dict(every=k): of every k chunks one on the device, and
    the others on the host; dict(host=share): so many on the host. Both sides then work at once. auto: the mix
    that is fastest by `rates`."""
    rates: RatesDict
    """What the machine does in a second, for update_on="auto"."""
    link_latency_s: float
    """Seconds before the bytes of each copy between device and host, emulated on a CPU."""
    disk_bandwidth: int | str | None
    """Bytes a second from and to the disk together, emulated on a CPU; None: as fast as the disk is."""


class PrecisionDict(TypedDict, total=False):
    """Number formats. The bare name of a dtype stands for `dict(dtype=name)`."""

    dtype: Literal["fp64", "fp32", "bf16", "fp16"]
    """Format of weights and activations in forward and backward."""
    master: Literal["auto", "fp32", "split", "none"]
    """Weights that the optimizer updates: an fp32 copy; split (the same bits, 17 of them beside each bf16
    weight); none (update in `dtype`); auto: fp32 under bf16 and fp16, none under fp32 and fp64."""
    gradient: Literal["auto", "bf16"]
    """How gradients are kept and summed over the ranks: auto, fp32 or better; bf16, under dtype bf16 only: 2
    bytes a parameter in the place of 4, for steps of one micro-batch (precision.py says what is exact)."""
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
    """How adamw and adam keep both averages: auto, as wide as gradients are summed; bf16, lossy: 4 bytes a
    parameter in the place of 8, rounded up or down by counted random numbers. Of a checkpoint, wide ones are
    then rounded to nearest when they are loaded."""
    update_when: Literal["step", "backward"]
    """step: when all gradients are summed; backward: of each chunk as soon as its own are, so that gradients
    have a few slots and no place of their own. For steps of one micro-batch without clipping; a gradient that
    is not finite ends the run, as weights have it by then."""
    max_skipped_steps: int | None
    """Steps in a row whose loss or gradient is not finite, or that have no token: each is skipped with a
    warning, and the last raises an error. None: no limit."""
    groups: Sequence[ParamGroupDict]
    """Parameters that have settings of their own."""


class LRSchedulerDict(TypedDict, total=False):
    """The learning rate over optimizer steps, as a factor on every group's `lr`."""

    type: Literal["constant", "cosine", "linear", "wsd", "one_cycle", "polynomial"]
    """Constant; warm-up, then cosine, linear or polynomial decay; warm-up, stable, decay; one cycle."""
    warmup_steps: int
    """Steps of linear rise to the peak at the start."""
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
    """What `engine.save` leaves on disk."""

    keep: int
    """Complete checkpoints kept; older ones are deleted."""
    asynchronous: bool
    """Write while training goes on."""
    max_failures: int
    """Saves that may fail one after the other: as many end the run, with exit code 4."""


class ConfigDict(TypedDict, total=False):
    """Every setting of a configuration; what is left out has its default."""

    parallel: ParallelDict
    zero: ZeroDict
    memory: MemoryDict
    precision: PrecisionDict | Literal["fp64", "fp32", "bf16", "fp16"]
    optimizer: OptimizerDict
    lr_scheduler: LRSchedulerDict
    clip_grad_norm: float | None
    """Largest norm of all gradients together; None: no clipping."""
    gradient_accumulation: int
    """Parts, run one after the other, that the batch of one optimizer step is cut into."""
    activation_checkpoint: Literal["none", "selective", "full"]
    """Activations dropped in forward and computed again in backward."""
    kernels: Literal["auto", "torch", "triton"]
    """Fused kernels; auto: Triton where it runs, else torch; triton: nothing else, or an error."""
    compile: Literal["none", "block"]
    """torch.compile of each block."""
    checkpoint: CheckpointDict
    backend: Literal["auto", "gloo", "nccl"]
    """Transport of collectives; auto: nccl between CUDA devices; on CPUs shared memory between the ranks of
    one host and gloo between hosts. gloo: CPUs, and gloo alone."""
    timeout_s: float
    """Seconds that a collective may wait."""
    seed: int
    """Key of all random numbers: initial weights, dropout, the order of samples."""
