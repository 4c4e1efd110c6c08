"""Directors that choose the treatment of each saved storage at random.

    with mixed(Mix(seed), budget) as session:              # a session in which each step is directed by the mix
        with session.step(): ...

A mix keeps, swaps or drops each storage that is saved, and holds some that nobody saves. It tries each recipe beside the
original, and drops nothing (`Proofs.EACH`); the first time at its place (`FIRST`, as a plan does); or never.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

import chameleon_mm as cm
from chameleon_mm import replayable
from chameleon_mm.device import Device, Stream
from chameleon_mm.plan.step_program import DROP, Row, StepProgram
from chameleon_mm.plan.trace import BirthPlace
from chameleon_mm.record.recorder import Recorder
from chameleon_mm.swap.budget import Budget
from chameleon_mm.swap.director import Director
from chameleon_mm.swap.executor import Executor
from chameleon_mm.swap.metrics import Totals
from chameleon_mm.swap.recomputing import RecomputePlan
from chameleon_mm.swap.saved_storage import SavedStorage
from chameleon_mm.swap.way import Way
from tests._traces import chain, plan_of

HELD_FROM = 1_000_000
"""Number of the first held storage. Saved storages are numbered by their hooks."""

MOST_HOOKS = 4_096


_NOTHING_PLANNED = StepProgram.of(chain(layers=0), plan_of(chain(layers=0)))


class Proofs(enum.Enum):
    """Rebuilds at which a recipe runs while its original is still held."""

    EACH = "each"
    FIRST = "first"
    NEVER = "never"


class _Everything(set[int]):
    """A set that has every number."""

    def __contains__(self, number: object) -> bool:
        return True


class RandomPlaces(Mapping[BirthPlace, int]):
    """Mapping of every place of a step, a seeded share of which has a storage to hold."""

    def __init__(self, seed: int, share: float) -> None:
        self._seed, self._share = seed, share
        self._numbers: dict[BirthPlace, int] = {}

    def __getitem__(self, place: BirthPlace) -> int:
        if random.Random(f"{self._seed} {place}").random() >= self._share:
            raise KeyError(place)
        return self._numbers.setdefault(place, HELD_FROM + len(self._numbers))

    def __iter__(self) -> Iterator[BirthPlace]:
        return iter([BirthPlace(hook, "", 0, 0) for hook in range(MOST_HOOKS)])

    def __len__(self) -> int:
        return MOST_HOOKS


class Mix(Director):
    """Keep, swap or drop each saved storage by chance. The same seed makes the same choices."""

    plans = True

    def __init__(
        self,
        seed: int = 0,
        *,
        drop: float | None = None,
        held: float | None = None,
        proofs: Proofs | None = None,
        admitted: frozenset[str] | None = None,
    ) -> None:
        """drop, held: shares of the saved storages to drop, and of the others to hold; None: drawn at random."""
        self._random = draw = random.Random(seed)
        self._drop = draw.choice((0.3, 0.6, 0.9, 1.0)) if drop is None else drop
        share = draw.choice((0.0, 0.1, 0.4)) if held is None else held
        drawn = draw.choice(list(Proofs)), draw.choice((replayable.DEFAULT, replayable.DEFAULT | replayable.PRODUCTS))
        self.proofs = proofs or drawn[0]
        self.plan = RecomputePlan(
            admitted=admitted or drawn[1],
            held=RandomPlaces(draw.randrange(1 << 30), share) if share else {},
            proven=_Everything() if self.proofs is Proofs.NEVER else set(),
        )
        self._choices: dict[int, str] = {}
        """Choice for each place, where one holds for all steps."""
        self._saved: set[SavedStorage] = set()
        self._drops: list[int] = []
        """Numbers of the storages to drop once the operators that saved them are over."""
        self._hooks = 0
        self.num_held = 0

    @property
    def recompute(self) -> RecomputePlan:
        return self.plan

    def begin_step(self, epoch: int, budget: Budget, compute: Stream) -> Recorder | None:
        self._hooks = 0
        self.way = Way(_NOTHING_PLANNED, epoch)
        return None

    def on_save(self, t: Tensor, saved: SavedStorage | None, finished: Sequence[SavedStorage]) -> int:
        hook, self._hooks = self._hooks, self._hooks + 1
        if saved is not None and saved not in self._saved:
            self._direct(saved, hook, self._choose(hook, self._drop))
        return hook

    def _direct(self, saved: SavedStorage, number: int, choice: str) -> None:
        """Number `saved`, unless the default rule has it swapped out."""
        self._saved.add(saved)
        if choice == "swap" or self.way is None:
            return
        saved.number = number
        self.way.storages[number] = saved
        if choice == "drop":
            self._drops.append(number)

    def on_use(self, saved_at: tuple[int, int], saved: SavedStorage | None, finished: Sequence[SavedStorage]) -> None:
        self._hooks += 1

    def due(self) -> Sequence[Row]:
        drops, self._drops = self._drops, []
        return [Row(ops=tuple((DROP, number, 0) for number in drops))] if drops else ()

    def note_held(self, saved: SavedStorage, number: int) -> None:
        self._direct(saved, number, self._choose(number, drop=0.0))
        self.num_held += 1

    def end_step(self, recorder: Recorder | None, growth_bytes: int, *, completed: bool) -> Any:
        self._saved, self._drops, self.way = set(), [], None
        return super().end_step(recorder, growth_bytes, completed=completed)

    def _choose(self, number: int, drop: float) -> str:
        if self.proofs is Proofs.EACH:
            self.plan.proven.discard(number)
            self.plan.refused.pop(number, None)
            return self._drawn(drop)
        return self._choices.setdefault(number, self._drawn(drop))

    def _drawn(self, drop: float) -> str:
        if self._random.random() < drop:
            return "drop"
        return self._random.choice(("keep", "swap"))


def executor_of(session: cm.SwapSession) -> Executor:
    return session._executor


def totals_of(session: cm.SwapSession) -> Totals:
    return session._executor.metrics.totals


def mixed(
    mix: Director,
    room: int | str = "1GiB",
    *,
    device: Device | str = "sim",
    min_bytes: int = 1,
    model: nn.Module | None = None,
) -> cm.SwapSession:
    """A session whose steps `mix` directs."""
    session = cm.SwapSession(room, "64MiB", device, min_bytes=min_bytes, plans=False, model=model)
    session._executor.director = mix
    return session
