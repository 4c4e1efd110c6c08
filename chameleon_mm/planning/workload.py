"""A model somebody else wrote, as the work of one training step, and its errors, described in one line that says where.

build: Build = source_of(...)           # checked; nothing built yet
with shapes_alone():
    workload = build()                  # weights and batch are fake: shapes without memory
    workload.loss().backward()

with told_as("models:tiny failed"):
    models.tiny()                       # ModelUnusable: models:tiny failed: TypeError: ... (models.py:12)
"""

from __future__ import annotations

import re
import sysconfig
import textwrap
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from chameleon_mm.errors import ChameleonError

_NO_SUCH_DEVICE = re.compile(r"not (compiled|linked) with", re.IGNORECASE)
"""Pattern of what torch says of devices that its build does not know, before CUDA's name or after it."""

_MOST_SAID = 300
"""Characters of somebody else's message that are shown: some list all that they would have understood."""

_OURS = Path(__file__).resolve().parents[1]
_INSTALLED = tuple(Path(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib"))


@contextmanager
def told_as(what: str) -> Iterator[None]:
    """Context in which any error becomes a `ModelUnusable` that begins with `what` and says how to go on, if that is known."""
    try:
        yield
    except ModelUnusable:
        raise
    except (Exception, SystemExit) as error:  # a model may fail in any way, and that is an answer about the model
        raise ModelUnusable(
            f"{what}: {type(error).__name__}: {said_by(error)}{_line_of_user(error)}{_way_out(error)}"
        ) from error


def said_by(error: BaseException) -> str:
    """Message of an error as one line of a length to be read."""
    return textwrap.shorten(str(error).strip().removesuffix("."), _MOST_SAID, placeholder=" ...") or "no message"


def _line_of_user(error: BaseException) -> str:
    """The innermost line of the user's own, where there is one."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_file() and not any(path.is_relative_to(folder) for folder in (_OURS, *_INSTALLED)):
            return f" ({path.name}:{frame.lineno})"
    return ""


def _way_out(error: BaseException) -> str:
    if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        return "; fake tensors have shapes and no values: a step whose operators depend on values cannot be planned ahead"
    if _NO_SUCH_DEVICE.search(str(error)):
        return "; build model and batch on the CPU: nothing is computed, and no GPU is needed"
    return ""


class ModelUnusable(ChameleonError, ValueError):
    """A model that was asked for cannot be found, built or run without a GPU and without its numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One step's model and batch. `loss()` runs forward and returns the scalar to go backward from."""

    about: str
    """Description for people: what it is, with its batch."""
    model: nn.Module
    loss: Callable[[], Tensor]
    notes: tuple[str, ...] = ()
    """Notes on the figures, a sentence each."""


Build = Callable[[], Workload]
"""Builds it, on the CPU, in torch's default dtype. Call it under `shapes_alone`."""
