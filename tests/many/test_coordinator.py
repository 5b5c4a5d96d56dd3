"""The coordinator beside workers that are not there: gangs meet, nothing waits forever, deaths lose no task."""

from __future__ import annotations

import json
import math
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

import colossal_lite as cl
from colossal_lite.many import coordinator, journal
from colossal_lite.many.build_timetable import QUANTA
from colossal_lite.many.coordinator import Coordinator
from colossal_lite.many.journal import stop_fault
from colossal_lite.many.policies import POLICIES
from colossal_lite.many.results import last_tenth, metric_of

LOST = "CommError: rank 1 has ended"


class Workers:
    """Queues of requests, answered in any order that real workers could. A gang's are answered when all are at it."""

    def __init__(self, devices: int, draw: random.Random, deaths: int) -> None:
        self.queues: list[list[dict[str, Any]]] = [[] for _ in range(devices)]
        self.open: list[dict[str, tuple[int, ...]]] = [{} for _ in range(devices)]
        """Of each worker: its open tasks, each with the name of its gang's meeting and its rank."""
        self.steps: dict[str, int] = defaultdict(int)
        self.saved: dict[str, int] = defaultdict(int)
        self.draw, self.deaths = draw, deaths
        self.ran: list[str] = []
        self.over: list[dict[str, Any]] = [{} for _ in range(devices)]
        """What a device has done since its last answer."""
        self.fell_over = 0

    def send(self, device: int, request: dict[str, Any]) -> None:
        if request["do"] == "kill":
            self.queues[device].insert(0, {"do": "die", "task": ""})
        else:
            self.queues[device].append(request)

    def answer(self, asks: Coordinator) -> bool:
        """Let one worker, or one gang, do its next request. False if none can."""
        able = [device for device in range(len(self.queues)) if self._gang(device)]
        if not able:
            return False
        device = self.draw.choice(able)
        gang = self._gang(device)
        heads = [self.queues[each].pop(0) for each in gang]
        if heads[0]["do"] == "die" or (self.deaths and self.draw.random() < 0.1):
            self.deaths -= heads[0]["do"] != "die"
            self._die(asks, gang, heads)
            return True
        held = {self.open[each].get(head["task"]) for each, head in zip(gang, heads, strict=True)}
        assert len(held) == 1, f"some of a gang have met and others have not: {held}"
        answers = [self._do(each, head, len(gang)) for each, head in zip(gang, heads, strict=True)]
        if over := self.over[device]:
            answers[0] |= {"over": over["told"]}
        self.over[device] = {}
        if "on" in heads[0] and answers[0]["said"] == "ran" and not answers[0]["done"]:
            self._go_on(device, heads[0])
        for each, answer in self.draw.sample(list(zip(gang, answers, strict=True)), len(gang)):
            asks.hear(each, answer)
        if self.over[device] and not self.queues[device] and self.deaths and self.draw.random() < 0.2:
            self.deaths, self.over[device] = self.deaths - 1, {}
            self.fell_over += 1
            self.open[device].clear()
            asks.hear(device, {"said": "died", "how": "signal 9"})
        return True

    def _go_on(self, device: int, request: dict[str, Any]) -> None:
        task = request["task"]
        step = self.draw.randint(self.steps[task], max(self.steps[task], request["on"]))
        if step > self.steps[task]:
            self.steps[task] = step
            told = dict(task=task, step=step, loss=1.0, run_s=0.1, ago_s=0.0)
            self.over[device] = dict(told=told)

    def _die(self, asks: Coordinator, gang: list[int], heads: list[dict[str, Any]]) -> None:
        victim = self.draw.choice(gang)
        self.open[victim].clear()
        self.over[victim] = {}
        told: list[tuple[int, dict[str, Any]]] = [(victim, {"said": "died", "how": "signal 9"})]
        for each, head in zip(gang, heads, strict=True):
            if each != victim:
                self.open[each].pop(head["task"], None)
                told.append((each, {"said": "failed", "task": head["task"], "cause": LOST}))
        for each, answer in self.draw.sample(told, len(told)):
            if each == victim:  # what was sent before this is lost with the worker
                self.queues[victim].clear()
            asks.hear(each, answer)

    def _gang(self, device: int) -> list[int]:
        """The devices that do the next request of this one, if all of them are at it."""
        if not self.queues[device]:
            return []
        head = self.queues[device][0]
        size = 1
        if head["do"] == "run":
            size = head["place"]["world_size"]
        elif head["do"] == "park" and head["task"] in self.open[device]:
            size = self.open[device][head["task"]][0]
        first = device // size * size
        gang = list(range(first, first + size))
        at = [queue[0] if queue else None for queue in (self.queues[each] for each in gang)]
        same = all(each and (each["do"], each["task"]) == (head["do"], head["task"]) for each in at)
        return gang if same else []

    def _do(self, device: int, request: dict[str, Any], size: int) -> dict[str, Any]:
        task, held = request["task"], self.open[device]
        if request["do"] != "run":
            found = held.pop(task, None)
            if found and request["do"] == "park":
                self.saved[task] = self.steps[task]
                return {"said": "parked", "task": task, "step": self.saved[task], "end_s": 0.01}
            return {"said": "dropped" if request["do"] == "drop" else "parked", "task": task, "end_s": 0.0}
        meeting = int(request["place"]["name"].rpartition("/")[2])
        if task not in held:
            held[task] = (size, meeting)
            if request["place"]["rank"] == 0:
                self.steps[task] = self.saved[task]
        others = {other for other, (theirs, _) in held.items() if theirs not in (1, size)}
        assert size == 1 or not others, f"{task} and {others} are gangs of two sizes in one worker"
        holders = {d for d, found in enumerate(self.open) if task in found}
        assert holders <= set(range(device // size * size, device // size * size + size)), "open in one block"
        before = self.steps[task] if request["place"]["rank"] == 0 else request["to"] - 1
        to = max(before, request["to"])
        if "on" in request and self.queues[device] and before < to:  # it has been asked again
            to = self.draw.randint(before + 1, to)
        self.steps[task] = to
        self.ran.append(task)
        if done := to == 6:
            self.saved[task] = 6
            del held[task]
        return {
            "said": "ran", "task": task, "step": to, "before": before, "loss": 1.0, "held_out": None,
            "done": done, "open_s": 0.0, "run_s": self.draw.choice([0.2, 0.5]), "end_s": 0.0,
        }  # fmt: skip


@pytest.mark.parametrize("policy", POLICIES)
def test_every_task_ends_whatever_the_policy_the_gangs_and_the_deaths(
    policy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fell_over = 0
    for seed in range(25):
        draw = random.Random(seed)
        devices = draw.choice([1, 2, 4, 6])
        sizes = [size for size in range(1, devices + 1) if devices % size == 0]
        tasks = [
            cl.Task(
                f"t{n}", lambda: None, data=[0], steps=6, global_batch=1, devices=draw.choice([1, *sizes])
            )  # type: ignore[arg-type,return-value]
            for n in range(draw.randint(1, 7))
        ]
        workers = Workers(devices, draw, deaths=draw.choice([0, 2]))
        monkeypatch.setattr(coordinator, "saved_step", lambda _, task, saved=workers.saved: saved[task])
        folder = tmp_path / f"{policy}{seed}"
        folder.mkdir()
        asks = Coordinator(
            tasks, folder, policy, None, None, devices, seed, 0, workers.send, quantum=draw.choice(QUANTA)
        )
        for state in asks.states.values():
            state.has_stages = state.task.devices == 1 and draw.random() < 0.6
        for _ in range(3000):
            if asks.is_over:
                break
            asks.assign()
            if workers.answer(asks) or asks.is_over:
                continue
            with monkeypatch.context() as later:  # a gang waits for a worker that has died before it came
                later.setattr(coordinator, "HANGS_S", -1.0)
                asks.end_hung()
            assert workers.answer(asks), f"{policy} {seed}: all wait"
        asks.close()
        states = {name: (state.status, state.cause, state.step) for name, state in asks.states.items()}
        assert set(states.values()) == {("done", "", 6)}, (policy, seed, states)
        fell_over += workers.fell_over
    assert fell_over, "a worker has died as it went on"


def test_the_worst_of_a_gang_s_answers_is_its_own(tmp_path: Path) -> None:
    """The cause of a failure is that of the worker that failed, not of those that lost it; nobody dies of it."""
    sent: list[tuple[int, str]] = []
    tasks = [cl.Task("a", lambda: None, data=[0], steps=6, global_batch=1, devices=2)]  # type: ignore[arg-type,return-value]
    asks = Coordinator(
        tasks, tmp_path, "fifo", None, None, 2, 0, 0, lambda device, request: sent.append((device, request["do"]))
    )  # fmt: skip
    asks.assign()
    assert sent == [(0, "run"), (1, "run")]
    asks.hear(0, {"said": "failed", "task": "a", "cause": LOST})
    assert asks.states["a"].status == "open", "the other has not answered"
    asks.hear(1, {"said": "failed", "task": "a", "cause": "ValueError: torn"})
    assert (asks.states["a"].status, asks.states["a"].cause) == ("failed", "ValueError: torn")
    assert sent[2:] == [(0, "drop"), (1, "drop")]
    asks.close()


def test_a_worker_that_does_not_notice_that_its_gang_is_lost_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[int, str]] = []
    tasks = [cl.Task("a", lambda: None, data=[0], steps=6, global_batch=1, devices=2)]  # type: ignore[arg-type,return-value]
    asks = Coordinator(
        tasks, tmp_path, "fifo", None, None, 2, 0, 0, lambda device, request: sent.append((device, request["do"]))
    )  # fmt: skip
    asks.assign()
    asks.end_hung()
    asks.hear(1, {"said": "died", "how": "signal 9"})
    asks.end_hung()
    assert (0, "kill") not in sent
    monkeypatch.setattr(coordinator, "HANGS_S", -1.0)
    asks.end_hung()
    assert sent[-1] == (0, "kill")
    asks.hear(0, {"said": "died", "how": "signal 9"})
    asks.hear(1, {"said": "dropped", "task": "a"})
    asks.hear(0, {"said": "dropped", "task": "a"})
    sent.clear()
    asks.assign()
    assert sent == [(0, "run"), (1, "run")] and asks.states["a"].deaths == 1
    asks.close()


@pytest.mark.parametrize(("fault", "ends"), [("died", "open"), ("failed", "failed")])
def test_a_worker_that_is_ended_as_it_answers_does_not_hide_what_came_first(
    fault: str, ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A death sends the task back to its checkpoint; an error of its own is its end."""
    tasks = [cl.Task("a", lambda: None, data=[0], steps=6, global_batch=1, devices=2)]  # type: ignore[arg-type,return-value]
    asks = Coordinator(tasks, tmp_path, "fifo", None, None, 2, 0, 0, lambda device, request: None)
    asks.assign()
    asks.end_hung()
    first = {"said": "died", "how": "signal 9"}
    asks.hear(1, first if fault == "died" else {"said": "failed", "task": "a", "cause": "ValueError: torn"})
    monkeypatch.setattr(coordinator, "HANGS_S", -1.0)
    asks.end_hung()  # sends the end of worker 0
    late = (
        {"said": "failed", "task": "a", "cause": LOST}
        if fault == "died"
        else {"said": "died", "how": "signal 9"}
    )
    asks.hear(0, late)
    state = asks.states["a"]
    assert state.status == ends and state.cause == ("" if ends == "open" else "ValueError: torn")
    asks.close()


def test_where_a_device_is_full_its_other_tasks_are_parked_and_alone_it_is_the_end(tmp_path: Path) -> None:
    sent: list[tuple[int, str, str]] = []
    tasks = [cl.Task(name, lambda: None, data=[0], steps=6, global_batch=1) for name in "ab"]  # type: ignore[arg-type,return-value]

    def send(device: int, request: dict[str, Any]) -> None:
        sent.append((device, request["do"], request["task"]))

    asks = Coordinator(tasks, tmp_path, "lrtf", None, None, 1, 0, 0, send)
    full = {"said": "full", "task": "b", "cause": "OutOfMemoryError: no room"}
    ran = {
        "said": "ran", "task": "a", "step": 3, "before": 0, "loss": 1.0, "held_out": None, "done": False, "open_s": 0.0,
        "run_s": 0.1, "end_s": 0.0,
    }  # fmt: skip
    asks.assign()
    asks.hear(0, ran)
    asks.assign()
    assert [each[1:] for each in sent] == [("run", "a"), ("run", "b")]
    asks.states["b"].has_stages = True
    asks.hear(0, full)
    assert [each[1:] for each in sent[2:]] == [("drop", "b"), ("park", "a")]
    assert not asks.states["b"].has_stages, "it takes no turns beside another again"
    asks.hear(0, {"said": "dropped", "task": "b"})
    asks.hear(0, {"said": "parked", "task": "a", "step": 3, "end_s": 0.0})
    assert [each[1:] for each in sent[4:]] == [("run", "b")]
    asks.hear(0, full)
    assert asks.states["b"].status == "failed" and asks.states["b"].cause == full["cause"]
    asks.close()


@pytest.mark.parametrize(
    ("quantum", "staged", "devices", "open_there", "asked"),
    [
        ("stage", "abc", 1, "abc", "ba"),
        ("stage", "bc", 1, "abc", "bc"),
        ("stage", "abc", 1, "b", "ba"),
        ("stage", "ac", 1, "abc", "b"),
        ("stage", "b", 1, "abc", "b"),
        ("stage", "abc", 2, "ab", "b"),
        ("step", "abc", 1, "abc", "b"),
    ],
)
def test_by_stages_two_tasks_run_abreast_unless_one_is_critical(
    quantum: Any, staged: str, devices: int, open_there: str, asked: str, tmp_path: Path
) -> None:
    """Task b is the longest: with two devices the end waits for it. Its steps take 0.05 s, those of others 0.1 s."""
    sent: list[dict[str, Any]] = []
    tasks = [
        cl.Task(name, lambda: None, data=[0], steps=400 if name == "b" else 90, global_batch=1)  # type: ignore[arg-type,return-value]
        for name in "abc"
    ]

    def send(device: int, request: dict[str, Any]) -> None:
        if device == 0 and request["do"] == "run":
            sent.append(request)

    asks = Coordinator(tasks, tmp_path, "link", None, None, devices, 0, 0, send, quantum=quantum)
    for name, state in asks.states.items():
        state.at = (0,) if name in open_there else (1,) if devices == 2 else ()
        state.has_stages, state.step_s = name in staged, 0.05 if name == "b" else 0.1
    asks.assign()
    assert "".join(request["task"] for request in sent) == asked
    assert sent[0].get("abreast", 0) == len(asked) - 1
    to = {request["task"]: request["to"] for request in sent}
    assert to == ({"b": 5, asked[1]: 2} if len(asked) > 1 else {"b": 10}), "about as long"
    asks.close()


def of_one(tmp_path: Path, steps: int, **more: Any) -> tuple[Coordinator, list[dict[str, Any]]]:
    """A device with one task whose steps take 0.1 s, and what it is asked."""
    sent: list[dict[str, Any]] = []
    task = cl.Task("a", lambda: None, data=[0], steps=steps, global_batch=1)  # type: ignore[arg-type,return-value]
    settings = dict(policy="fifo", stop=None, on_report=None) | more
    asks = Coordinator(
        [task], tmp_path, **settings, devices=1, seed=0, port=0, send=lambda _, request: sent.append(request)
    )  # type: ignore[arg-type]
    asks.assign()
    return asks, sent


def ran(before: int, step: int, **more: Any) -> dict[str, Any]:
    return dict(
        said="ran", task="a", step=step, before=before, loss=1.0, held_out=None, done=False, open_s=0.0,
        run_s=0.1 * (step - before), end_s=0.0, **more,
    )  # fmt: skip


def test_a_worker_may_go_on_as_long_again_but_to_no_step_where_something_is_decided(tmp_path: Path) -> None:
    asks, sent = of_one(tmp_path, 100)
    assert (sent[0]["to"], sent[0]["on"]) == (1, 1), "nothing is known of its steps"
    asks.hear(0, ran(0, 1))
    asks.assign()
    assert (sent[1]["to"], sent[1]["on"]) == (6, 11)
    over = dict(task="a", step=9, loss=0.5, run_s=0.3, ago_s=0.0)
    asks.hear(0, ran(1, 6))
    asks.assign()
    asks.hear(0, ran(9, 11, over=over))
    assert asks.states["a"].busy_s == pytest.approx(0.1 + 0.5 + 0.3 + 0.2) and asks.states["a"].step == 11
    asks.states["a"].step = 97
    asks.assign()
    assert (sent[3]["to"], sent[3]["on"]) == (98, 99), (
        "the last step is asked for, and quanta are short by now"
    )
    asks.close()


@pytest.mark.parametrize("why", ["a rung", "reports", "long steps"])
def test_a_worker_does_not_go_on_where_it_must_not(why: str, tmp_path: Path) -> None:
    more: dict[str, Any] = dict(on_report=lambda *_: "go") if why == "reports" else {}
    more |= dict(stop=cl.Halving(rungs=(6,), keep=1.0)) if why == "a rung" else {}
    asks, sent = of_one(tmp_path, 1000, **more)
    asks.hear(0, ran(0, 1) | (dict(run_s=0.6) if why == "long steps" else {}))
    asks.assign()
    assert sent[1]["on"] == sent[1]["to"] == (2 if why == "long steps" else 6)
    asks.close()


def test_a_task_whose_process_dies_as_it_goes_on_fails_too(tmp_path: Path) -> None:
    """Its step before is made each time, and it is not the one that kills."""
    asks, sent = of_one(tmp_path, 100)
    asks.hear(0, ran(0, 1))
    asks.assign()
    asks.hear(0, ran(1, 6))
    asks.hear(0, {"said": "died", "how": "signal 9"})
    for deaths in (1, 2):
        asks.assign()
        assert (sent[-1]["to"], sent[-1]["on"], asks.states["a"].deaths) == (5, 5, deaths)
        asks.hear(0, ran(0, 5))
        asks.assign()
        assert sent[-1]["to"] == 10 and asks.states["a"].deaths == deaths, "it was past this"
        asks.hear(0, {"said": "died", "how": "signal 9"})
        asks.hear(0, {"said": "dropped", "task": "a"})
    assert asks.states["a"].status == "failed" and "died 3 times" in asks.states["a"].cause
    asks.close()


def test_a_stopped_task_that_a_kill_left_without_its_last_step_trains_to_it_again(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        dict(decision="rung", rung=6, metrics=dict(a=2.0, b=1.0), kept=["b"]),
        dict(
            decision="stopped", task="a", step=6, cause="not among the best 1 of 2 at step 6", held_out=None
        ),
    ]
    for told in (rows[:1], rows):
        (tmp_path / "journal.jsonl").write_text("".join(json.dumps(row) + "\n" for row in told))
        asks, sent = of_one(tmp_path, 100, stop=cl.Halving(rungs=(3, 6, 9), keep=0.5))
        asks.hear(0, ran(0, 1))
        asks.assign()
        assert sent[1]["to"] == 6, "no rung holds it up"
        asks.hear(0, ran(1, 6))
        assert asks.rows()[0] == dict(
            name="a", status="stopped", cause="not among the best 1 of 2 at step 6", held_out=None, step=6
        )
        asks.close()


def test_a_done_task_whose_last_checkpoint_is_gone_trains_again(tmp_path: Path) -> None:
    row = dict(decision="done", task="a", step=100, cause="", held_out=1.0)
    (tmp_path / "journal.jsonl").write_text(json.dumps(row) + "\n")
    asks, sent = of_one(tmp_path, 100)
    assert asks.rows()[0] == dict(name="a", status="open", cause="", held_out=None, step=0)
    assert sent[0]["do"] == "run"
    asks.close()


def test_a_step_without_a_label_is_left_out_of_the_loss_that_tasks_are_compared_by() -> None:
    assert last_tenth([9.0] * 18 + [2.0, math.nan]) == 2.0
    assert math.isnan(last_tenth([9.0] * 9 + [math.nan]))


KEPT: dict[str, tuple[float, dict[str, float], list[str]]] = {
    "the least is best": (1 / 3, dict(a=3.0, b=1.0, c=2.0), ["b"]),
    "the best comes first": (1.0, dict(a=3.0, b=1.0, c=2.0), ["b", "c", "a"]),
    "a part of a task is a task": (0.5, dict(a=3.0, b=1.0, c=2.0), ["b", "c"]),
    "rounding adds no task": (0.07, {f"t{n}": float(n) for n in range(100)}, [f"t{n}" for n in range(7)]),
    "of equals the first named": (0.5, dict(b=1.0, a=1.0), ["b"]),
    "no number is the worst": (0.5, dict(a=math.nan, b=math.inf, c=math.nan, d=9.0), ["d", "b"]),
}


@pytest.mark.parametrize("rule", KEPT)
def test_the_tasks_that_go_on_from_a_rung_are_the_best_by_every_rule(rule: str) -> None:
    keep, metrics, best = KEPT[rule]
    assert list(cl.Halving(rungs=(1,), keep=keep).kept(metrics)) == best


def test_a_rung_compares_losses_up_to_its_step_and_the_last_evaluation_there(tmp_path: Path) -> None:
    folder = tmp_path / "tasks" / "a"
    folder.mkdir(parents=True)
    rows = [dict(step=step, loss=float(step)) for step in range(1, 41)]
    evaluated = [dict(step=step, loss=loss) for step, loss in ((10, 5.0), (20, 4.0), (20, 3.0), (30, None))]
    for name, some in (("metrics", rows), ("evaluation", evaluated)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    assert metric_of(tmp_path, "a", 20, "loss") == 19.5, "the mean of steps 19 and 20"
    assert metric_of(tmp_path, "a", 41, "loss") is None and metric_of(tmp_path, "a", 15, "held_out") is None
    assert metric_of(tmp_path, "a", 20, "held_out") == 3.0
    assert math.isnan(metric_of(tmp_path, "a", 30, "held_out") or 0.0)


@pytest.mark.parametrize("loss", [0.5, 2.0])
def test_a_task_that_failed_before_a_rung_is_compared_there_when_it_is_tried_again(
    loss: float, tmp_path: Path
) -> None:
    """With all that were there; it alone may fall."""
    row = dict(decision="rung", rung=6, metrics=dict(b=1.0), kept=["b"], metric="loss", keep=0.5)
    (tmp_path / "journal.jsonl").write_text(json.dumps(row) + "\n")
    asks, sent = of_one(tmp_path, 100, stop=cl.Halving(rungs=(6, 9), keep=0.5))
    asks.hear(0, ran(0, 1))
    asks.assign()
    assert sent[1]["to"] == sent[1]["on"] == 6, "the rung holds it up"
    (tmp_path / "tasks" / "a").mkdir(parents=True)
    rows = (json.dumps(dict(step=step, loss=loss)) + "\n" for step in range(1, 7))
    (tmp_path / "tasks" / "a" / "metrics.jsonl").write_text("".join(rows))
    asks.hear(0, ran(1, 6))
    told = asks.rows()[0]
    asks.assign()
    asks.close()
    if loss < 1.0:
        assert told["status"] == "open" and sent[2]["to"] == 9
        return
    assert (told["status"], told["cause"]) == ("stopped", "not among the best 1 of 2 at step 6")
    again = Coordinator(
        asks.tasks, tmp_path, "fifo", asks.stop, None, devices=1, seed=0, port=0, send=lambda *_: None
    )
    assert again.states["a"].cause == told["cause"] and again.states["a"].ends_at == 6, "as before a kill"
    again.close()


RULED = dict(decision="rung", rung=4, metrics=dict(a=1.0), kept=["a"], metric="loss", keep=0.5)


@pytest.mark.parametrize(
    "stop, old, told",
    [
        (cl.Halving(rungs=(4, 8), keep=0.5), False, ""),
        (cl.Halving(rungs=(4,), keep=0.5), False, ""),
        (cl.Halving(rungs=(4,), keep=0.25), True, ""),
        (None, True, "legal: a cl.Halving with rungs that begin with [4]"),
        (None, False, "stop=None: the rungs [4] are decided there; legal: a cl.Halving with metric='loss', keep=0.5"),
        (cl.Halving(rungs=(4, 8), keep=0.25), False, "keep=0.25"),
        (cl.Halving(rungs=(4, 8), keep=0.5, metric="held_out"), False, "metric='held_out'"),
        (cl.Halving(rungs=(8,), keep=0.5), False, "rungs that begin with [4]"),
        (cl.Halving(rungs=(3, 4), keep=0.5), False, "rungs that begin with [4]"),
        (cl.Halving(rungs=(4, 5), keep=0.5), False, "past step 5 there; legal: the rungs [4], or later ones from 6 on"),
        (cl.Halving(rungs=(4, 6), keep=0.5), False, ""),
    ],
)  # fmt: skip
def test_a_rule_that_is_not_that_of_the_decided_rungs_is_refused(
    stop: cl.Halving | None, old: bool, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "saved_step", lambda *_: 6)
    kept = {name: value for name, value in RULED.items() if not old or name not in ("metric", "keep")}
    (tmp_path / "journal.jsonl").write_text(json.dumps(kept) + "\n")
    task = cl.Task("a", lambda: None, data=[0], steps=12, global_batch=1)  # type: ignore[arg-type,return-value]
    found = stop_fault(tmp_path, [task], stop)
    assert told in found if told else not found


def test_a_rung_that_a_task_has_passed_is_refused_where_no_rule_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "saved_step", lambda *_: 6)
    tasks = [cl.Task("a", lambda: None, data=[0], steps=n, global_batch=1) for n in (12, 6)]  # type: ignore[arg-type,return-value]
    for steps, legal in zip(tasks, ("stop=None, or later ones from 6 on", "stop=None"), strict=True):
        assert stop_fault(tmp_path, [steps], cl.Halving(rungs=(5,))).endswith(f"legal: {legal}")
        assert (
            stop_fault(tmp_path, [steps], None) == stop_fault(tmp_path, [steps], cl.Halving(rungs=(6,))) == ""
        )
