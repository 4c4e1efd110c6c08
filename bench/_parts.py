"""One part of a run as a process of its own, so that a crash or a hang of it takes nothing else with it.

    outcome = run_part(part, folder, seconds)    # a new process group; killed whole when its time is over
    outcome.status                               # passed | failed | not run
    outcome.record                               # the JSON it wrote, if it is one of a real device

A part that exits 0 without having written its record has failed: nothing may be counted that left no trace.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from chameleon_mm.bench._stand_in import is_stand_in, withheld

_GRACE_S = 5.0
_POLL_S = 0.02
_TAIL_CHARACTERS = 4000

Status = Literal["passed", "failed", "not run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A command and how long it may take."""

    theme: str
    """Names its result file."""
    command: Sequence[str]
    """`{json}` stands for the file to write, `{seconds}` for the time there is, less what finishing takes."""
    cap_s: float
    """Never more than this."""
    least_s: float
    """Not worth starting with less; kept free for it while earlier parts run."""
    rehearsal: Sequence[str] = ()
    """More arguments on the CUDA stand-in, where a CPU does the work."""
    withhold: bool = False
    """Whether its record has times and rates on the CUDA stand-in, too: they are then taken out of it."""

    def __post_init__(self) -> None:
        if not 0 < self.least_s <= self.cap_s:
            raise ValueError(f"part {self.theme}: expected 0 < least_s <= cap_s, got {self.least_s} and {self.cap_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a part."""

    theme: str
    status: Status
    detail: str
    """One line for the summary."""
    seconds: float = 0.0
    returncode: int | None = None
    tail: str = ""
    """The end of its output."""
    record: dict[str, Any] | None = field(default=None, repr=False)

    def to_dict(self) -> dict[str, Any]:
        about = {
            "theme": self.theme, "status": self.status, "detail": self.detail,
            "seconds": round(self.seconds, 1), "returncode": self.returncode,
        }  # fmt: skip
        return about if self.status == "passed" else about | {"tail": self.tail}


def allotted_s(part: Part, remaining_s: float, later: Sequence[Part]) -> float:
    """Seconds that `part` may take: its cap, or what remains once every later part has kept its least, or its own least where
    there is not enough for all. 0: do not start it."""
    if remaining_s < part.least_s:
        return 0.0
    free = remaining_s - sum(other.least_s for other in later)
    return min(part.cap_s, max(free, part.least_s))


def run_part(
    part: Part, folder: Path, seconds: float, *, cwd: Path, environment: Mapping[str, str], rehearsal: bool = False
) -> Outcome:
    """Run `part` in `cwd` for at most `seconds`; it writes into `folder`. Never raises for what the part does.

    `rehearsal`: on the CUDA stand-in.
    """
    target, log = folder / f"{part.theme}.json", folder / f"{part.theme}.log"
    inside = max(1, int(seconds * 0.85))  # what the part may use itself: the rest is for starting, finishing and writing
    command = [
        argument.format(json=target, seconds=inside) for argument in (*part.command, *(part.rehearsal if rehearsal else ()))
    ]
    start = time.monotonic()
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            return Outcome(theme=part.theme, status="failed", detail=f"could not be started: {error}")
        timed_out = not _wait(process, seconds)
    took = time.monotonic() - start
    tail = log.read_text(encoding="utf-8", errors="replace")[-_TAIL_CHARACTERS:]
    record, problem = read_record(target)
    if record is not None and record.get("stand_in") and part.withhold:
        record = withheld(record)
    if timed_out:
        status, detail = "failed", f"stopped after {seconds:.0f} s"
    elif process.returncode != 0:
        status, detail = "failed", (record or {}).get("headline") or _last_line(tail) or f"exit code {process.returncode}"
    elif problem:
        status, detail = "failed", problem
    else:
        status, detail = "passed", (record or {}).get("headline", "")
    return Outcome(
        theme=part.theme, status="passed" if status == "passed" else "failed", detail=detail, seconds=took,
        returncode=process.returncode, tail=tail, record=record,
    )  # fmt: skip


def read_record(path: Path) -> tuple[dict[str, Any] | None, str]:
    """The JSON record at `path` and what is wrong with it: absent, unreadable, without its environment, or simulated."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None, "wrote no result"
    except (OSError, ValueError) as error:
        return None, f"wrote an unreadable result: {error}"
    missing = [key for key in ("schema", "device", "simulated", "commit", "versions") if key not in record]
    if missing:
        return None, f"expected {', '.join(missing)} in its result, got none"
    if is_stand_in(record["device"]) and record.get("stand_in") is not True:
        return None, f'expected "stand_in": true in a result of {record["device"]}, got none'
    if record["simulated"] is not False:
        return None, f"expected a result of a real GPU, got one of {record['device']}"
    return record, ""


def _wait(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether the process ended in time. Its whole group is gone when this returns or raises."""
    try:
        return _ended(process, seconds)
    finally:
        # Its own group (start_new_session), and not collected yet, so that the number can be no other group's.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
            _ended(process, _GRACE_S)
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # one that hangs in the driver may outlive even that: go on without it
            process.wait(timeout=_GRACE_S)


def _ended(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether the process ends within `seconds`. Leaves its exit status to be collected."""
    end_at = time.monotonic() + seconds
    while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > end_at:
            return False
        time.sleep(_POLL_S)
    return True


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""
