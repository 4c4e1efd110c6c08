"""The default rule, by which saved tensors move where no plan says so, and limits on the device memory that swapping may use.

rule.reason_to_keep(facts)            -> None to swap, or why a saved tensor stays where it is
rule.gathers(facts, ...)              -> whether a small view goes without the rest of its storage
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields

from chameleon_mm.units import MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFacts:
    """Facts about one saved tensor by which the default rule decides."""

    nbytes: int
    """Bytes of its whole storage."""
    covered_bytes: int | None = None
    """Bytes of the storage that the saved view covers; None: all of them, or not known."""
    kind: str = ""
    """Reason why nobody may move it ("parameter", "leaf", "subclass", ...); empty for a plain activation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultRule:
    """Every saved storage of `min_bytes` or more moves; parameters and what the executor cannot rebuild never do."""

    min_bytes: int = MIB
    """Size below which a storage stays: in dense LLMs tensors below 1 MiB are 0.1 % of the bytes and 20 % of the copies."""

    gather_share: float = 0.25
    """Views that together cover at most this share of their storage go without the rest of it; 0: never.

    A storage may be saved whole later in the step, so this bounds what is moved twice then.
    """

    max_gathered: int = 8
    """Views of one storage that are gathered one by one, a kernel each; from then on the whole storage moves, in one copy."""

    def __post_init__(self) -> None:
        if self.min_bytes < 0:
            raise ValueError(f"min_bytes: expected 0 or more, got {self.min_bytes}")
        if not 0 <= self.gather_share <= 1:
            raise ValueError(f"gather_share: expected a share from 0 to 1, got {self.gather_share}")
        if self.max_gathered < 0:
            raise ValueError(f"max_gathered: expected 0 views or more, got {self.max_gathered}")

    def reason_to_keep(self, facts: SaveFacts) -> str | None:
        if facts.kind:
            return facts.kind
        if facts.nbytes == 0:
            return "empty"
        return "small" if facts.nbytes < self.min_bytes else None

    def gathers(self, facts: SaveFacts, *, views: int, view_bytes: int) -> bool:
        """Whether this view goes alone, where `views` of the same storage, of `view_bytes` together, went alone already."""
        if facts.covered_bytes is None or views >= self.max_gathered:
            return False
        return view_bytes + facts.covered_bytes <= facts.nbytes * self.gather_share


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecRule:
    """Chooses the lossless codec that is asked to shorten what crosses the link. None, unless somebody asks."""

    names: tuple[str, ...] = ()
    """Names in the order in which they are tried; of those that take a dtype the first that was not given up for it."""

    give_up_after: int = 4
    """Refusals by a codec's own status, more than storages it encoded, after which it is not tried for that dtype again: each
    costs a kernel and a copy for nothing."""

    def __post_init__(self) -> None:
        if self.give_up_after < 1:
            raise ValueError(f"give_up_after: expected 1 refusal or more, got {self.give_up_after}")

    def choose(self, candidates: Collection[str], *, encoded: Mapping[str, int], refused: Mapping[str, int]) -> str | None:
        """Choose one of `candidates`, which take the dtype at hand; both counts are by codec, for that dtype."""
        for name in self.names:
            if name in candidates and refused.get(name, 0) - encoded.get(name, 0) < self.give_up_after:
                return name
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on the device memory that swapping may use."""

    hbm_budget_bytes: int | None = None
    """Allocated bytes to stay within; None: no budget, only the two limits below."""
    leaving_bytes: int | None = None
    """HBM held by copies on their way out before compute waits for the oldest; None: the budget alone decides."""
    ahead_bytes: int | None = None
    """HBM that prefetches may hold before their first use; None: the budget alone decides."""
    free_share: float | None = None
    """Share of the HBM left free by all else that swapping may hold where it is not known how far allocation climbs. None: no
    such limit. Not beside a budget."""

    def __post_init__(self) -> None:
        if self.free_share is not None and not 0 <= self.free_share < 1:
            raise ValueError(
                f"free_share: expected a share from 0 to below 1, or None for no such limit, got {self.free_share}"
            )
        if self.free_share is not None and self.hbm_budget_bytes is not None:
            raise ValueError(
                "free_share: expected none beside hbm_budget_bytes, which bounds all that is allocated; leave one out"
            )
        for knob in fields(self):
            nbytes = getattr(self, knob.name)
            if nbytes is not None and nbytes < 0:
                raise ValueError(f"{knob.name}: expected 0 bytes or more, or None for no such limit, got {nbytes}")
