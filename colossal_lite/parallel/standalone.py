"""Parallelizes layers in a user's own loop, and sums their gradients before each optimizer step.

Note: what the two functions promise.
After `parallelize` the module holds this rank's part of every parameter.  It is filled from the full ones (the same on
every rank: nothing is sent).  Each data rank takes the gradient of its *share* of the loss.  That is the sum over its
own tokens divided by the number of tokens of all.  Then a full gradient is the sum over the ranks that its spec names.
`finish_gradients` makes that sum: one flat all-reduce for each set of axes and dtype, in float32 or better.

    layers = cl.parallelize(model, context.mesh)
    total, count = layers.cross_entropy(model(ids), labels)            # logits may be cut over the vocabulary
    tokens = context.mesh.axis("data").all_reduce(count.clone())
    (total / tokens).backward()
    cl.finish_gradients(model)
    optimizer.step()

A parameter that no rank has used keeps `grad=None`; one that some rank has used gets its sum on all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import nn

from colossal_lite.config.errors import first_few
from colossal_lite.distributed.mesh import Mesh
from colossal_lite.kernels import Dropout
from colossal_lite.layers.layer_swap import fill_placeholders
from colossal_lite.parallel import parallelize as layers
from colossal_lite.parallel.parallelize import Parallelized
from colossal_lite.sharding.shard_spec import ShardSpec
from colossal_lite.transforms.auxiliary_loss import modules_of

# Where a module remembers how its gradients are summed.
MEMORY = "_colossal_lite_layers"


def parallelize(
    module: nn.Module,
    mesh: Mesh,
    plan: Literal["auto"] | Mapping[str, str] = "auto",
    *,
    sequence_parallel: bool | Literal["auto"] = "auto",
    regather_inputs: bool = True,
    kernels: Literal["auto", "torch", "triton"] = "auto",
) -> Parallelized:
    """Turn `module` into this rank's part of it, in place, values included. Of the result a loop calls `cross_entropy`;
    `specs` and `plan` say how each parameter is cut, and by which roles.

    The module has all its values, the same on every rank, on its final device, which decides the kernels.
    Build the optimizer afterwards, from `module.parameters()`.  Raises ValueError before anything is changed: for a
    plan or sizes that do not fit the mesh, for parameters without values, and for modes that cut the batch. It also
    raises for dropout under tensor parallelism: its masks need counters that only `initialize` gives.
    """
    if hasattr(module, MEMORY):
        raise ValueError("parallelize: this module is parallel already; build it anew")
    originals = dict(module.named_parameters())
    _check(module, originals, mesh)
    first = next(iter(originals.values()), None)
    made = layers.parallelize(
        module,
        mesh,
        plan,
        sequence_parallel=sequence_parallel,
        regather_inputs=regather_inputs,
        kernels=kernels,
        device_type=first.device.type if first is not None else "cpu",
    )
    fill_placeholders(module, originals, made.specs, mesh)
    object.__setattr__(module, MEMORY, (mesh, made.specs))
    return made


def finish_gradients(module: nn.Module) -> None:
    """Sum the gradients of a parallel module over the ranks that have a term of them, in place. Collective.

    Once, after the last backward of a step, before the optimizer. Raises ValueError for a module that
    `parallelize` has not seen.
    """
    if not hasattr(module, MEMORY):
        raise ValueError(
            "finish_gradients: this module is not parallel; call colossal_lite.parallelize first"
        )
    memory: tuple[Mesh, Mapping[str, ShardSpec]] = getattr(module, MEMORY)
    mesh, specs = memory
    buckets: dict[tuple[tuple[str, ...], torch.dtype], list[nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        axes = specs[name].sync_axes(mesh.layout)
        if parameter.requires_grad and axes:
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            buckets.setdefault((axes, dtype), []).append(parameter)
    for (axes, dtype), parameters in buckets.items():
        _sum(parameters, dtype, mesh, axes)


def _sum(parameters: list[nn.Parameter], dtype: torch.dtype, mesh: Mesh, axes: tuple[str, ...]) -> None:
    """One all-reduce of all these gradients, and of the marks that say whose have arrived."""
    device = parameters[0].device
    marks = torch.tensor([p.grad is not None for p in parameters], dtype=dtype, device=device)
    parts = [p.new_zeros(p.numel()) if p.grad is None else p.grad.reshape(-1) for p in parameters]
    flat = mesh.axis(*axes).all_reduce(torch.cat([marks, *(part.to(dtype) for part in parts)]))
    start = len(parameters)
    for parameter, mark in zip(parameters, flat[:start].tolist(), strict=True):
        whole = flat[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()
        if mark:
            parameter.grad = whole.to(parameter.dtype, copy=True)


def _check(module: nn.Module, originals: Mapping[str, nn.Parameter], mesh: Mesh) -> None:
    if mesh.size("pipeline") > 1:
        raise ValueError(
            f"parallelize: axis pipeline has {mesh.size('pipeline')} ranks; layers alone have no schedule: use "
            f"initialize, or 1"
        )
    if auxiliary := list(modules_of(module)):
        raise ValueError(
            f"parallelize: {auxiliary[0]} is an auxiliary loss, which an engine collects; use initialize, or add it to "
            f"the loss of your loop"
        )
    without = [name for name, parameter in originals.items() if parameter.is_meta]
    if without:
        raise ValueError(
            f"parallelize: {first_few(without)} is on meta and has no values; build it on a device"
        )
    if mesh.size("tensor") == 1:
        return
    if any(leaf.name.startswith("tensor.") for leaf in mesh.layout.leaves):
        raise ValueError(
            "parallelize: a mesh in more than one tensor dimension cuts the batch; use initialize, or 1d"
        )
    dropping = [n for n, m in module.named_modules() if isinstance(m, (Dropout, nn.Dropout)) and m.p > 0]
    if dropping:
        raise ValueError(
            f"parallelize: dropout ({first_few(dropping)}) under tensor parallelism needs masks that agree "
            f"between ranks; use initialize, or set p=0"
        )
