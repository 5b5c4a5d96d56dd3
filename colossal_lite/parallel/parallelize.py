"""Replaces a plain module by one rank's part of it, by a plan of layer roles.

Note: parallelize.
It changes a module in place and keeps every parameter name.  Its decisions are data: one ShardSpec for each parameter.
Gradient sums, norms, checkpoints and tests follow from it.  The table `TENSOR_MODES` names the file of each tensor
mode, with the functions of `tensor_modes.ModeFile`; a new mode is one file and one line.
"""

from __future__ import annotations

import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from typing import Any, Literal

import torch
from torch import Tensor, nn

from colossal_lite import kernels as ops_table
from colossal_lite.config.parallel_schema import TENSOR_MODES, ModelFacts
from colossal_lite.data.batch import Batch
from colossal_lite.data.batch_checks import BATCH_KEYS, StatedSizes
from colossal_lite.data.batch_forms import named
from colossal_lite.distributed.mesh import Mesh
from colossal_lite.kernels import Ops
from colossal_lite.layers.dropout_rows import (
    adapters_of,
    bind_dropout,
    cut_linears,
    in_several_places,
    is_known,
    note_places,
    rows_behind,
)
from colossal_lite.layers.hugging_face import is_hugging_face
from colossal_lite.layers.layer_swap import ancestors
from colossal_lite.layers.lora import with_adapters
from colossal_lite.layers.replicated import serial, tied_names
from colossal_lite.layers.roles import ROLES, Role, assign_roles, known_plan, with_new_names
from colossal_lite.layers.sequence_parallel import across_sequence, give_ops, sees_whole_sequences
from colossal_lite.layers.tensor_modes import (
    Form,
    LocalRows,
    ModeResult,
    TensorStrategy,
    mode_file,
    mode_of,
)
from colossal_lite.models import GPT
from colossal_lite.numerics.random import DropoutStreams
from colossal_lite.observe.printed_lines import warn
from colossal_lite.parallel.auto_plan import AutoPlan, auto_plan, roles_by_shape
from colossal_lite.parallel.copy_batches import is_more_than_words, labels_samples
from colossal_lite.parallel.dropout_samples import sample_dims
from colossal_lite.parallel.first_swap import FirstSwap, form_without_proof
from colossal_lite.parallel.fused_head import FusedHead, UnmadeLogits, fuse_head, head_of
from colossal_lite.parallel.length_proof import LengthProofs, Proof, proofs_at
from colossal_lite.parallel.model_loss import ModelLoss, gather_logits, model_loss
from colossal_lite.parallel.padding import Padding, padding_of
from colossal_lite.parallel.plan_proof import (
    UnfitError,
    across_at,
    check_plan,
    check_sequence,
    parts_of,
    swapped_at,
)
from colossal_lite.parallel.small_copy import (
    LENGTH_NAMES,
    NoCopyError,
    frozen_heap,
    stated_length,
    table_roles,
)
from colossal_lite.sharding.shard_spec import ShardSpec
from colossal_lite.transforms.auxiliary_loss import AuxiliaryLosses, Share, check_cuts, modules_of
from colossal_lite.transforms.compiled_units import compiled_units
from colossal_lite.transforms.key_cache import give_key_cache_back, switch_off_key_cache


@dataclass(frozen=True)
class Parallelized:
    """The result of `parallelize`: the strategy, the ops in use, and each parameter's spec by its first name."""

    strategy: TensorStrategy
    ops: Ops
    specs: Mapping[str, ShardSpec]
    has_dropout: bool
    auxiliary: AuxiliaryLosses
    plan: Mapping[str, str]
    """The roles that were given or found."""
    padding: Padding
    lengths: LengthProofs | None
    """Proofs at other lengths; None where a rank sees whole sequences and sizes, or nothing runs."""
    form: Form = field(default_factory=Form)
    head: FusedHead | None = None
    """The head, if it can compute the loss."""
    first_swap: FirstSwap | None = None
    """What proves the swap with the first batch; None if it is proven, or cannot be."""
    shown: tuple[str, ...] = ()
    """Further arguments with which the model is proven, so that each batch has them."""

    def local_part(self, batch: Batch) -> Batch:
        """What this rank's layers see of a micro-batch. Raises ValueError if it cannot be cut so."""
        return self.strategy.local_part(self.padding.of(batch))

    def told(self, part: Batch, scale: float = 1.0) -> AbstractContextManager[None]:
        """Context of a forward whose loss is `cross_entropy` on these labels."""
        return nullcontext() if self.head is None else self.head.told(part.labels, scale)

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(sum of token losses, number of valid labels) from what the model gives for logits."""
        if isinstance(logits, UnmadeLogits):
            if logits.written is None:
                return logits.loss
            logits = logits.written
        return self.strategy.cross_entropy(self.ops, logits, labels)

    @property
    def reported_loss(self) -> int:
        """Numbers of its part of a batch that each data rank sends to the others: its samples, for dropout, and its
        valid labels, for auxiliary losses."""
        return 2 if self.auxiliary.names else int(self.has_dropout)


def parallelize(
    module: nn.Module,
    mesh: Mesh,
    plan: Literal["auto"] | Mapping[str, str] = "auto",
    *,
    sequence_parallel: bool | Literal["auto"] = "auto",
    regather_inputs: bool = True,
    sequence_mode: str = "ring",
    kernels: Literal["auto", "torch", "triton"] = "auto",
    compiled: bool = False,
    device_type: str = "cpu",
    streams: DropoutStreams | None = None,
    criterion: ModelLoss | None = None,
    example: Batch | None = None,
) -> Parallelized:
    """Turn `module` into this rank's part of it, in place, and return the spec of each parameter.

    `plan` gives module names their roles (`roles.ROLES`); "auto" reads them from a run of a small copy (`auto_plan`),
    and the engine prints them.  Parameters that are cut become placeholders on meta; `fill` gives them values.
    `streams` gives dropout masks that do not depend on the mesh; without it dropout is torch's own.  `criterion`: the
    model's own code reads its logits, which are whole then.  `compiled`: torch.compile works here, and ops that gain
    from it may be its work.  `example`: a few samples, alike on all ranks, for a model that does not run on words.
    Raises ValueError before anything is changed: for a plan that leaves a parameter out, and for sizes that the axis
    does not divide. It also raises for a sequence axis under a model of unknown attention.
    """
    compilation = _compilation_of(module, compiled, [name for name, _ in module.named_modules()])
    _check_sequence(module, mesh, sequence_mode, criterion, compilation)
    head = None if criterion is not None else head_of(module)
    auxiliary, emitting, facts = AuxiliaryLosses(), modules_of(module), facts_of(module)
    ops = ops_table.select(kernels, device_type=device_type, compiled=compiled)
    found: _Proven = {}, {}, Form(), None
    if mesh.size("tensor") > 1:
        found = _proven(module, mesh, plan, sequence_parallel, regather_inputs, criterion, example)
    chosen, roles, form, first = found
    _check_auxiliary(module, mesh, form.sequence_parallel, sequence_mode)
    if form.whole_sizes:
        _refuse_compiled(module, _compilation_of(module, compiled, roles))
    padding = padding_of(
        module, mesh, facts, chosen, roles, sequence_parallel=form.sequence_parallel, sequence_mode=sequence_mode,
        longest=stated_sizes(module, _shapes(module)).tokens, has_auxiliary=bool(emitting),
    )  # fmt: skip
    lengths = _length_proofs(module, mesh, chosen, roles, form, sequence_mode, padding, criterion)
    if streams is not None and not (compiled or mesh.is_recording):
        streams.sample_dims = sample_dims(module, criterion, example)
    linears = () if mesh.size("tensor") == 1 or is_known(module) else cut_linears(module, roles)
    strategy, specs, local_rows, share_at = _swapped(module, mesh, roles, form, criterion, auxiliary)
    if streams and linears:
        local_rows = rows_behind(module, roles, linears, streams, strategy.cut_behind, local_rows)
    if mesh.size("sequence") > 1:
        longest = facts.sequence if facts else None
        strategy, ops = across_sequence(module, mesh, sequence_mode, strategy, ops, longest)
    has_dropout = streams is not None and _bind_dropout(module, mesh, roles, streams, local_rows, compiled)
    _check_replaced(emitting.keys() - modules_of(module).keys(), mesh)
    auxiliary.bind(module, partial(_share, share_at, mesh.size("sequence")))
    give_ops(module, ops)
    fused = fuse_head(module, head, ops, is_cut=mesh.size("tensor") > 1)
    return Parallelized(
        strategy, ops, specs, has_dropout, auxiliary, chosen, padding, lengths, form, fused, first,
        _further(example),
    )  # fmt: skip


def _further(example: Batch | None) -> tuple[str, ...]:
    """Arguments of an example beside ids, if the proofs have run on them."""
    if example is None or not is_more_than_words(example):
        return ()
    return tuple(name for name in named(example.args, example.kwargs) if name not in BATCH_KEYS)


def _swapped(
    module: nn.Module, mesh: Mesh, roles: Mapping[str, Role], form: Form, criterion: ModelLoss | None,
    auxiliary: AuxiliaryLosses,
) -> ModeResult:  # fmt: skip
    """Put the layers of the tensor mode into the module, if there is one."""
    if mesh.size("tensor") == 1:
        return serial(module)
    made = mode_file(mode_of(mesh)).swap_layers(module, mesh, roles, form)
    gather_logits(module, roles, made[0], criterion)
    _watch_pairs(module, roles, auxiliary)
    return made


def _length_proofs(
    module: nn.Module, mesh: Mesh, plan: Mapping[str, str], roles: Mapping[str, Role], form: Form,
    sequence_mode: str, padding: Padding, criterion: ModelLoss | None,
) -> LengthProofs | None:  # fmt: skip
    proofs: list[Proof] = []
    settings: list[str] = []
    if mesh.size("tensor") > 1:
        proofs.append(partial(swapped_at, mesh, form, criterion))
        settings.append(f"parallel.tensor on {mesh.size('tensor')} ranks")
    if mesh.size("sequence") > 1:
        proofs.append(partial(across_at, mesh, sequence_mode, criterion))
        settings.append(f"parallel.sequence on {mesh.size('sequence')} ranks")
    if mesh.is_recording:
        return None
    return proofs_at(
        module,
        plan,
        roles or table_roles(module),
        proofs,
        padding,
        " and ".join(settings),
        warns=mesh.rank == 0,
    )


def _compilation_of(module: nn.Module, compiled: bool, parts: Iterable[str]) -> str:
    """What compiles one of these parts of the model: the setting, or a module that a user has compiled; "" if
    nothing."""
    if compiled:
        return "compile='block'"
    units = compiled_units(module)
    around = {name for part in parts for name in (*ancestors(part), "")}
    names = (
        name or "the model" for name, owner in module.named_modules() if owner in units and name in around
    )
    return next((f"torch.compile of {name}" for name in names), "")


def _refuse_compiled(module: nn.Module, compilation: str) -> None:
    if compilation:
        raise ValueError(
            f"{compilation}: the code of {type(module).__name__} sees the sizes of the whole model in tensor mode 1d "
            f"(docs/plans.md). torch.compile does not follow that. Legal: compile='none', and no compiled module"
        )


def _check_replaced(auxiliary: Collection[str], mesh: Mesh) -> None:
    if auxiliary:
        raise ValueError(
            f"auxiliary loss {min(auxiliary)}: it lies in a module that becomes a layer of tensor mode "
            f"{mode_of(mesh)}; legal: in the module around that"
        )


def _bind_dropout(
    module: nn.Module, mesh: Mesh, roles: Mapping[str, Role], streams: DropoutStreams, local_rows: LocalRows,
    compiled: bool,
) -> bool:  # fmt: skip
    """Give dropouts their counters; whether there are any."""
    refused = {**adapters_of(roles), **(in_several_places(module) if mesh.size("pipeline") > 1 else {})}
    return bind_dropout(module, streams, local_rows, None if compiled else refused)


def _check_auxiliary(module: nn.Module, mesh: Mesh, sequence_parallel: bool, sequence_mode: str) -> None:
    tokens = f"sequence parallelism (mode {sequence_mode!r})" if mesh.size("sequence") > 1 else None
    features = None
    if mesh.size("tensor") > 1:
        mode = mode_of(mesh)
        if TENSOR_MODES[mode].cuts_features:
            features = f"tensor mode {mode}"
        elif sequence_parallel and "sequence_parallel" in TENSOR_MODES[mode].reads:
            tokens = tokens or "sequence_parallel=True"
    check_cuts(module, tokens=tokens, features=features)


def _share(share_at: Callable[[str], Share], sequence: int, name: str) -> Share:
    """A module's share in a mode, on one of `sequence` ranks of the sequence axis."""
    share = share_at(name)
    return replace(share, tokens=share.tokens * sequence)


def _watch_pairs(module: nn.Module, roles: Mapping[str, Role], auxiliary: AuxiliaryLosses) -> None:
    """Record where activations are cut differently than the residual stream: from the shared input of several
    column-wise linears, or the output of one, to the row-wise linear; and behind the head."""
    if not modules_of(module):
        return
    note = partial(setattr, auxiliary, "behind")
    cut = [name for name, role in roles.items() if role.name in ("colwise", "lm_head")]
    note_places(module, roles, cut, note)
    firsts = Counter(name.rpartition(".")[0] for name, role in roles.items() if role.name == "colwise")
    for door in [door for door, count in firsts.items() if count > 1]:
        owner = module.get_submodule(door)
        owner.register_forward_pre_hook(lambda *_, door=door: note(f"the inputs of {door}"))


def _check_sequence(
    module: nn.Module, mesh: Mesh, mode: str, criterion: ModelLoss | None, compilation: str
) -> None:
    """Raises ValueError for a model that a sequence axis cannot run, or runs as another."""
    if mesh.size("sequence") == 1:
        return
    if sees_whole_sequences(module):
        settings = [
            f"parallel.{axis}={mesh.size(axis)}" for axis in ("tensor", "pipeline") if mesh.size(axis) > 1
        ]
        if settings := settings + [compilation] * bool(compilation):
            raise ValueError(
                f"{' and '.join(settings)} with parallel.sequence={mesh.size('sequence')}: the code of "
                f"{type(module).__name__} is shown whole sequences (docs/sequences.md), which is not built beside it. "
                f"Legal: one of the two, models.GPT, or Hugging Face's GPT-2 and Llama without dropout of attention"
            )
    roles = _roles_of_copy(module)
    switch_off_key_cache(module)  # it joins keys of a rank's tokens to none
    try:
        check_sequence(module, mesh, mode, roles, criterion)
    except ValueError:
        give_key_cache_back(module)
        raise


def _roles_of_copy(module: nn.Module) -> Mapping[str, Role]:
    """Roles of tables and linears, for a small copy on a sequence axis."""
    if (known := known_plan(*_names(module))) is not None:
        with suppress(ValueError):  # a linear may stand deeper in a module around it
            return assign_roles(with_adapters(known[1], module), *_names(module))
    return roles_by_shape(module)


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in module.state_dict().items()}


def _names(module: nn.Module) -> tuple[list[str], list[str]]:
    """All module names, and those that hold parameters of their own."""
    owners = [name for name, m in module.named_modules() if any(True for _ in m.parameters(recurse=False))]
    return [name for name, _ in module.named_modules() if name], owners


_Proven = tuple[Mapping[str, str], Mapping[str, Role], Form, FirstSwap | None]
QUIET_S = 1.0
"""Rank 0 prints it where a search for a plan takes longer, as it may go on for tens of such times."""


@frozen_heap()
def _proven(
    module: nn.Module, mesh: Mesh, plan: Literal["auto"] | Mapping[str, str],
    sequence_parallel: bool | Literal["auto"], regather_inputs: bool, criterion: ModelLoss | None,
    example: Batch | None,
) -> _Proven:  # fmt: skip
    """The plan, the roles and the form in which the model stays what it is. Without a proof, also what proves them with
    the first batch. Raises ValueError if there are none."""
    if sequence_parallel == "auto" and example is not None and labels_samples(example):
        sequence_parallel = False  # it would cut the labels with the tokens
    try:
        return _found(module, mesh, plan, sequence_parallel, regather_inputs, criterion, example)
    except ValueError as error:
        if criterion is None and "decoder_input_ids" in signature(module.forward).parameters:
            with warnings.catch_warnings(), suppress(ValueError):
                warnings.simplefilter("ignore")
                own = model_loss(module, example)
                _found(module, mesh, plan, sequence_parallel, regather_inputs, own, example)
                error.args = (
                    f"{error}. {type(module).__name__} is an encoder-decoder, and its forward gets no labels. Legal: "
                    f"criterion='model', which hands them to it and trains on the loss that it gives",
                )
        raise


def _found(
    module: nn.Module, mesh: Mesh, plan: Literal["auto"] | Mapping[str, str],
    sequence_parallel: bool | Literal["auto"], regather_inputs: bool, criterion: ModelLoss | None,
    example: Batch | None,
) -> _Proven:  # fmt: skip
    """As `_proven`, with this criterion alone."""
    first: ValueError | None = None
    began_s, is_told = time.monotonic(), mesh.rank != 0
    given = (
        (AutoPlan(with_new_names(plan), {}),)
        if plan != "auto"
        else _auto_plans(module, mesh, criterion, example)
    )
    for found in given:
        chosen = found.plan
        try:
            roles = assign_roles(chosen, *_names(module))
            how = sequence_parallel, regather_inputs, criterion
            try:
                form, later = check_plan(module, mesh, chosen, roles, *how, example), None
            except NoCopyError as error:
                form, later = form_without_proof(module, mesh, roles, *how, error)
        except ValueError as error:
            first = first or error
            if not is_told and time.monotonic() - began_s > QUIET_S:
                is_told = True
                print(
                    f"plan: these roles do not fit {type(module).__name__}; others are tried on a small copy, which "
                    f"may take a minute",
                    file=sys.stderr,
                )
            continue
        if found.whole and mesh.rank == 0:
            names_by_reason: dict[str, list[str]] = {}
            for name, why in found.whole.items():
                names_by_reason.setdefault(why, []).append(name)
            if isinstance(first, UnfitError):
                first.advise()
            told = "; ".join(f"{', '.join(names)}: {why}" for why, names in names_by_reason.items())
            warn(
                f"plan='auto': left whole, exact but with no saving: {told}"
                + (f" ({first})" if first else "")
            )
        return chosen, roles, form, later
    assert first is not None, "there is a plan"
    if isinstance(first, UnfitError):
        first.advise()
    raise first


class NoRolesError(ValueError):
    """The roles of a model's layers cannot be read: `fault` says why. The text has `legal` too."""

    def __init__(self, fault: str, legal: str = "") -> None:
        self.fault = fault
        super().__init__(f"{fault}. Legal: {legal}" if legal else fault)


def _auto_plans(
    module: nn.Module, mesh: Mesh, criterion: ModelLoss | None, example: Batch | None
) -> Iterator[AutoPlan]:
    """Plans to be proven: of known names; of a run; and of the run with pairs of linears left whole."""
    if (known := known_plan(*_names(module))) is not None:
        yield AutoPlan(with_adapters(known[1], module), {})
        if isinstance(module, GPT):
            return
    try:
        found = auto_plan(module, parts_of(mesh), criterion, example)
    except NoCopyError as error:
        if known is None:
            raise NoRolesError(
                f"plan='auto': {type(module).__name__} does not run on random words{' or the example' * bool(example)} "
                f"({error}), so that its roles cannot be read",
                f"{'' if example else 'cl.initialize(..., example=batch), or '}a dict from name patterns to roles: "
                f"{', '.join(ROLES)}",
            ) from None
        return
    yield from found.choices()


# Attribute names under which models keep their sizes: ours, then those of GPT-2 and Llama in Hugging Face's form.
FACT_NAMES: dict[str, tuple[str, ...]] = {
    "layers": ("layers", "num_hidden_layers", "n_layer"),
    "heads": ("heads", "num_attention_heads", "n_head"),
    "kv_heads": ("kv_heads", "num_key_value_heads", "heads", "num_attention_heads", "n_head"),
    "width": ("width", "hidden_size", "n_embd"),
    "ffn": ("ffn", "ffn_width", "intermediate_size", "n_inner"),
    "vocabulary": ("vocabulary", "vocab_size"),
    "sequence": LENGTH_NAMES,
    "tied": ("tied", "tie_word_embeddings"),
    "causal": ("causal", "is_causal"),
}


_POSITIONS = re.compile(r"(^|\.)(wpe|[^.]*pos[^.]*)\.weight$")
"""Names of tables of learned positions."""


def facts_of(module: nn.Module) -> ModelFacts | None:
    """The sizes that a model's `config` states; None where it states none, and then no model rule can be checked."""
    config = getattr(module, "config", None)
    found: dict[str, Any] = {}
    for fact, names in FACT_NAMES.items():
        values = [getattr(config, name) for name in names if getattr(config, name, None) is not None]
        if values:
            found[fact] = values[0]
    if stated_length(module) is None:
        found.pop("sequence", None)
    found.setdefault("tied", bool(tied_names(module)))
    found.setdefault("causal", True)
    if "width" in found:
        found.setdefault("ffn", 4 * found["width"])
    return ModelFacts(**found) if set(found) == set(FACT_NAMES) else None


def stated_sizes(module: nn.Module, shapes: Mapping[str, Sequence[int]]) -> StatedSizes:
    """What a batch must fit. `shapes`: of the whole `state_dict()`, as `module` may have lost a part to other ranks.

    A stated sequence bounds a model with a table of so many learned positions, and our own: other rotary positions have
    no end."""
    facts, sequence = facts_of(module), stated_length(module)
    tables = [shape[0] for name, shape in shapes.items() if _POSITIONS.search(name) and len(shape) == 2]
    positions = sequence if sequence is not None and any(rows >= sequence for rows in tables) else None
    tokens = sequence if isinstance(module, GPT) else positions
    takes_ids = isinstance(module, GPT) or (
        is_hugging_face(module) and getattr(module, "main_input_name", None) == "input_ids"
    )
    vocabulary = facts.vocabulary if facts else None
    return StatedSizes(vocabulary, tokens, positions, not _sees_later_tokens(module), takes_ids)


def _sees_later_tokens(module: nn.Module) -> bool:
    """Whether a model states that it is not causal: by its config, or by the name that transformers gives one of masked
    words."""
    config = getattr(module, "config", None)
    stated = [getattr(config, name, None) for name in FACT_NAMES["causal"]]
    return False in stated or any(type(part).__name__.endswith("ForMaskedLM") for part in module.modules())
