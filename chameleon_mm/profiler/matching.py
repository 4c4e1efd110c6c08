"""Which hook of a known step each hook of a running one is: online, by features, one call per hook.

    matcher = Matcher(record of the known step); matcher.begin_step(aligned=hooks that agreed so far)
    save:  known = matcher.match(feature)            # number of the known hook, or None
    use:   matcher.match_use(known)                  # through the save that it uses; None where that is unknown

    aligned:    the feature is the next known one: that is it
    deviating:  a few chains of matches, each known by its last; the feature's places next to each are tried:
                    score(place) = weight(feature) + max over chains of score(chain) - gap(observed between, known between)
                the best chain ends here: a match; it ends earlier: an inserted save. Aligned again after a run without a gap

Chaining of anchors as in minimap2 (Li 2018, https://doi.org/10.1093/bioinformatics/bty191), done online. A feature's weight is
the log of how rare it is, a gap costs about the log of its length: a jump is believed at once where fewer places than one with
that feature are to be expected within it by chance, and otherwise once what follows agrees.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Hashable
from math import log
from typing import NamedTuple

from chameleon_mm.profiler.step_record import NOT_A_USE, StepRecord

MAX_CHAINS = 8
"""Explanations of a deviation that are kept."""
STEADY_RUN = 8
"""Matches without a gap after which the other explanations are dropped."""

_NO_FEATURE = None
"""Behind the last known save: no hook has it."""

_OPEN_COST = 0.3
"""Of any gap: fewer edits are likelier than more."""
_HOOK_COST = 1.5
"""Of each hook more in a short gap, whose lengths fall off quickly ..."""
_LONG_COST = 2.5
"""... and of a long one, before its log: layers are left out as a whole."""
_REPEAT_COST = 5.0
"""Of going back to what came already: a layer that runs twice is rarer than one that is left out."""
_REPLACED_COST = 0.5
"""Of each hook that another took the place of."""


class _Chain(NamedTuple):
    """Matches in order, by their last."""

    score: float
    observed: int
    """Counted from where the step began to deviate."""
    place: int
    """Of its last match: how many known saves come before it."""
    run: int
    """How many of the last matches followed each other without a gap."""


class Matcher:
    """Aligns steps with one known step. Not thread-safe.

    A step without an edit is matched one to one. Otherwise saves are matched mostly in their order: neighbours that changed
    places both match, and so does a part that comes later than it was known. A known save is given away once, and each of its
    uses once. Work per hook: O(1) while aligned; otherwise a binary search among a feature's places for each of MAX_CHAINS
    chains, and a comparison with each chain for the two places at most that it adds.
    """

    def __init__(self, known: StepRecord) -> None:
        self._hook_of = [hook for hook, save in enumerate(known.save_of) if save == NOT_A_USE]
        features = [known.features[hook] for hook in self._hook_of]
        self._features = [*features, _NO_FEATURE]
        self._weight = {feature: log(1 + len(features) / count) for feature, count in Counter(features).items()}
        self._places: dict[Hashable, list[int]] = {}
        for place, feature in enumerate(features):
            self._places.setdefault(feature, []).append(place)
        self._uses: dict[int, list[int]] = {}
        for hook, save in enumerate(known.save_of):
            if save >= 0:
                self._uses.setdefault(save, []).append(hook)
        self.begin_step()

    def begin_step(self, aligned: int = 0) -> None:
        """A new step, whose first `aligned` hooks are those of the known step; the next one is the first to be asked about."""
        self._next = self._aligned_from = bisect_left(self._hook_of, aligned)
        """While aligned: the place that is expected, and the first one since when nothing deviated."""
        self._chains: list[_Chain] = []
        """Empty while aligned."""
        self._observed = 0
        self._given = bytearray(b"\1" * self._next + b"\0" * (len(self._hook_of) - self._next))
        """By place, whether it was given away; those since `_aligned_from` are marked when something deviates."""
        self._aligned_hooks = aligned
        self._uses_given: dict[int, int] = {}

    def match(self, feature: Hashable) -> int | None:
        """Number of the known hook that a save with this feature is; None: it is none of them."""
        place = self._next
        if feature == self._features[place]:
            self._next = place + 1
            return self._hook_of[place]
        return self._match_deviating(feature)

    def match_use(self, save: int | None) -> int | None:
        """Number of the known hook that a use is. `save` is what `match` said of the hook that saved it.

        None: nothing is known of what it uses, or it is used more often than the known step did.
        """
        if save is None:
            return None
        uses = self._uses.get(save, ())
        given = self._uses_given.get(save)
        if given is None:
            given = bisect_left(uses, self._aligned_hooks)
        if given >= len(uses):
            return None
        self._uses_given[save] = given + 1
        return uses[given]

    @property
    def is_deviating(self) -> bool:
        """Whether what comes next is in doubt: a few hooks after an edit it is not any more."""
        return bool(self._chains)

    # --- deviating

    def _match_deviating(self, feature: Hashable) -> int | None:
        if not self._chains:
            self._leave_alignment()
        self._observed += 1
        self._chains = self._continued(feature)
        best = self._chains[0]
        if best.observed != self._observed:
            return None
        hook = self._give(best.place)
        if best.run >= STEADY_RUN and self._given.find(1, best.place + 1) < 0:
            self._align_behind(best.place)
        return hook

    def _continued(self, feature: Hashable) -> list[_Chain]:
        """The explanations now that a save with this feature came, the best one first: at a tie one in which it matches."""
        places = self._places.get(feature, ())
        candidates = set[int]()
        for chain in self._chains:  # the nearest place on each side: further ones are reached through chains that end nearer
            behind = bisect_left(places, chain.place)
            ahead = bisect_right(places, chain.place, behind)
            candidates.update(places[max(0, behind - 1) : behind], places[ahead : ahead + 1])
        weight = self._weight.get(feature, 0.0)
        old, new = list(self._chains), list[_Chain]()
        for place in sorted(candidates):
            score, run, last = max(
                (chain.score - self._cost(chain, place), chain.run, chain) for chain in self._chains if chain.place != place
            )
            follows = last.observed == self._observed - 1 and last.place == place - 1
            new.append(_Chain(score + weight, self._observed, place, run + 1 if follows else 1))
            if follows and last in old:
                old.remove(last)  # whatever it explains, its continuation explains better
        return sorted(new + old, key=_score, reverse=True)[:MAX_CHAINS]

    def _cost(self, chain: _Chain, place: int) -> float:
        """Of a match of the save that came now with `place`, next in `chain`."""
        observed, known = self._observed - chain.observed - 1, place - chain.place - 1
        if known >= 0:
            return _gap(observed, known)
        return _OPEN_COST + _skip(-known) + _REPEAT_COST * self._given[place]

    def _give(self, place: int) -> int | None:
        if self._given[place]:
            return None
        self._given[place] = 1
        return self._hook_of[place]

    def _leave_alignment(self) -> None:
        place = self._next
        self._given[self._aligned_from : place] = b"\1" * (place - self._aligned_from)
        self._chains = [_Chain(0.0, 0, place - 1, 0)]
        self._observed = 0
        self._next = len(self._hook_of)  # where no feature is expected

    def _align_behind(self, place: int) -> None:
        self._chains = []
        self._next = self._aligned_from = place + 1


def _score(chain: _Chain) -> float:
    return chain.score


def _gap(observed: int, known: int) -> float:
    """What it costs to leave out this many observed and known saves between two matches."""
    if observed == known == 0:
        return 0.0
    # The observed ones were inserted and the known ones left out, or the ones replace the others.
    return _OPEN_COST + min(_skip(known), _skip(abs(known - observed)) + _REPLACED_COST * min(known, observed))


def _skip(count: int) -> float:
    return min(_HOOK_COST * (count - 1), _LONG_COST + log(count)) if count else 0.0
