"""Sends and receives of every mode end where a backend runs them in one queue for each group, as NCCL does.

Each rank's calls are recorded on a real run and replayed: an entry of the queue is one call, or one batch of calls, and
a message passes only when the entries at the head of both queues hold it (rendezvous).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

import colossal_lite as cl
from colossal_lite.distributed.communicator import TorchTransport
from colossal_lite.pipeline.runtime import Runtime
from colossal_lite.schedule.pipeline_schedules import SCHEDULES
from tests.shared.parity import Case
from tests.shared.pool import RankEnv, run_world

Message = tuple[str, int]  # "send" or "receive", and the rank at the other end
Queue = list[list[Message]]
"""Entries of one rank in one group, in the order of its calls."""


def stuck(queues: dict[int, Queue]) -> dict[int, list[Message]]:
    """The heads of the queues where nothing can go on; empty if all messages pass."""
    left = {rank: [Counter(entry) for entry in queue] for rank, queue in queues.items()}
    is_moving = True
    while is_moving:
        is_moving = False
        for rank, queue in left.items():
            for kind, peer in list(queue[0]) if queue else ():
                other = left[peer][0] if left.get(peer) else Counter[Message]()
                while kind == "send" and queue[0]["send", peer] > 0 and other["receive", rank] > 0:
                    queue[0]["send", peer] -= 1
                    other["receive", rank] -= 1
                    is_moving = True
        for queue in left.values():
            while queue and not any(queue[0].values()):
                queue.pop(0)
                is_moving = True
    return {rank: sorted((+queue[0]).elements()) for rank, queue in left.items() if queue}


def calls_of(env: RankEnv, case: Case) -> dict[tuple[int, ...], Queue]:
    """The queue of this rank in each group, over a step, an evaluation and a step."""
    found: dict[tuple[int, ...], Queue] = {}
    send, receive, batch = TorchTransport.send, TorchTransport.receive, dist.batch_isend_irecv

    def sent(self: TorchTransport, tensor: Any, to: int, tag: str) -> Any:
        found.setdefault(self._ranks, []).append([("send", self._ranks[to])])
        return send(self, tensor, to, tag)

    def received(self: TorchTransport, into: Any, source: int, tag: str) -> Any:
        found.setdefault(self._ranks, []).append([("receive", self._ranks[source])])
        return receive(self, into, source, tag)

    def batched(ops: list[dist.P2POp]) -> Any:
        ranks = tuple(dist.get_process_group_ranks(ops[0].group))
        found.setdefault(ranks, []).append(
            [("send" if op.op is dist.isend else "receive", op.peer) for op in ops]
        )
        return batch(ops)

    with pytest.MonkeyPatch.context() as patch, env.launch(case.full_config) as context:
        engine = cl.initialize(case.model, context=context)
        patch.setattr(Runtime, "posts_ahead", False)  # as on CUDA
        patch.setattr(TorchTransport, "send", sent)
        patch.setattr(TorchTransport, "receive", received)
        patch.setattr(dist, "batch_isend_irecv", batched)
        cut = context.local_batch(case.global_batch)
        inputs, labels = (part[cut] for part in case.batch(0))
        engine.train_step((inputs, labels))
        engine.eval_step((inputs, labels))
        engine.train_step((inputs, labels))
        engine.close()
    return found


ON_GLOO = Case(layers=8, tokens=16, global_batch=4, config=dict(backend="gloo"), sizes=dict(sequence=16))
RINGS = {
    f"{mode} on {ranks}": replace(
        ON_GLOO, world_size=ranks, sequence=ranks, sequence_mode=mode, causal=mode != "ring_full"
    )
    for mode in ("ring", "ring_full")
    for ranks in (2, 4)
} | {"usp on 4": replace(ON_GLOO, world_size=4, sequence=4, sequence_mode="usp", ulysses=2)}
PIPELINES = {
    f"{name} on {ranks}": replace(
        ON_GLOO,
        world_size=ranks,
        pipeline=dict(
            size=ranks,
            schedule=name,
            micro_batches=4,
            stages_per_rank=max(2 if ranks == 2 else 1, rule.stages_per_rank[0])
            if rule.stages_per_rank[1] != 1
            else 1,
        ),
    )
    for name, rule in SCHEDULES.items()
    for ranks in (2, 4)
}
MORE = {
    "pipeline beside a ring": replace(
        ON_GLOO, world_size=4, sequence=2, sequence_mode="ring", pipeline=dict(size=2, micro_batches=2)
    ),
    "pipeline beside tensor": replace(
        ON_GLOO, world_size=4, tensor=2, pipeline=dict(size=2, micro_batches=2)
    ),
    "3d": replace(ON_GLOO, world_size=8, tensor=8, mode="3d", family="gpt2"),
}
CASES = RINGS | PIPELINES | MORE


@pytest.mark.parametrize("name", CASES)
def test_every_message_passes_where_a_group_has_one_queue(name: str) -> None:
    case = CASES[name]
    rows = run_world(calls_of, case.world_size, case)
    groups = {group for row in rows for group in row}
    assert groups or case.mode == "3d", "nothing was sent"
    for group in groups:
        assert not (heads := stuck({rank: rows[rank].get(group, []) for rank in group})), f"{group}: {heads}"


@pytest.mark.parametrize(
    ("queues", "ends"),
    [
        ({0: [[("send", 1)]], 1: [[("receive", 0)]]}, True),
        # A ring: each sends first, then receives; as one batch it ends.
        ({0: [[("send", 1)], [("receive", 1)]], 1: [[("send", 0)], [("receive", 0)]]}, False),
        ({0: [[("send", 1), ("receive", 1)]], 1: [[("send", 0), ("receive", 0)]]}, True),
        ({0: [[("send", 1)], [("receive", 1)]], 1: [[("receive", 0)], [("send", 0)]]}, True),
        ({0: [[("receive", 1)], [("send", 1)]], 1: [[("receive", 0)], [("send", 0)]]}, False),
        ({0: [[("send", 1)], [("send", 1)]], 1: [[("receive", 0)]]}, False),
    ],
)
def test_the_replay_tells_what_stops(queues: dict[int, Queue], ends: bool) -> None:
    assert (not stuck(queues)) == ends
