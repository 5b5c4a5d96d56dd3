"""Finds what the loss of a user's criterion reads beside the logits.

Note: nodes that autograd makes are numbered as they are made.  Those of the criterion have higher numbers than the node
of the logits.  An edge from one of them to a node before that reads something that the forward has left.  An edge to a
leaf reads a parameter, or a tensor that the engine does not train.
Cost: a walk over the nodes of the criterion.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Reads:
    """What a loss reads beside the logits. `parameters`: names of the model's. `foreign`: shapes of other leaves that
    require a gradient. `left`: what made a tensor that the forward has left."""

    parameters: tuple[str, ...] = ()
    foreign: tuple[tuple[int, ...], ...] = ()
    left: tuple[str, ...] = ()


def reads_of(loss: Tensor, logits: Any, names: Mapping[int, str]) -> Reads:
    """`logits`: the node of the logits that the criterion got; `names`: of the model's parameters, by `id`."""
    parameters, foreign, left = list[str](), list[tuple[int, ...]](), list[str]()
    made = logits._sequence_nr()
    for node in (each for each in nodes_between(loss.grad_fn, logits) if _is_end(each, made)):
        leaf = getattr(node, "variable", None)
        if leaf is None:
            left.append(node.name())
        elif (name := names.get(id(leaf))) is not None:
            parameters.append(name)
        else:
            foreign.append(tuple(leaf.shape))
    return Reads(tuple(parameters), tuple(foreign), tuple(left))


def nodes_between(last: Any, logits: Any) -> Iterator[Any]:
    """The nodes of the criterion, from its `last` to the `logits`, and those at which its graph ends."""
    nodes, seen, made = [last], {logits, None}, logits._sequence_nr()
    while nodes:
        node = nodes.pop()
        if node not in seen:
            seen.add(node)
            yield node
            nodes += [] if _is_end(node, made) else [before for before, _ in node.next_functions]


def _is_end(node: Any, made: int) -> bool:
    """Whether it is a leaf, or was made before the number of the logits."""
    return hasattr(node, "variable") or node._sequence_nr() < made
