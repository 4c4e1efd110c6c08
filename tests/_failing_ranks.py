"""Two ranks, one of which ends in the middle of a step, in every way and place: run as a program, which forks them.

    python -m tests._failing_ranks FOLDER        # prints a JSON list: how the ranks ended, with a session and without

A fork for each rank and case, as importing torch takes longer than all else.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

import chameleon_mm as cm
from tests._rank_programs import PATIENCE, ddp, fsdp_resharding
from tests._run_scripts import ready_to_fork
from tests.observed import observe_all

STEPS, FATAL_STEP = 6, 3


class RankFailed(Exception):
    """The failure of a rank's own program."""


def raises() -> NoReturn:
    raise RankFailed("this rank fails")


def leaves() -> NoReturn:
    os._exit(7)


def is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


WAYS: tuple[Callable[[], None], ...] = (raises, leaves, is_killed)
ENGINES = (ddp, fsdp_resharding)


class Case(NamedTuple):
    engine: str
    way: str
    place: str
    with_session: bool


def failing_layer(model: nn.Module, way: Callable[[], None], place: str, is_due: Callable[[], bool]) -> None:
    """Have `way` happen in the third block's forward or backward, once `is_due`."""
    layer = list(next(m for m in model.modules() if isinstance(m, nn.Sequential)).children())[2]

    def in_forward(module: nn.Module, given: Any, out: Tensor) -> None:
        if is_due() and place == "forward":
            way()
        if is_due():
            out.register_hook(lambda gradient: way())

    layer.register_forward_hook(in_forward)


def train(case: Case, rank: int, told: dict[str, Any]) -> None:
    torch.manual_seed(0)
    training = next(engine for engine in ENGINES if engine.__name__ == case.engine)()
    optimizer = torch.optim.AdamW(training.model.parameters(), lr=1e-2)
    number = 0
    if rank == 1:
        way = next(way for way in WAYS if way.__name__ == case.way)
        failing_layer(training.model, way, case.place, lambda: number == FATAL_STEP)
    session = None
    if case.with_session:
        session = cm.SwapSession("1450KiB", "64MiB", cm.SimDevice("h200", hbm_bytes="4GiB"), min_bytes=1024)
        told["session"] = session
    with session or nullcontext():
        while number < STEPS:
            with session.step() if session else nullcontext():
                training.step()
                optimizer.step()
                optimizer.zero_grad()
            number += 1
            told["steps"] = number


def run_rank(case: Case, rank: int, meeting_place: str, result: Path) -> None:
    """Train, and write how it ended to `result`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting_place}", rank=rank, world_size=2, timeout=PATIENCE)
    told: dict[str, Any] = {"steps": 0}
    error = "none"
    try:
        train(case, rank, told)
    except Exception as failure:  # noqa: BLE001 - whatever it is, it is compared
        error = f"{type(failure).__name__}: {failure}"
    gc.collect()
    session = told.pop("session", None)
    outcome = {"case": case._asdict(), "rank": rank, "error": error, **told}
    if session is not None:
        outcome |= {"num_live": session.pool.stats().num_live, "steps_reported": session.report().steps}
        outcome["bytes_swapped_out"] = session.report().bytes_swapped_out
    result.write_text(json.dumps(outcome))


def forked(work: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            sys.stderr.flush()
            os._exit(0)  # with no exit handler of the parent's
    return child


def main(folder: Path) -> None:
    ready_to_fork()
    outcomes = []
    cases = [
        Case(engine.__name__, way.__name__, place, with_session)
        for engine in ENGINES
        for way in WAYS
        for place in ("forward", "backward")
        if engine is ddp or way is is_killed
        for with_session in (False, True)
    ]
    for number, case in enumerate(cases):
        results = [folder / f"{number}.{rank}.json" for rank in range(2)]
        meeting = str(folder / f"meeting{number}")
        children = [
            forked(lambda rank=rank, case=case, meeting=meeting, result=result: run_rank(case, rank, meeting, result))  # type: ignore[misc]  # mypy infers no lambda with defaults
            for rank, result in enumerate(results)
        ]
        for child in children:
            os.waitpid(child, 0)
        told = [json.loads(result.read_text()) for result in results if result.exists()]
        outcomes.append({"case": case._asdict(), "ranks": told})
    sys.stdout.write(json.dumps(outcomes))


if __name__ == "__main__":
    observe_all()
    main(Path(sys.argv[1]))
