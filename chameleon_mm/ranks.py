"""Rank of this process in its job, and whether its budgets are those of the others: told without waiting for any of them.

    ranks = Ranks(host_budget_bytes=None)
    ranks.enter(hbm_budget_bytes)       # one entry in the store of the default process group, and two questions to it
    ranks.rank, ranks.problems          # Rank(number, of); sentences, each with what to do

The first rank that enters its n-th session leaves its budgets in the store, and the others compare theirs with them. There is
no collective in it, and no wait: a rank that never comes is waited for by nobody.
"""

from __future__ import annotations

import json
import logging
from typing import Any, NamedTuple

import torch.distributed as dist

from chameleon_mm.pinned.host_memory import available_host_bytes, local_ranks
from chameleon_mm.units import format_size

_log = logging.getLogger(__name__)

_KEY = "chameleon_mm/sessions"


class Rank(NamedTuple):
    """Place of a process among those that train together."""

    number: int = 0
    of: int = 1

    @classmethod
    def here(cls) -> Rank:
        """This process's place in the default process group; the only one where there is none."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls()
        return cls(dist.get_rank(), dist.get_world_size())


class Ranks:
    """The ranks of a job, as one session of this process knows them. Raises nothing: training does not depend on it."""

    def __init__(self, *, host_budget_bytes: int | None) -> None:
        """`host_budget_bytes`: as the caller gave it; None: each rank's share of what is available, which differs."""
        self.rank = Rank()
        self.problems: tuple[str, ...] = ()
        """Sentences about budgets that the ranks, or this machine, have not together."""
        self._host_budget_bytes = host_budget_bytes

    def enter(self, hbm_budget_bytes: int) -> None:
        """Compare the budgets with those of the other ranks and of the machine. Logs a warning for each problem."""
        self.rank = Rank.here()
        found = (self._beyond_the_machine(), self._unlike_the_first(hbm_budget_bytes))
        self.problems = tuple(problem for problem in found if problem is not None)
        for problem in self.problems:
            _log.warning("chameleon_mm: %s", problem)

    def _beyond_the_machine(self) -> str | None:
        """Sentence for a host budget that the machine has not for all of its ranks; None: it has, or nothing tells."""
        try:
            ranks, available = local_ranks(), available_host_bytes()
        except ValueError:  # a malformed LOCAL_WORLD_SIZE, which a budget that is given does not need
            return None
        budget = self._host_budget_bytes
        if budget is None or ranks == 1 or not 0 < available < ranks * budget:
            return None
        return (
            f"host_budget: expected {ranks} ranks on this machine to get it, got {format_size(budget)} for each, "
            f"{format_size(ranks * budget)} together, where {format_size(available)} are available; give each "
            f"{format_size(available // ranks)} at most, or none, which divides half of what there is"
        )

    def _unlike_the_first(self, hbm_budget_bytes: int) -> str | None:
        """Sentence for budgets that the first rank in the store has otherwise; None: it has the same, or there is no store."""
        if self.rank.of == 1:
            return None
        mine = {"rank": self.rank.number, "hbm_budget": hbm_budget_bytes, "host_budget": self._host_budget_bytes}
        try:
            first = _first(mine)
        except Exception as error:  # noqa: BLE001 - a store that is gone, or of another kind, is no reason not to train
            _log.debug("chameleon_mm: budgets were not compared among ranks: %s", error)
            return None
        differing = [name for name in ("hbm_budget", "host_budget") if first.get(name) != mine[name]]
        if not differing:
            return None
        said = "; ".join(f"{name} is {_size(mine[name])} here and {_size(first.get(name))} there" for name in differing)
        return (
            f"rank {self.rank.number} was given other budgets than rank {first.get('rank')}: {said}; their plans differ, and "
            f"the slowest decides for all: give each the same, unless their parts of the model differ"
        )


def _first(mine: dict[str, Any]) -> dict[str, Any]:
    """Entry of the rank that entered a session of this number first: `mine`, if this is it."""
    store = dist.distributed_c10d._get_default_store()
    number = store.add(f"{_KEY}/{mine['rank']}", 1)
    # Sets it where nobody has, and answers with what is there: one question, whatever the number of ranks.
    entry: Any = json.loads(store.compare_set(f"{_KEY}/number/{number}", "", json.dumps(mine)))
    return entry if isinstance(entry, dict) else mine


def _size(nbytes: Any) -> str:
    return format_size(nbytes) if isinstance(nbytes, int) else "not given"
