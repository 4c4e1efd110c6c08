"""Additions to every pytest run in the stand-in's environment: fail a test for its violations, and skip tests by name alone.

* After each test: the violations of the ordering rules that the runtime saw. One is a failure that names both sides.
* A test that needs what the stand-in lacks is listed in `limits.py`, with the reason. A name there that no test has: an error.
* Copies that the library calls speculative are so for the runtime, too.
* `--every-skip-explained` fails the run for a skip whose reason is neither there nor in `EXPLAINED`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch  # noqa: F401 - loads the runtime that the next imports look for

from tests.cuda_stand_in import control, library
from tests.cuda_stand_in.limits import LATE_ALONE, TESTS

PREFIX = "the CUDA stand-in: "
"""Prefix of a skip's reason if the stand-in lacks a feature."""

EXPLAINED = ("torch has no sample of ", "needs torchtune: ")
"""Beginnings of skip reasons that also hold on a GPU."""

_unexplained: list[str] = []


def pytest_configure() -> None:
    """From here on `CudaStream` tells which copies of ours are speculative, as the simulator is told.

    The model may write a saved tensor while it is copied out. Either a version counter has moved for those bytes, so that a use
    raises eager's error, or they were not saved. CUDA itself knows nothing of that, and the library has no reason to report it.
    """
    from chameleon_mm.device.cuda.cuda_stream import CudaStream

    # For the whole process: there is no other place.
    CudaStream.copy = _telling(CudaStream.copy, "speculative")  # type: ignore[method-assign]  # told of each call
    CudaStream.copy_storage = _telling(CudaStream.copy_storage, "out")  # type: ignore[method-assign]  # told of each call


def _telling(method: Callable[..., None], keyword: str) -> Callable[..., None]:
    """`method`, whose copies are speculative if it is given that keyword as True."""

    @functools.wraps(method)
    def told(*args: Any, **kwargs: Any) -> None:
        kind = library.copy_kind(library.SPECULATIVE if kwargs.get(keyword) else library.STRICT)
        try:
            method(*args, **kwargs)
        finally:
            library.copy_kind(kind)

    return told


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-skip-explained", action="store_true", help="fail for a skip whose reason nobody has listed")


def limit_of(nodeid: str) -> str | None:
    """Why the test cannot run here: the first entry for one of its `names_of`; None: it can."""
    entries = TESTS if control.mode() == "late" else TESTS | LATE_ALONE
    return next((entries[name] for name in names_of(nodeid) if name in entries), None)


def names_of(nodeid: str) -> tuple[str, str, str]:
    """Names by which a test may be listed: its node ID, its function with all parameters, its file."""
    return nodeid, nodeid.partition("[")[0], nodeid.partition("::")[0]


def _is_whole(config: pytest.Config) -> bool:
    """True if no file of tests is named on the command line."""
    whole: bool = config.args == config.getini("testpaths")
    return whole


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A whole run in another mode than late does not import the files that it would skip."""
    return (control.mode() != "late" and _is_whole(config) and f"tests/{collection_path.name}" in LATE_ALONE) or None


@pytest.hookimpl(tryfirst=True)  # before tests are deselected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    names = {name for item in items for name in names_of(item.nodeid)}
    if control.mode() == "late" and _is_whole(config) and (unknown := sorted((TESTS | LATE_ALONE).keys() - names)):
        problem = f"tests/cuda_stand_in/limits.py: expected names of tests, got {', '.join(unknown)}"
        sys.stderr.write(f"{problem}\n")  # a process of pytest-xdist loses the error's text
        raise pytest.UsageError(problem)
    for item in items:
        if (limit := limit_of(item.nodeid)) is not None:
            item.add_marker(pytest.mark.skip(reason=PREFIX + limit))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    control.violations()  # violations of fixtures, and of work that an earlier test queued, are not this test's
    result = yield
    if found := control.violations():
        pytest.fail(f"{len(found)} violations of the order of work:\n" + "\n".join(found), pytrace=False)
    return result


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail") and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if not reason.startswith((PREFIX, *EXPLAINED)):
            _unexplained.append(f"{report.nodeid}: {reason}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--every-skip-explained") and _unexplained and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("--every-skip-explained"):
        for line in _unexplained:
            terminalreporter.write_line(f"UNEXPLAINED SKIP {line}", red=True)
