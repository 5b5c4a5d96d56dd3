"""Proves a plan of roles on a small copy of the model, and names what does not fit.

Note: where there is no proof.
A model that does not run on random words has none here. Its first batch is the proof then (first_swap.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Literal, TypeVar

from torch import nn

from colossal_lite.config.parallel_schema import TENSOR_MODES, TensorConfig
from colossal_lite.data.batch import Batch
from colossal_lite.distributed.mesh import Mesh
from colossal_lite.kernels import TORCH
from colossal_lite.layers.replicated import serial
from colossal_lite.layers.roles import DETAILS, PLANS, Role
from colossal_lite.layers.sequence_parallel import across_sequence, give_ops, sees_whole_sequences
from colossal_lite.layers.swap_checks import has_forward_of, has_hooks
from colossal_lite.layers.tensor_modes import Form, ModeResult, head_weight, mode_file, mode_of
from colossal_lite.models import GPT, GPTConfig
from colossal_lite.observe.printed_lines import warn
from colossal_lite.parallel.copy_batches import is_more_than_words, words
from colossal_lite.parallel.model_loss import ModelLoss, gather_logits
from colossal_lite.parallel.narrowing import Narrowing, narrowing
from colossal_lite.parallel.small_copy import (
    LIMIT_BYTES,
    NoCopyError,
    SmallCopy,
    deep_copy,
    has_more_blocks,
    own_lengths,
    small_copy,
)
from colossal_lite.parallel.swap_proof import (
    Difference,
    NotRunError,
    Truth,
    check_finite,
    prove,
    truth_of,
    with_labels,
)
from colossal_lite.sharding.mesh_layout import MeshLayout

T = TypeVar("T")
MOST_SIDES = {1: 4, 2: 3, 3: 2}
"""Ranks along each side of an emulated mesh, by its dimensions, where so few divide the real number."""
TOKENS = 8
QUICK_BYTES = 4 << 20
"""Copies above this size are made narrower, if that is possible."""
MOST_QUICK_BYTES = 32 << 20
MOST_TRIES = 12
OUR_PARTS = (nn.ModuleList, nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.Dropout)


@dataclass(frozen=True)
class Trial:
    """How a small copy is run in a tensor mode. `given`: what it is run on, with labels; None: what the copy takes."""

    small: SmallCopy
    layout: MeshLayout
    mode: str
    criterion: ModelLoss | None
    given: Batch | None = None

    @cached_property
    def batch(self) -> Batch:
        if self.given is not None:
            return self.given
        ranks = self.layout.world_size
        batch = self.small.batch(max(ranks, 2), TOKENS if TOKENS % ranks == 0 else 2 * ranks)
        return batch if self.small.example is None or self.criterion is not None else self.labelled(batch)

    def labelled(self, batch: Batch) -> Batch:
        """The batch with random numbers for labels, in the shape of its logits. Raises NotRunError where the plain copy
        does not run. Raises ValueError for outputs without logits, and for those of a shape that the head does not
        give."""
        model = self.small.model
        made = with_labels(model, batch)
        shape, vocabulary = tuple(made.labels.shape), head_weight(model, self.small.roles).shape[0]
        if shape[-1] != vocabulary:
            raise ValueError(
                f"model: {shape} stands where logits stand, and the lm_head gives [..., {vocabulary}]. Legal: logits "
                f"alone, first in a tuple, or as 'logits'"
            )
        return made

    @cached_property
    def truth(self) -> Truth:
        return truth_of(self.small.model, self.batch, self.criterion)

    def difference(self, roles: Mapping[str, Role], form: Form) -> Difference | None:
        """Raises NotRunError if the plain copy does not run."""

        def swap(module: nn.Module, mesh: Mesh) -> ModeResult:
            made = mode_file(self.mode).swap_layers(module, mesh, roles, form)
            gather_logits(module, roles, made[0], self.criterion)
            return made

        return prove(self.small.model, self.batch, swap, self.layout, self.criterion, self.truth)

    def unfit(self, forms: Sequence[Form], found: Difference) -> UnfitError:
        """The error that refuses these roles."""
        words = "" if self.given is None else ", run on samples of the first batch,"
        return UnfitError(
            f"plan: with these roles a small copy of the model{words} on {self.layout.world_size} emulated ranks of "
            f"tensor mode {self.mode} is not that of one process. Found: {found.what}",
            lambda: self.fitting(forms) or _place(self.small, found),
        )

    def fitting(self, forms: Sequence[Form]) -> str:
        """The first change of one role's form, or of sequence_parallel, with which the copy is exact, in words."""
        groups: dict[tuple[str, str], list[str]] = {}
        for name, role in self.small.roles.items():
            if role.name == "colwise":
                parts = [part for part in name.split(".") if not part.isdigit()]
                groups.setdefault((".".join(parts), role.detail), []).append(name)
        details = ("", *DETAILS["colwise"])
        tries: list[tuple[list[str], str]] = [([], "")]
        tries += [
            (names, detail) for (_, now), names in groups.items() for detail in details if detail != now
        ]
        whole = [replace(form, sequence_parallel=False) for form in forms]
        for names, detail in tries[:MOST_TRIES]:
            if detail in ("qkv", "kv") and not self._has_heads(names[0]):  # which none can swap
                continue
            roles = {**self.small.roles, **dict.fromkeys(names, Role("colwise", detail))}
            for form in dict.fromkeys([*forms, *whole]):
                if (names or form not in forms) and self._is_exact(roles, form):
                    return self._words(names, detail, needs_whole=form not in forms)
        return ""

    def _has_heads(self, name: str) -> bool:
        around = (role for path, role in self.small.roles.items() if f"{name}.".startswith(f"{path}."))
        return any(role.name == "attention" for role in around)

    def _is_exact(self, roles: Mapping[str, Role], form: Form) -> bool:
        try:
            return self.difference(roles, form) is None
        except (ValueError, AssertionError):
            return False

    def _words(self, names: Sequence[str], form: str, *, needs_whole: bool) -> str:
        setting = "parallel.tensor.sequence_parallel=False" if needs_whole else ""
        if not names:
            return f"With {setting} they agree"
        found = self.small.roles[names[0]]
        role = _text(Role("colwise", form)) + (f" and {setting}" if setting else "")
        kind = type(self.small.model.get_submodule(names[0])).__name__
        return f"{names[0]} ({kind}) has the role {_text(found)}, and with {role} they agree"


class UnfitError(ValueError):
    """A plan under which the model is another one. What would fit takes many proofs to find, and is added if asked."""

    def __init__(self, text: str, find: Callable[[], str]) -> None:
        super().__init__(text)
        self._find: Callable[[], str] | None = find

    def advise(self) -> None:
        """Add what would fit to the text."""
        if self._find is not None:
            self.args, self._find = (f"{self.args[0]}. {self._find()}",), None


def check_plan(
    model: nn.Module, mesh: Mesh, plan: Mapping[str, str], roles: Mapping[str, Role],
    sequence_parallel: bool | Literal["auto"], regather_inputs: bool, criterion: ModelLoss | None = None,
    example: Batch | None = None,
) -> Form:  # fmt: skip
    """The form in which the swapped model is the plain one; the same on every rank. Raises UnfitError if there is none,
    and NoCopyError without a proof. `criterion`: the loss is the model's own. `example`: as `on_a_copy`.

    Nothing is communicated. Our own GPT under its own plan is what tests prove, and is not proven again.
    """
    forms = legal_forms(mode_of(mesh), sequence_parallel, regather_inputs)
    if mesh.is_recording or is_our_own(model, plan):
        return forms[0]

    def tried(small: SmallCopy, some: Sequence[Form] = forms) -> tuple[Trial, list[Difference], Form | None]:
        if small.is_as_wide:  # raises ValueError for a model that the real mesh cannot cut
            recorded = Mesh.recording(mesh.layout, mesh.rank)
            mode_file(mode_of(mesh)).swap_layers(deep_copy(small.model), recorded, small.roles, some[0])
        trial, found = trial_of(small, mesh, some[0], criterion), list[Difference]()
        if small.has_all_blocks:  # random values may grow through them beyond what can be compared
            check_finite(small.model, trial.batch, criterion)
        for form in some:
            difference = trial.difference(small.roles, form)
            if difference is None:
                return trial, found, form
            found.append(difference)
        return trial, found, None

    trial, found, form = on_a_copy(model, roles, tried, example=example)
    if form is not None and has_more_blocks(model, roles):  # some may do what the first ones do not
        with suppress(NoCopyError):
            left = forms[forms.index(form) :]
            again = partial(tried, some=left)
            trial, more, form = on_a_copy(model, roles, again, keeps_all=True, example=example)
            found += more
    if form is not None:
        if sequence_parallel == "auto" and not form.sequence_parallel and mesh.rank == 0:
            warn(
                f"parallel.tensor.sequence_parallel: off, as {type(model).__name__} is not exact with it: "
                f"{found[-1 if len(found) < 3 else 1].what}"
            )
        return form
    raise trial.unfit(forms, found[-1])


def legal_forms(
    mode: str, sequence_parallel: bool | Literal["auto"], regather_inputs: bool
) -> tuple[Form, ...]:
    """The candidates, the cheapest first."""
    if "sequence_parallel" not in TENSOR_MODES[mode].reads:
        return (Form(),)
    cuts = [True, False] if sequence_parallel == "auto" else [sequence_parallel]
    return tuple(Form(cut, regather_inputs, whole) for cut in cuts for whole in (False, True))


def check_sequence(
    model: nn.Module, mesh: Mesh, mode: str, roles: Mapping[str, Role], criterion: ModelLoss | None = None
) -> None:
    """Raises ValueError for a model that is another where a rank sees a part of each sequence; the same on every rank.

    `roles`: of tables and linears, for a small copy; if it does not run, it gets all rows. Nothing is communicated.
    """
    if mesh.is_recording or is_our_own(model, {}):
        return
    layout = _emulated_sequence(mesh, mode)

    def tried(small: SmallCopy) -> tuple[SmallCopy, Difference | None]:
        tokens = small.tokens or max(TOKENS, 2 * layout.world_size)
        if small.tokens is not None and tokens % (2 * layout.world_size):
            raise NotRunError(
                f"sequences of {tokens} tokens alone, which {layout.world_size} ranks do not divide"
            )
        batch = words(2, tokens, small.words, small.padding)
        if small.has_all_blocks:
            check_finite(small.model, batch, criterion)
        return small, prove(small.model, batch, partial(_across, mode), layout, criterion)

    try:
        try:
            small, found = on_a_copy(model, roles, tried)
        except NoCopyError:
            roles = {}
            small, found = on_a_copy(model, roles, tried)
        if found is None and has_more_blocks(model, roles):
            with suppress(NoCopyError):
                small, found = on_a_copy(model, roles, tried, keeps_all=True)
    except NoCopyError as error:
        if sees_whole_sequences(model):
            raise ValueError(
                f"sequence: {type(model).__name__} cannot be proven on a small copy: {error}; legal: a model that runs "
                f"on ids alone, or sequence=1"
            ) from error
        return warn_of_no_proof(type(model).__name__, error) if mesh.rank == 0 else None
    if found is not None:
        where = f" at {_named(replace(small, roles={}), found.where)}" if found.where else ""
        raise ValueError(
            f"sequence: a small copy of the model on {layout.world_size} emulated ranks (mode {mode!r}) is not that of "
            f"one process. Found: {found.what}{where}. But a module sees a rank's tokens; legal: "
            f"F.scaled_dot_product_attention, or products of queries and keys, beside modules that act on each token "
            f"alone; or sequence=1"
        )


def _across(mode: str, module: nn.Module, rank: Mesh) -> ModeResult:
    """Have a copy see one rank's tokens."""
    plain, specs, rows, share = serial(module)
    strategy, ops = across_sequence(module, rank, mode, plain, TORCH)
    give_ops(module, ops)
    return strategy, specs, rows, share


def swapped_at(mesh: Mesh, form: Form, criterion: ModelLoss | None, small: SmallCopy, tokens: int) -> str:
    """How a copy whose layers are swapped differs from the plain one at so many tokens, or "". Raises NoCopyError or
    NotRunError."""
    trial = trial_of(replace(small, tokens=tokens), mesh, form, criterion)
    found = trial.difference(small.roles, form)
    return "" if found is None else found.what


def across_at(mesh: Mesh, mode: str, criterion: ModelLoss | None, small: SmallCopy, tokens: int) -> str:
    """As `swapped_at`, of a copy whose ranks see a part of each sequence."""
    batch, layout = words(2, tokens, small.words, small.padding), _emulated_sequence(mesh, mode)
    found = prove(small.model, batch, partial(_across, mode), layout, criterion)
    return "" if found is None else found.what


def parts_of(mesh: Mesh) -> int:
    """Parts that the heads are cut into."""
    return max(leaf.size for leaf in mesh.layout.leaves if leaf.name in ("tensor", "tensor.row", "tensor.i"))


def _emulated_sequence(mesh: Mesh, mode: str) -> MeshLayout:
    """A sequence axis of as few ranks as divide the real one, in each of its parts."""
    if mode != "usp":
        return MeshLayout.build(sequence=_fewest(mesh.size("sequence")))
    inner = _fewest(mesh.size("sequence.ulysses"))
    return MeshLayout.build(sequence=inner * _fewest(mesh.size("sequence.ring")), ulysses=inner)


def _fewest(size: int) -> int:
    """The smallest number of ranks that cuts as `size` ranks do: 1, or its least divisor above."""
    return next((n for n in range(2, size + 1) if size % n == 0), 1)


def check_provable(model: nn.Module, roles: Mapping[str, Role], error: NoCopyError) -> None:
    """Raises ValueError for what only a proof before the swap can admit."""
    own = [
        f"{name} ({type(model.get_submodule(name)).__name__})"
        for name, role in roles.items()
        if role.name == "embedding" and not has_forward_of(model.get_submodule(name), nn.Embedding)
    ]
    if own:
        raise ValueError(
            f"plan: {', '.join(own)} has a forward of its own, which must be proven, and cannot be: {error}; legal: "
            f"nn.Embedding as it is"
        )


def warn_of_no_proof(kind: str, error: ValueError) -> None:
    """Warn of a model of class `kind` that no copy can prove."""
    warn(
        f"plan: {kind} is not proven on a small copy ({error}); the classes, settings and hooks of its layers are "
        f"checked, and roles are taken as they are"
    )


def is_our_own(model: nn.Module, plan: Mapping[str, str]) -> bool:
    """Whether a model is models.GPT as it is built, under the plan of its own names."""
    if type(model) is not GPT or any(PLANS["gpt"].get(pattern) != role for pattern, role in plan.items()):
        return False
    return all(
        (type(module) in OUR_PARTS or type(module).__module__.startswith("colossal_lite."))
        and "forward" not in module.__dict__
        and not has_hooks(module)
        for module in model.modules()
    ) and isinstance(model.config, GPTConfig)


def on_a_copy(
    model: nn.Module,
    roles: Mapping[str, Role],
    look: Callable[[SmallCopy], T],
    *,
    keeps_all: bool = False,
    is_quick: bool = False,
    example: Batch | None = None,
) -> T:
    """What `look` finds on the first small copy that runs. Copies are as wide as the model, if that is quick;
    narrower; as wide as they may be. `keeps_all`: of all blocks; `is_quick`: none that takes seconds. `example`: what
    it runs on where random words do not do, or are not all that it takes. Raises NoCopyError if none runs."""
    why = ""
    for narrow, limit_bytes in _forms(model, roles):
        limit_bytes = min(limit_bytes, MOST_QUICK_BYTES) if is_quick else limit_bytes
        try:
            small = small_copy(model, roles, narrow, limit_bytes, keeps_all=keeps_all)
        except NoCopyError as error:
            why = str(error)
            continue
        runs = [] if example is None else [replace(small, example=example)]
        if example is None or not is_more_than_words(example):
            runs = [replace(small, tokens=tokens) for tokens in (None, *own_lengths(small.model))] + runs
        for each in runs:
            try:
                return look(each)
            except (NoCopyError, NotRunError) as error:
                why = str(error) if each.tokens is None else why
    raise NoCopyError(why)


def _forms(model: nn.Module, roles: Mapping[str, Role]) -> Iterator[tuple[Narrowing | None, int]]:
    yield None, QUICK_BYTES
    try:
        if narrow := narrowing(model, roles):
            yield narrow, LIMIT_BYTES
    except (AttributeError, ValueError):  # heads that are stated nowhere: the swap says so
        pass
    yield None, LIMIT_BYTES


def trial_of(small: SmallCopy, mesh: Mesh, form: Form, criterion: ModelLoss | None) -> Trial:
    """The copy in a small world into which the mode can cut it."""
    mode = mode_of(mesh)
    swap_layers = mode_file(mode).swap_layers
    for layout in emulated_layouts(mesh):
        try:
            swap_layers(deep_copy(small.model), Mesh.recording(layout), small.roles, form)
        except ValueError:  # fewer ranks may not divide what the real number does
            continue
        return Trial(small, layout, mode, criterion)
    raise NoCopyError("no small number of ranks divides its heads as the real number does")


def emulated_layouts(mesh: Mesh) -> Iterator[MeshLayout]:
    """Small worlds of the mode of a mesh, best first. Their sides have few ranks, which divide the real number."""
    mode = TENSOR_MODES[mode_of(mesh)]
    edge = parts_of(mesh)
    few = sorted((d for d in range(2, MOST_SIDES[mode.sides] + 1) if edge % d == 0), reverse=True)
    for side in few or [edge]:
        config = TensorConfig(size=side**mode.sides, mode=mode_of(mesh))
        yield MeshLayout.build(tensor=config.axis())


def _place(small: SmallCopy, found: Difference) -> str:
    """Where a copy differs, and the legal roles there."""
    where = f" (at {_named(small, found.where)})" if found.where else ""
    return (
        f"Activations are cut within the model, and a module sees a rank's tokens, heads or features{where}. Legal: "
        f"roles that fit ({', '.join(f'colwise:{form}' for form in DETAILS['colwise'])} for fused linears), code that "
        f"takes sizes from its input, or tensor=1"
    )


def _named(small: SmallCopy, names: Sequence[str]) -> str:
    return ", ".join(
        f"{name} ({type(small.model.get_submodule(name)).__name__}"
        + (f", role {_text(small.roles[name])})" if name in small.roles else ")")
        for name in names[:3]
    )


def _text(role: Role) -> str:
    return f"{role.name}:{role.detail}" if role.detail else role.name
