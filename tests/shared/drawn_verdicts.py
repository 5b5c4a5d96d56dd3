"""Judges what the ranks of a drawn case saw against the plain loop. Everything here is pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tests.shared.drawn_cases import STEPS, DrawnCase
from tests.shared.drawn_models import make_batch
from tests.shared.drawn_runs import Ended, Seen, Truth

IGNORED = -100
BAD = ("WRONG", "CRASH", "HANG", "UNLIKE")
LOSS = {"fp64": 1e-9, "fp32": 1e-4}
GRADIENT = {"fp64": 1e-9, "fp32": 1e-3}
"""Of a gradient's norm and a millionth (fp32: a hundredth) of that of all gradients."""
FLOOR = {"fp64": 1e-6, "fp32": 1e-2}
WEIGHT = {"fp64": 1e-9, "fp32": 1e-4}
"""Of a weight's change and a thousandth of its norm, under an optimizer that keeps the scale of a gradient."""
NORMALISED = {"fp64": 1e-5, "fp32": 2e-2}
"""The same where the update does not shrink with the gradient."""
NOISE = {"fp64": 1e-9, "fp32": 1e-4}
"""A gradient's element below this share of the largest has no direction: such an update is rounding alone."""
ROUNDING = {"bf16": 2**-7, "fp16": 2**-10}
"""Of a gradient's element, relative to the largest: a rounding in forward and one in backward."""
SIGNED = {"lion", "lamb", "muon"}
DISPROVEN = "is not that of one process"
"""What a swap's proof says of roles that do not fit: all that is drawn fits."""
NARROW = 3.0
"""A run in 16 bits is no further from the float64 truth than the plain run in 16 bits, times this."""


@dataclass(frozen=True)
class Verdict:
    """`outcome` exact, refused, or one of BAD; `why` in one line; `trained`: whether the first part was trained."""

    outcome: str
    why: str = ""
    trained: bool = False
    detail: str = ""


def masked(words: str) -> str:
    """Words of a refusal without its numbers, for counting."""
    head = " ".join(re.split("[Ll]egal:", words)[0].split()).rstrip(" ;")
    return re.sub(r"\d+(\.\d+)?(e-?\d+)?", "#", head)[:220]


# ---- how the ranks ended ----


def judge_end(case: DrawnCase, seen: Sequence[Seen], part: str) -> Verdict | None:
    """A verdict if some rank did not come to the end of a part."""
    ends = [each.ended for each in seen]
    stopped = [end for end in ends if end is not None]
    if not stopped:
        return None
    detail = "\n".join(f"--- rank {r}: {e.trace}" for r, e in enumerate(ends) if e is not None)
    raised = [end for end in stopped if end.kind == "raised"]
    refused = [end for end in stopped if end.kind == "refused"]
    if raised:
        return Verdict("CRASH", f"{part}, {raised[0].phase}: {_line(raised[0])}", detail=detail)
    if len(refused) == len(ends):
        return _judge_refusal(case, refused, part, detail)
    if refused:
        return Verdict("UNLIKE", f"{part}, some ranks alone refuse: {_line(refused[0])}", detail=detail)
    late = (
        "timeout" in stopped[0].words or "not arrive" in stopped[0].words or "timed out" in stopped[0].words
    )
    return Verdict(
        "HANG" if late else "CRASH", f"{part}, {stopped[0].phase}: {_line(stopped[0])}", detail=detail
    )


def _judge_refusal(case: DrawnCase, refused: Sequence[Ended], part: str, detail: str) -> Verdict:
    words = {(masked(end.words), end.phase) for end in refused}
    if len(words) > 1:
        return Verdict("UNLIKE", f"{part}, ranks refuse in other words: {sorted(words)}"[:600], detail=detail)
    # An evaluation changes nothing, and may need more than a budget leaves.
    early = refused[0].phase in ("launch", "initialize", "load", "step 0", "evaluation")
    if not early and part == "first" and not _skips_too_many(case, refused[0]):
        return Verdict(
            "CRASH", f"{part}, refused after {refused[0].phase} began: {_line(refused[0])}", detail=detail
        )
    if DISPROVEN in refused[0].words:
        return Verdict("WRONG", f"{part}, {_line(refused[0])}", detail=detail)
    return Verdict("refused", f"{refused[0].words}")


def _skips_too_many(case: DrawnCase, end: Ended) -> bool:
    """Whether a step ended the run as `max_skipped_steps` asks: that many in a row had no label that counts."""
    limit = case.config.get("optimizer", {}).get("max_skipped_steps")
    kind, _, number = end.phase.partition(" ")
    if "optimizer.max_skipped_steps" not in end.words or kind != "step" or int(number) + 1 < limit:
        return False
    rows = [make_batch(case, int(number) - n, case.batch["samples"])["labels"] for n in range(limit)]
    return all(bool((labels == IGNORED).all()) for labels in rows)


def _line(end: Ended) -> str:
    return " ".join(end.words.split())[:300]


# ---- what they saw ----


def unlike(seen: Sequence[Seen], part: str) -> Verdict | None:
    """A verdict if ranks tell different numbers."""
    for name in ("losses", "norms", "skipped", "evaluated", "told", "digest"):
        told = [repr(getattr(each, name)) for each in seen]
        if name == "told":
            told = [masked(text) for text in told]
        if len(set(told)) > 1:
            return Verdict("UNLIKE", f"{part}: {name} differ: {'; '.join(sorted(set(told)))}"[:400])
    return None


def wrong(case: DrawnCase, first: Seen, second: Seen | None, truth: Truth, plain: Truth | None) -> str:
    """What differs from the truth first; "" if nothing does. `plain`: the plain run in a 16-bit dtype."""
    if not first.told.split(":")[0].endswith("Error"):
        return f"the batch with {case.habits['refuse']} was {first.told or 'not refused'}"
    both = _joined(first, second)
    faults = _narrow_faults if plain is not None else _wide_faults
    return next(faults(case, both, first, second, truth, plain or truth), "")


def different_bits(ours: Seen, theirs: Seen) -> str:
    """The first weight after three steps that two runs of one case have in other bits; "" if there is none."""
    for name, weight in theirs.weights.items():
        if not torch.equal(ours.weights[name].to(weight.dtype), weight):
            return f"after 3 steps: {name} in two halves has other bits than whole"
    return ""


def _joined(first: Seen, second: Seen | None) -> Seen:
    if second is None:
        return first
    return replace(
        first, losses=first.losses + second.losses, norms=first.norms + second.norms,
        skipped=first.skipped + second.skipped, gradients=first.gradients + second.gradients,
    )  # fmt: skip


def _evaluations(
    case: DrawnCase, first: Seen, second: Seen | None, truth: Truth
) -> Iterator[tuple[str, int, float, float]]:
    """(what, updates before it, loss, true loss)."""
    if first.evaluated is not None:
        yield "evaluation", case.habits["evaluate_after"], first.evaluated, truth.evaluated[0]
    if second is not None and second.evaluated is not None:
        yield "evaluation after the resume", STEPS, second.evaluated, truth.evaluated[1]


def _off(ours: float, truth: float, bound: float) -> bool:
    if math.isnan(truth) or math.isnan(ours):
        return math.isnan(truth) != math.isnan(ours)
    return not abs(ours - truth) <= bound * abs(truth) + 1e-12


def _wide_faults(
    case: DrawnCase, both: Seen, first: Seen, second: Seen | None, truth: Truth, plain: Truth
) -> Iterator[str]:
    bound = LOSS[case.dtype]
    for number, loss in enumerate(both.losses):
        looser = _looser(case, truth, number)
        if both.skipped[number] != math.isnan(truth.losses[number]):
            yield f"step {number}: skipped is {both.skipped[number]}, loss {loss:.6g} for {truth.losses[number]:.6g}"
        if _off(loss, truth.losses[number], bound * looser):
            yield f"step {number}: loss {loss:.12g} for {truth.losses[number]:.12g}"
        if math.isnan(truth.losses[number]):
            continue
        if number < len(both.gradients):
            yield from _gradient_faults(case, both.gradients[number], truth.gradients[number], number, looser)
        if _off(both.norms[number], truth.norms[number], max(bound, GRADIENT[case.dtype]) * looser):
            yield f"step {number}: norm {both.norms[number]:.12g} for {truth.norms[number]:.12g}"
    for what, number, ours, expected in _evaluations(case, first, second, truth):
        if _off(ours, expected, bound * _looser(case, truth, number)):
            yield f"{what}: loss {ours:.12g} for {expected:.12g}"
    yield from _weight_faults(case, "after 3 steps", first.weights, truth.saved, truth)
    if second is not None:
        yield from _weight_faults(case, "after the resume", second.weights, truth.last, truth)


def kinds_of(case: DrawnCase) -> set[str]:
    if case.habits["optimizer"] is not None:
        return {case.habits["optimizer"]}
    given = case.config["optimizer"]
    return {given["type"], *(group.get("type", given["type"]) for group in given.get("groups", ()))}


def _looser(case: DrawnCase, truth: Truth, number: int) -> float:
    """Losses of later steps follow from updates, some of which amplify rounding, and some of which are lossy."""
    if number in truth.own:
        return 1.0
    if number and follows_rounding(case, truth, number):
        return 1e3 if case.dtype == "fp32" else 1e7
    if case.config.get("optimizer", {}).get("moments") == "bf16":
        return 3e2 if case.dtype == "fp32" else 1e7
    if kinds_of(case) == {"sgd"}:
        return 1.0
    return 1e2 if case.dtype == "fp32" else 1e3


def follows_rounding(case: DrawnCase, truth: Truth, steps: int = STEPS) -> bool:
    """Whether in one of the first steps a signed update made full steps of rounding alone, so that runs part."""
    return (
        not truth.follows_signs
        and bool(kinds_of(case) & SIGNED)
        and any(_is_rounding(case, g) for g in truth.gradients[:steps])
    )


def _is_rounding(case: DrawnCase, gradients: Mapping[str, Tensor]) -> bool:
    """Whether some element is rounding alone, of which a signed update makes a full one. A key's bias changes no
    score."""
    largest = max((float(g.abs().max()) for g in gradients.values()), default=0.0)
    weights = [g.abs() for name, g in gradients.items() if not name.endswith("bias")]
    return any(bool(((g > 0) & (g < NOISE[case.dtype] * largest)).any()) for g in weights)


def _gradient_faults(
    case: DrawnCase, ours: Mapping[str, Tensor], truth: Mapping[str, Tensor], number: int, looser: float
) -> Iterator[str]:
    if ours.keys() != truth.keys():
        yield f"step {number}: gradients of {sorted(ours.keys() ^ truth.keys())} alone"
        return
    whole = math.sqrt(sum(float(g.norm()) ** 2 for g in truth.values()))
    for name, expected in truth.items():
        error = float((ours[name].double() - expected).norm())
        scale = float(expected.norm()) + FLOOR[case.dtype] * whole
        if not error <= GRADIENT[case.dtype] * looser * scale + 1e-300:
            yield f"step {number}: gradient of {name} is off by {error / (scale + 1e-300):.3g}"


def _weight_faults(
    case: DrawnCase, when: str, ours: Mapping[str, Tensor], truth: Mapping[str, Tensor], all_of: Truth
) -> Iterator[str]:
    kinds = kinds_of(case)
    normalised = kinds != {"sgd"}
    bound = (NORMALISED if normalised else WEIGHT)[case.dtype]
    if case.config.get("optimizer", {}).get("moments") == "bf16":
        bound = 0.2
    if follows_rounding(case, all_of, len(all_of.gradients)):
        bound = max(bound, 0.3)
    for name, expected in truth.items():
        difference = ours[name].double() - expected
        if case.dtype != "fp64" or kinds & {
            *SIGNED,
            "adam",
        }:  # Adam's decay is normalised, and grows rounding
            difference = difference.masked_fill(_without_direction(case, name, all_of), 0.0)
        moved = expected.double() - all_of.initial[name].double()
        least = 1e-3 if normalised or case.dtype == "fp32" else 1e-6
        scale = float(moved.norm()) + least * float(expected.norm()) + 1e-9
        if not float(difference.norm()) <= bound * scale:
            yield f"{when}: {name} is off by {float(difference.norm()) / scale:.3g} of its change"


def _without_direction(case: DrawnCase, name: str, truth: Truth) -> Tensor:
    """Elements whose gradient is rounding alone in some step: an update that does not shrink with it is, too."""
    found = torch.zeros_like(truth.initial[name], dtype=torch.bool)
    for gradients in truth.gradients:
        if name in gradients:
            largest = max(float(g.abs().max()) for g in gradients.values())
            found |= gradients[name].abs() < NOISE[case.dtype] * largest
    return found


def _narrow_faults(
    case: DrawnCase, both: Seen, first: Seen, second: Seen | None, truth: Truth, plain: Truth
) -> Iterator[str]:
    for number, loss in enumerate(both.losses):
        expected = truth.losses[number]
        if (
            math.isnan(expected) != math.isnan(loss)
            or both.skipped[number]
            and not (math.isnan(expected) or case.dtype == "fp16")
        ):
            yield f"step {number}: skipped is {both.skipped[number]}, loss {loss:.6g} for {expected:.6g}"
        slack = max(NARROW * abs(plain.losses[number] - expected), 0.02 * abs(expected))
        if not math.isnan(expected) and not abs(loss - expected) <= slack:
            yield f"step {number}: loss {loss:.6g} for {expected:.6g}, plain {plain.losses[number]:.6g}"
        if both.skipped[number]:  # the loss scale was too large
            continue
        norm, true_norm = both.norms[number], truth.norms[number]
        slack = max(NARROW * abs(plain.norms[number] - true_norm), 0.15 * abs(true_norm))
        if not math.isnan(expected) and not abs(norm - true_norm) <= slack:
            yield f"step {number}: norm {norm:.6g} for {true_norm:.6g}, plain {plain.norms[number]:.6g}"
    for what, _, ours, expected in _evaluations(case, first, second, truth):
        if math.isnan(expected) != math.isnan(ours) or abs(ours - expected) > 0.05 * abs(expected):
            yield f"{what}: loss {ours:.6g} for {expected:.6g}"
    pairs = [("after 3 steps", first.weights, truth.saved, plain.saved)]
    if second is not None:
        pairs.append(("after the resume", second.weights, truth.last, plain.last))
    tossed = _decided_by_rounding(case, truth, plain)
    share = 0.2 if case.config.get("optimizer", {}).get("moments") == "bf16" else 0.03  # as `_weight_faults`
    for when, ours_of, true_of, plain_of in pairs:
        moved = _distance(true_of, truth.initial)
        for without in (NONE, tossed):
            mine, theirs = _distance(ours_of, true_of, without), _distance(plain_of, true_of, without)
            if mine <= NARROW * theirs + share * moved + 1e-6:
                break
        else:
            yield f"{when}: weights are {mine:.3g} from the truth, plain ones {theirs:.3g}, moved {moved:.3g}"


def _decided_by_rounding(case: DrawnCase, truth: Truth, plain: Truth) -> dict[str, Tensor]:
    """Elements whose gradient in some step is less than what 16 bits do to gradients of its tensor in the plain run. An
    update that does not shrink with the gradient moves such an element a full step, by the sign of a rounding."""
    if kinds_of(case) == {"sgd"}:
        return {}
    found = {name: torch.zeros_like(value, dtype=torch.bool) for name, value in truth.initial.items()}
    for gradients, narrow in zip(truth.gradients, plain.gradients, strict=False):
        for name in gradients.keys() & narrow.keys():
            error = (narrow[name].double() - gradients[name]).abs().max()
            found[name] |= gradients[name].abs() <= NARROW * error
    return found


NONE: Mapping[str, Tensor] = {}


def _distance(
    ours: Mapping[str, Tensor], truth: Mapping[str, Tensor], without: Mapping[str, Tensor] = NONE
) -> float:
    """Over all tensors, `without` these elements of them."""
    apart = {name: ours[name].double() - value for name, value in truth.items()}
    kept = (d.masked_fill(without[n], 0.0) if n in without else d for n, d in apart.items())
    return math.sqrt(sum(float(difference.norm()) ** 2 for difference in kept))


assert STEPS == 3, "the words above name it"
