"""Trains drawn cases on a world of ranks and compares each with the plain loop: `python -m tests.draws --world 2`.

Note. A case is a model, batches, habits, a configuration and another mesh to resume on, drawn from the whole schema
(tests/shared/drawn_cases.py).  Its outcome is exact, refused (before anything is trained, in the same words on all
ranks), WRONG, CRASH, HANG or UNLIKE (ranks tell different things).  A line for each of the last four says how to run it
again; a tally comes last.  The exit code is 1 if there was one.

    python -m tests.draws --world 2 --seconds 60              # seed: a hash of the commit
    python -m tests.draws --world 4 --draws 500 --seed 7      # draws 0 to 499
    python -m tests.draws --world 4 --draws 500 --seed 7 --from 500
    python -m tests.draws --case wrong.case                   # one case again, with every detail
    python -m tests.draws --faults                            # draw for each planted fault until it shows
    python -m tests.draws --faults --from 44                  # go on with fault 44
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.shared.drawn_cases import DrawnCase, case_of, draw
from tests.shared.drawn_runs import (
    Seen,
    at_own_weights,
    at_weights_of_each_step,
    first_part,
    plain_run,
    second_part,
)
from tests.shared.drawn_signs import lion_rows, wrong_beside_signs
from tests.shared.drawn_verdicts import (
    BAD,
    Verdict,
    different_bits,
    follows_rounding,
    judge_end,
    masked,
    unlike,
    wrong,
)
from tests.shared.pool import WorldError, pool, run_world

LIMIT_S = 60.0
"""For each of a case's two worlds; a collective waits `timeout_s` of the case, which is shorter."""
FAULT_S = 60.0
"""Of draws for each planted fault."""
FAULT_WORLDS = (2, 1, 2, 1, 4, 1)
"""In turn: about the same time on one rank, on two and on four."""
NARROW = ("bf16", "fp16")
ROOT = Path(__file__).parents[1]


def outcome_of(case: DrawnCase, fault: str | None = None) -> Verdict:
    """Run a case and judge it. `fault`: a name of tests.house.drawn_faults, planted on every rank."""
    with tempfile.TemporaryDirectory(prefix="drawn-") as folder:
        first = _part(first_part, case.world, case, folder, fault)
        if isinstance(first, Verdict):
            return first
        resumes = case.resume_world > 0
        second = _part(second_part, case.resume_world, case, folder, fault) if resumes else None
    ends = second[0] if isinstance(second, list) else None
    why = _wrong(case, first[0], ends, fault) or _unlike_whole_masters(case, first[0], fault)
    if why:
        return Verdict("WRONG", why)
    if isinstance(second, Verdict):
        return Verdict(second.outcome, f"resume: {second.why}", trained=True, detail=second.detail)
    return Verdict("exact", trained=True)


def _wrong(case: DrawnCase, first: Seen, second: Seen | None, fault: str | None) -> str:
    """What differs from the plain loop first; "" if nothing does."""
    skipped = first.skipped + (second.skipped if second else [False])
    truth, plain = plain_run(case, "fp64", skipped), None
    parts = case.dtype in NARROW or follows_rounding(case, truth)
    if case.dtype in NARROW:
        plain = at_own_weights(case, plain_run(case, case.dtype, skipped), first, second, case.dtype)
    if parts:
        truth = at_own_weights(case, truth, first, second, "fp64")
    why = wrong(case, first, second, truth, plain)
    has_lion = bool(lion_rows(case))
    asks = why or parts if has_lion else why and parts and case.dtype not in NARROW
    states = _states_of_each_step(case, first, fault) if asks else None
    if states is None:
        return why
    if has_lion:
        return wrong_beside_signs(case, first, second, states)
    return wrong(case, first, second, at_weights_of_each_step(case, truth, states), None)


def _states_of_each_step(case: DrawnCase, first: Seen, fault: str | None) -> list[dict[str, Tensor]] | None:
    """The weights after each step of a run of the same bits; None if it has others."""
    reading = replace(case, habits={**case.habits, "reads": "weights"}, resume_world=0)
    with tempfile.TemporaryDirectory(prefix="drawn-") as folder:
        seen = _part(first_part, case.world, reading, folder, fault)
    return None if isinstance(seen, Verdict) or seen[0].digest != first.digest else seen[0].states


def _unlike_whole_masters(case: DrawnCase, split: Seen, fault: str | None) -> str:
    """How masters in two halves differ from whole ones, which they are to be bit for bit; "" if they do not."""
    precision = case.config["precision"]
    if not isinstance(precision, Mapping) or precision.get("master") != "split":
        return ""
    whole = replace(
        case, config={**case.config, "precision": {**precision, "master": "fp32"}}, resume_world=0
    )
    with tempfile.TemporaryDirectory(prefix="drawn-") as folder:
        seen = _part(first_part, case.world, whole, folder, fault)
    return "" if isinstance(seen, Verdict) else different_bits(split, seen[0])


def _part(
    run: Callable[..., Seen], world: int, case: DrawnCase, folder: str, fault: str | None
) -> list[Seen] | Verdict:
    name = run.__name__.split("_")[0]
    try:
        seen = run_world(run, world, case, folder, fault, timeout_s=LIMIT_S)
    except WorldError as error:
        died = [failure for failure in error.failures if failure.kind in ("died", "raised")]
        told = died or [failure for failure in error.failures if failure.kind != "done"]
        why = f"{name}: rank {told[0].rank} {told[0].kind}: {told[0].summary}"
        return Verdict("CRASH" if died else "HANG", " ".join(why.split())[:300], detail=str(error))
    return judge_end(case, seen, name) or unlike(seen, name) or seen


# ---- the command ----


def commit_seed() -> int:
    """A number that follows from the commit; 0 outside of git."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return int(done.stdout[:8], 16) if done.returncode == 0 else 0


def campaign(asked: argparse.Namespace, cases: Path) -> Counter[str]:
    """Draw until the time or the number of draws is used up; outcomes and refusals by their words."""
    end = time.monotonic() + (asked.seconds or float("inf"))
    tally: Counter[str] = Counter()
    number = asked.start
    while time.monotonic() < end and (asked.draws is None or number < asked.start + asked.draws):
        case = draw(asked.world, asked.seed, number)
        verdict = outcome_of(case)
        tally[verdict.outcome] += 1
        tally["trained"] += verdict.trained
        if verdict.outcome == "refused":
            tally[f"refused: {masked(verdict.why)}"] += 1
        if verdict.outcome in BAD:
            file = cases / f"{asked.seed}-{asked.world}-{number}.case"
            file.write_text(case.text())
            print(f"draw {number}: {verdict.outcome} {verdict.why}\n  python -m tests.draws --case {file}")
            if asked.verbose:
                print(case.text())
        sys.stdout.flush()
        number += 1
    tally["next"] = number
    return tally


def report(asked: argparse.Namespace, tally: Counter[str], seconds: float) -> int:
    """Print the tally; the exit code."""
    count = tally["next"] - asked.start
    if asked.refusals:
        rows = [(n, words) for words, n in tally.most_common() if words.startswith("refused: ")]
        print("\n".join(f"{n:5d} {words}" for n, words in rows))
    words = ", ".join(f"{tally[name]} {name}" for name in ("exact", "refused", *BAD))
    print(
        f"world {asked.world}, seed {asked.seed}, draws {asked.start} to {tally['next'] - 1}: {words}; "
        f"{tally['trained']} of {count} trained; {seconds:.0f} s; go on with --from {tally['next']}"
    )
    return int(any(tally[name] for name in BAD))


def found_within(fault: str, asked: argparse.Namespace) -> tuple[float, int, str]:
    """Seconds and draws, on FAULT_WORLDS in turn, until a case that is right shows a fault; "" where none has."""
    begun, drawn = time.monotonic(), Counter[int]()
    seconds = asked.seconds or (FAULT_S if asked.draws is None else float("inf"))
    for world in cycle(FAULT_WORLDS):
        if drawn.total() == asked.draws or time.monotonic() - begun > seconds:
            break
        case = draw(world, asked.seed, drawn[world])
        drawn[world] += 1
        verdict = outcome_of(case, fault)
        if verdict.outcome in BAD and outcome_of(case).outcome not in BAD:
            how = f"world {world}, draw {drawn[world] - 1}: {verdict.outcome} {verdict.why}"
            return time.monotonic() - begun, drawn.total(), how
    return time.monotonic() - begun, drawn.total(), ""


def hunt(asked: argparse.Namespace) -> int:
    """Plant the faults one by one and draw for each; print which are found."""
    from tests.house.drawn_faults import FAULTS

    names = [name for name in FAULTS if asked.faults in name][asked.start :]
    missed = []
    for world in sorted(set(FAULT_WORLDS)):  # starts the ranks
        outcome_of(draw(world, asked.seed, 0))
    for name in names:
        seconds, number, how = found_within(name, asked)
        print(
            f"{'found' if how else 'MISSED'} {seconds:5.1f} s {number:4d} draws: {name}: {how[:150]}",
            flush=True,
        )
        missed += [] if how else [name]
    print(f"{len(names) - len(missed)} of {len(names)} found; missed: {', '.join(missed) or 'none'}")
    return int(bool(missed))


def run_case(file: Path) -> int:
    case = case_of(file.read_text())
    verdict = outcome_of(case)
    print(case.text())
    print(verdict.outcome, verdict.why)
    print(verdict.detail)
    return int(verdict.outcome in BAD)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.draws")
    parser.add_argument("--world", type=int, default=2, help="ranks")
    parser.add_argument("--seconds", type=float, help="time; without it and --draws: 60")
    parser.add_argument("--draws", type=int, help="number of draws")
    parser.add_argument("--seed", type=int, help="default: a hash of the commit")
    parser.add_argument(
        "--from", dest="start", type=int, default=0, help="number of the first draw, or of the first fault"
    )
    parser.add_argument("--case", type=Path, help="a file with one case as a dict")
    parser.add_argument(
        "--refusals", action="store_true", help="print refusals by their words, the most first"
    )
    parser.add_argument("--verbose", action="store_true", help="print each case that fails as a dict")
    parser.add_argument("--out", type=Path, help="folder for cases that fail; default: a fresh one")
    parser.add_argument(
        "--faults", nargs="?", const="", help="plant tests.house.drawn_faults with this in their names"
    )
    asked = parser.parse_args(arguments)
    if asked.seconds is None and asked.draws is None and asked.faults is None:
        asked.seconds = 60.0
    if asked.seed is None:
        asked.seed = commit_seed()
    return asked


def main(arguments: Sequence[str] | None = None) -> int:
    torch.set_num_threads(1)
    asked, begun = parsed(arguments), time.monotonic()
    if asked.case is not None:
        return run_case(asked.case)
    if asked.faults is not None:
        return hunt(asked)
    cases = asked.out or Path(tempfile.mkdtemp(prefix="draws-"))
    cases.mkdir(parents=True, exist_ok=True)
    tally: Counter[str] = campaign(asked, cases)
    return report(asked, tally, time.monotonic() - begun)


if __name__ == "__main__":
    code: Any = main()
    pool().close()
    sys.exit(code)
