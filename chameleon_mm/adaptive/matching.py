"""Matches the hooks of a running step with those of a cached one: online, by features, one call per hook.

    matcher = Matcher(record of the cached step); matcher.begin_step(aligned=hooks that agreed so far)
    save:  hook = matcher.match(feature)             # number of the cached step's hook, or None
    use:   matcher.match_use(hook)                   # through the save that it uses; None where that is unknown

    aligned:    the save is as the cached step's next one was: that is it
    diverging:  a few chains of matches, each given by its last; the positions of saves like this one next to each are tried:
                    score(position) = max over chains of score(chain) + evidence(chain, position) - gap(observed, cached)
                the best chain ends here: a match; it ends earlier: an inserted save. Aligned again after a run without a gap
    evidence:   how rare around that position is what agrees, less what does not: how many operators ran since the last save,
                and whether the storage is the one that the chain's earlier matches took for the cached save's

Chaining of anchors as in minimap2 (Li 2018, https://doi.org/10.1093/bioinformatics/bty191), done online. Features are relative,
so an edit changes those of saves that are no part of it: one save more, and each storage that was saved before it and is saved
again behind it was saved one hook longer ago. So they are split here and hooks are counted, uses too: the save that "so many
hooks ago" names is the same as it was.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import count
from math import inf, log
from typing import NamedTuple

from chameleon_mm.adaptive.save_index import FIXED, Pairs, RunningSave, SaveIndex, split_feature
from chameleon_mm.profiler.light import FIXED_STORAGE, NEW_STORAGE
from chameleon_mm.profiler.step_record import NOT_A_USE, Feature, StepRecord

MAX_CHAINS = 8
STEADY_RUN = 8
"""Number of matches without a gap after which the other explanations are dropped ..."""
CLEAR_LEAD = 4.0
"""... if the best one leads by this score. Scores are logs of how much likelier one explanation is than another; what follows
was fitted to edited steps of three families of models."""

_HOPELESS = 25.0
"""Difference of scores by which an explanation may be worse than the best before it is dropped."""
_DOUBT = 0.1
"""Difference of scores within which another explanation counts as good, so that a jump is not believed."""
_TAKEN_BACK = 4
"""Matches before a divergence that may be explained otherwise: of two equal saves the first may be the inserted one."""
_MOST_IN_DOUBT = 256
"""Storages about which explanations may differ, each counted twice: beyond it the best one is taken for true."""

_OPEN_COST = 0.1
"""Cost of any gap: fewer edits are likelier than more. What was inserted costs nothing else: it may be anything."""
_FIRST_COST = 0.95
"""Cost of a cached hook that is left out; times the log of how many are left out, ..."""
_MORE_COST = 1.35
"""... this cost in addition: what one operator saves was edited together."""
_OPERATOR_HOOKS = 6
"""Number of hooks that one operator saves at most, but for a few. A longer gap is of several edits, or of a layer: ..."""
_HOOK_COST = 0.3
"""... each hook costs this much more, ..."""
_LAYER_COST = 6.0
"""... up to this cost: layers are left out as a whole."""
_REPLACED_COST = 0.55
_REPEAT_COST = 3.6
"""Cost of going back to what came already: what runs twice is rarer than what is left out, ..."""
_WAY_BACK_COST = 0.5
"""... and of each hook beyond an operator's ..."""
_WAY_BACK_HOOKS = 10
"""... up to this number."""

_SILENT_COST = 2.3
"""Cost, next to the chain's last match, of one operator more or less since the last save: one without saves was edited ..."""
_OPERATORS_COST = 8.0
"""... and of any other difference in operators."""
_OTHER_START_COST = 1.0
"""Cost of another number of operators behind a gap, where it counts from another save than it did."""


class _Chain(NamedTuple):
    """A chain of matches in order, given by its last."""

    score: float
    observed: int
    """Number of the running save, counted from where the step began to diverge; 0 and below: before it."""
    position: int
    """Position of its last match: how many saves of the cached step come before it."""
    run: int
    """Number of the last matches that followed each other without a gap."""
    pairs: Pairs
    """Storages of this step paired with the cached step's. Chains share them: not to be changed."""


class Matcher:
    """Aligns steps with one cached step. Not thread-safe.

    Hooks are counted here: every one of the running step behind those that agreed is to be told, in order.

    A step without an edit is matched one to one. Otherwise saves are matched mostly in their order: neighbours that changed
    places both match, and so does a part that comes later than in the cached step. A cached save is matched once, and each of
    its uses once, and only with a save of its signature: class, sizes, dtype, whether anybody moves it, whether a backward
    saves it. Work per hook: O(1) while aligned. Otherwise, for each of MAX_CHAINS chains, a binary search in three lists of
    positions, and for each of the six positions at most that these add a comparison with each chain, and a copy of what that
    chain knows of storages, which is bounded.
    """

    def __init__(self, known: StepRecord) -> None:
        self._hook_of = [hook for hook, save in enumerate(known.save_of) if save == NOT_A_USE]
        self._saves = SaveIndex(known, self._hook_of)
        self._uses: dict[int, list[int]] = {}
        for hook, save in enumerate(known.save_of):
            if save >= 0:
                self._uses.setdefault(save, []).append(hook)
        self.begin_step()

    def begin_step(self, aligned: int = 0) -> None:
        """Begin a step whose first `aligned` hooks are those of the cached step; the next one is the first to be asked
        about."""
        self._next = self._aligned_from = bisect_left(self._hook_of, aligned)
        """The position that is expected while aligned, and the first one since when nothing diverged."""
        self._in_order_from = 0
        """The first position from which on the matches before a divergence followed each other."""
        self._chains: list[_Chain] = []
        """Chains of matches; empty while aligned."""
        self._observed = 0
        self._given = bytearray(b"\1" * self._next + b"\0" * (len(self._hook_of) - self._next))
        """Whether each position was matched; those since `_aligned_from` are marked when something diverges."""
        self._storage_of, self._pairs = self._saves.as_running(aligned)
        """Storage of each save, by hook of this step; and while aligned, its pairs with the cached step's."""
        self._storages = count(2 * self._saves.num_storages)
        """Numbers for storages that are new."""
        self._aligned_hooks = aligned
        self._uses_given: dict[int, int] = {}

    def match(self, feature: Feature) -> int | None:
        """Number of the cached step's hook that a save with this feature is; None: it is none of them."""
        save = self._seen(feature)
        position, known = self._next, self._saves
        as_known = save.signature == known.signatures[position] and save.operators == known.operators[position]
        if as_known and not known.storage_cost(position, save, self._pairs):
            self._pairs.add(save.storage, known.storages[position])
            self._next = position + 1
            return self._hook_of[position]
        return self._match_diverging(save)

    def match_use(self, save: int | None) -> int | None:
        """Number of the cached step's hook that a use is. `save` is what `match` said of the hook that saved it.

        None: nothing is known of what it uses, or it is used more often than the known step did.
        """
        self._storage_of.append(FIXED)
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

    def _seen(self, feature: Feature) -> RunningSave:
        signature, operators, since = split_feature(feature)
        if since == NEW_STORAGE:
            storage = next(self._storages)
        else:
            storage = FIXED if since == FIXED_STORAGE else self._storage_of[-since]
        self._storage_of.append(storage)
        return RunningSave(signature, operators, storage, since == NEW_STORAGE)

    # --- deviating

    def _match_diverging(self, save: RunningSave) -> int | None:
        if not self._chains:
            self._leave_alignment()
        self._observed += 1
        self._chains = self._continued(save)
        best = self._chains[0]
        lead = best.score - self._chains[1].score if len(self._chains) > 1 else _HOPELESS
        if best.observed != self._observed or (best.run == 1 and lead < _DOUBT):
            return None
        hook = None if self._given[best.position] else self._hook_of[best.position]
        self._given[best.position] = 1
        if len(best.pairs) > _MOST_IN_DOUBT:
            self._chains = [best._replace(pairs=best.pairs.settle())]
        if best.run >= STEADY_RUN and lead > CLEAR_LEAD and self._given.find(1, best.position + 1) < 0:
            self._align_behind(best)
        return hook

    def _continued(self, save: RunningSave) -> list[_Chain]:
        """Explanations after this save, the best one first: at a tie one in which it matches."""
        old, new = list(self._chains), list[_Chain]()
        for position in sorted(self._candidates(save)):
            score, last = self._continuing(position, save)
            follows = self._follows(last, position)
            pairs = last.pairs.with_pair(save.storage, self._saves.storages[position])
            new.append(_Chain(score, self._observed, position, last.run + 1 if follows else 1, pairs))
            if follows and score >= last.score and last in old:
                old.remove(last)  # whatever it explains, its continuation explains better
        best = sorted(new + old, key=_by_score, reverse=True)[:MAX_CHAINS]
        return [chain for chain in best if chain.score > best[0].score - _HOPELESS]

    def _candidates(self, save: RunningSave) -> set[int]:
        """The nearest positions of saves like this one on each side of a chain: chains that end nearer reach further ones."""
        positions = set[int]()
        for chain in self._chains:
            for alike in self._saves.positions_like(save, chain.pairs):
                behind = bisect_left(alike, chain.position)
                ahead = bisect_right(alike, chain.position, behind)
                positions.update(alike[max(0, behind - 1) : behind], alike[ahead : ahead + 1])
        return positions

    def _continuing(self, position: int, save: RunningSave) -> tuple[float, _Chain]:
        """The best score of a match of `save` at `position`, and the chain that it continues."""
        most = self._saves.most_weight(position)
        best, last = -inf, self._chains[0]
        for chain in self._chains:  # the best one first
            if chain.score + most < best:
                break
            score = self._score(chain, position, save)
            if score > best or (score == best and chain.run > last.run):
                best, last = score, chain
        return best, last

    def _score(self, chain: _Chain, position: int, save: RunningSave) -> float:
        if chain.position == position:
            return -inf
        known = self._saves
        cost = known.storage_cost(position, save, chain.pairs)
        evidence = known.weight(position, save.operators, same_storage=not cost)
        if save.operators != known.operators[position]:
            if not self._follows(chain, position):
                cost += _OTHER_START_COST
            else:
                cost += _SILENT_COST if abs(save.operators - known.operators[position]) == 1 else _OPERATORS_COST
        return chain.score + evidence - cost - self._gap(chain, position)

    def _follows(self, chain: _Chain, position: int) -> bool:
        return chain.observed == self._observed - 1 and chain.position == position - 1

    def _gap(self, chain: _Chain, position: int) -> float:
        """Cost of leaving out the hooks between the last match of `chain` and one of the save that came now."""
        observed, known = self._observed - chain.observed - 1, position - chain.position - 1
        if observed == known == 0:
            return 0.0
        if known >= 0:
            # The observed ones were inserted and the known ones left out, or the ones replace the others.
            return _OPEN_COST + min(_skip(known), _skip(abs(known - observed)) + _REPLACED_COST * min(known, observed))
        cost = _OPEN_COST + _skip(-known)
        if self._given[position]:
            cost += _REPEAT_COST + _WAY_BACK_COST * min(max(0, -known - _OPERATOR_HOOKS), _WAY_BACK_HOOKS)
        return cost

    def _leave_alignment(self) -> None:
        position, known = self._next, self._saves
        self._given[self._aligned_from : position] = b"\1" * (position - self._aligned_from)
        self._observed = 0
        self._next = len(self._hook_of)  # where no save is expected
        score, pairs = 0.0, self._pairs.settle()
        self._chains = [_Chain(score, 0, position - 1, 0, pairs)]
        for back in range(min(_TAKEN_BACK, position - self._in_order_from)):
            taken = position - 1 - back
            score -= known.weight(taken, known.operators[taken], same_storage=True)
            if known.is_first[taken]:
                pairs = pairs.without(known.storages[taken])
            self._chains.append(_Chain(score, -1 - back, taken - 1, 0, pairs))

    def _align_behind(self, chain: _Chain) -> None:
        self._chains = []
        self._next = self._aligned_from = self._in_order_from = chain.position + 1
        self._pairs = chain.pairs.settle()


def _by_score(chain: _Chain) -> float:
    return chain.score


def _skip(hooks: int) -> float:
    """Cost of leaving out so many cached hooks together."""
    if not hooks:
        return 0.0
    return _FIRST_COST + _MORE_COST * log(hooks) + min(_HOOK_COST * max(0, hooks - _OPERATOR_HOOKS), _LAYER_COST)
