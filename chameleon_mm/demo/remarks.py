"""Collects what the library warns of while it runs, for the demo to print beside its figures instead of among them.

with remarks() as said:
    train(...)
said                # ["no plan for a step of 234 hooks, ...: hbm_budget: expected 39886848 bytes (38.0 MiB) or more, ..."]
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

_LIBRARY = "chameleon_mm"


class _Listener(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage().removeprefix(f"{_LIBRARY}: "))  # beside the demo's own figures nobody asks whose


@contextmanager
def remarks() -> Iterator[list[str]]:
    """The library's warnings, as they come. Handlers of the program's own get them all the same."""
    listener, logger = _Listener(), logging.getLogger(_LIBRARY)
    logger.addHandler(listener)
    try:
        yield listener.said
    finally:
        logger.removeHandler(listener)
