"""Judges a Lion case a second time, with the signs of the ranks where rounding decides a sign.

Note. Lion moves each weight by the learning rate times a sign. Where the terms of its direction cancel to within their
rounding, two right runs take other signs and part from there. So the plain loop takes over such weights, and no others,
from the ranks after each step. All later losses, gradients and weights are then compared as under any other optimizer.
A weight that is taken over may differ by the two signs alone: twice the learning rate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.shared.drawn_cases import DrawnCase
from tests.shared.drawn_runs import PlainLoop, Seen, Truth, plain_run
from tests.shared.drawn_verdicts import NARROW, NOISE, ROUNDING, wrong


def wrong_beside_signs(
    case: DrawnCase, first: Seen, second: Seen | None, states: Sequence[Mapping[str, Tensor]]
) -> str:
    """What differs first from a plain loop that takes over the signs; "" if nothing does. `states`: after each step."""
    skipped = first.skipped + (second.skipped if second else [False])
    signs = LionSigns(case, [*states, *([second.weights] if second else [])], skipped)
    truth = signs.run("fp64")
    if signs.fault:
        return signs.fault
    return wrong(case, first, second, truth, signs.run(case.dtype) if case.dtype in ROUNDING else None)


class LionSigns:
    """Finds the weights whose sign rounding decides, step by step, and sets them to those of the ranks."""

    def __init__(
        self, case: DrawnCase, states: Sequence[Mapping[str, Tensor]], skipped: Sequence[bool]
    ) -> None:
        self.case, self.states, self.skipped = case, states, skipped
        self.fault = ""
        self.tossed: list[dict[str, Tensor]] = []
        """Of each step that the float64 loop has made: which elements rounding has decided until then."""
        self._rows = lion_rows(case)
        self._averages: dict[tuple[str, tuple[float, float]], tuple[Tensor, float]] = {}
        """Of each parameter and pair of betas: the average, and how far rounding may have moved it."""
        self._before: dict[str, Tensor] = {}
        self._rate = 0.0  # the largest so far

    def run(self, dtype: str) -> Truth:
        """The plain loop in `dtype`; the first has to be the one in fp64."""
        done = plain_run(self.case, dtype, self.skipped, self._after_step)
        return replace(done, follows_signs=True)

    def _after_step(self, loop: PlainLoop, number: int, norm: float, gradients: Mapping[str, Tensor]) -> None:
        if number >= len(self.states):
            return
        if loop.dtype == "fp64":
            moved = bool(gradients) and not (self.skipped[number] and self.case.dtype == "fp16")
            self.tossed.append(
                self._decided(loop, number, norm, gradients) if moved else dict(self._latest())
            )
            self.check(loop, number)
        loop.take(self.states[number], self.tossed[number])
        self._before = loop.weights()

    def _latest(self) -> Mapping[str, Tensor]:
        return self.tossed[-1] if self.tossed else {}

    def _decided(
        self, loop: PlainLoop, number: int, norm: float, gradients: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        errors = self._errors(loop, number, gradients)
        limit = self.case.config.get("clip_grad_norm")
        clip = 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))
        found = {name: torch.zeros_like(g, dtype=torch.bool) for name, g in gradients.items()}
        found |= self._latest()
        for name, gradient in gradients.items():
            for b1, b2 in self._rows:
                key = name, (b1, b2)
                average, slack = self._averages.get(key, (torch.zeros_like(gradient), 0.0))
                direction = b1 * average + (1 - b1) * clip * gradient
                found[name] = found[name] | (direction.abs() <= b1 * slack + (1 - b1) * clip * errors[name])
                self._averages[key] = (
                    b2 * average + (1 - b2) * clip * gradient,
                    b2 * slack + (1 - b2) * clip * errors[name],
                )
        return found

    def _errors(self, loop: PlainLoop, number: int, gradients: Mapping[str, Tensor]) -> dict[str, float]:
        """How far rounding may move an element of each gradient. In 16 bits: what it does to the plain loop at these
        weights, times NARROW, relative to the tensor's largest element."""
        most = {name: float(g.abs().max()) for name, g in gradients.items()}
        largest = max(most.values())
        if self.case.dtype not in ROUNDING:
            return dict.fromkeys(gradients, NOISE[self.case.dtype] * largest)
        before = self._before or loop.initial
        if self.case.habits["load_before"] == number:
            before = {name: value / 2 for name, value in before.items()}
        narrow = PlainLoop(self.case, self.case.dtype, before).step(number, skip=True)[2]
        off = {name: float((narrow[name].double() - g).abs().max()) for name, g in gradients.items()}
        rounding = ROUNDING[self.case.dtype]
        shares = [off[name] / most[name] for name in gradients if most[name] > rounding * largest]
        share = max(rounding, NARROW * max(shares))
        return {name: max(share * most[name], NARROW * off[name]) for name in gradients}

    def check(self, loop: PlainLoop, number: int) -> None:
        """A weight that is taken over differs by the two signs alone. One that is taken over for the first time has
        what rounding moved in earlier steps as well, by their rates, which may have been larger."""
        rate = max(group["lr"] for each in loop.optimizers for group in each.param_groups)
        self._rate = max(self._rate, rate)
        peak = 1e-3 * max(max(peaks) for peaks in loop.peaks)
        before = self.tossed[number - 1] if number else {}
        for name, tossed in self.tossed[number].items():
            own, mine = self.states[number][name].double()[tossed], loop.masters[name].double()[tossed]
            is_new = ~before[name][tossed] if name in before else torch.ones_like(own, dtype=torch.bool)
            most = 2.001 * torch.where(is_new, self._rate, rate) + peak
            slack = 2 * ROUNDING.get(self.case.dtype, 1e-6) * own.abs()
            if bool(((own - mine).abs() > most + slack).any()):
                self.fault = self.fault or f"step {number}: {name} moved by more than two signs of Lion"


def lion_rows(case: DrawnCase) -> set[tuple[float, float]]:
    """The betas of each group that Lion updates."""
    given: Mapping[str, Any] = case.config.get("optimizer", {})
    rows = [given, *({**given, **group} for group in given.get("groups", ()))]
    return {tuple(row.get("betas", (0.9, 0.99))) for row in rows if row.get("type") == "lion"}
