"""Executes one rank's list of actions, and nothing else: what comes next is the plan's business."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from colossal_lite.plan import Action, Kind

Handler = Callable[[Action], None]


def run(actions: Iterable[Action], handlers: Mapping[Kind, Handler]) -> None:
    """Hand each action, in order, to the handler of its kind. A kind without a handler is a programming error."""
    for action in actions:
        handlers[action.kind](action)
