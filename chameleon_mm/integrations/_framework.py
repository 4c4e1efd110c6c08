"""Loads a framework, and checks which version of it is installed before anything is trained.

FRAMEWORK = Framework("transformers", first=(5, 0), last=(5, 23))
transformers = FRAMEWORK.load()      # an ImportError that names the extra where it is missing
FRAMEWORK.check_version()            # a warning where the version is none that was tested
"""

from __future__ import annotations

import importlib
import logging
import re
from dataclasses import dataclass
from typing import Any

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Framework:
    """A framework by the name of its package, which is that of our extra, too."""

    name: str
    first: tuple[int, int]
    """The oldest release, as (major, minor), that its module is written for."""
    last: tuple[int, int]
    """The newest release that its module was tested with."""

    def load(self) -> Any:
        """The package. Raises `ImportError` where it is not installed."""
        try:
            return importlib.import_module(self.name)
        except ModuleNotFoundError as error:
            if error.name != self.name:
                raise
            raise ImportError(
                f"chameleon_mm.integrations.{self.name}: expected {self.name} to be installed, found none; "
                f"pip install 'chameleon-mm[{self.name}]'",
                name=self.name,
            ) from error

    def check_version(self) -> None:
        """Warn of a release that is older than all known ones, or of a newer series than the last tested one."""
        version = str(self.load().__version__)
        numbers = re.match(r"(\d+)\.(\d+)", version)
        release = (int(numbers[1]), int(numbers[2])) if numbers else None
        if release is None or not (self.first <= release and release[0] <= self.last[0]):
            first, last = (".".join(map(str, known)) for known in (self.first, self.last))
            _log.warning(
                "chameleon_mm: expected %s %s or newer (tested up to %s), got %s, which is not known: compare some steps with "
                "a run without swapping first",
                self.name, first, last, version,
            )  # fmt: skip
