"""The actions of one step and their hooks: `SwapPlan`, data that the executor carries out and `simulate` predicts.

At one hook, in this order:
    1. compute waits for the copies out whose `reclaim_at` it is, in the plan's order, and their HBM is dropped; so is, without
       a copy, what is to be recomputed or what the host has since an earlier action, and whose `reclaim_at` it is
    2. copies out whose `out_at` it is are queued, in the plan's order
    3. a use whose tensor is on the host: memory is taken, the copy back queued ahead of others; compute waits for it. A use
       whose tensor was dropped: the same for all that the recomputation reads and that is on the host
    4. other copies back whose `in_at` it is: memory is taken and they are queued, in the plan's order
    5. a use whose tensor was dropped: the operators that recompute it run
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from chameleon_mm.trace import Trace


class ActionKind(enum.Enum):
    """Ways to keep a candidate off the device until its first use in backward, or between two uses."""

    SWAP = "swap"
    """The candidate crosses the link as it is."""
    RECOMPUTE = "recompute"
    """The candidate is dropped at `reclaim_at`, and recomputed at `in_at`, which is `use_at`: its own first use, or an earlier
    one of another dropped storage that is made from it."""
    HOLD = "hold"
    """The storage, which autograd did not save, is kept from `out_at` on, the first hook at which it is whole, for the
    recomputations that read it, from `use_at` on. It may be swapped meanwhile: then it has an action for that as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """Way of one candidate out and back. Hooks are numbered as in the trace. Raises `ValueError` unless they are in order.

    A storage may have several, one before the other, where it is swapped: all of it moves then.
    """

    tensor: int
    """Number of the candidate in the trace."""
    nbytes: int
    """Number of its bytes that move: its last ones. The rest, if any, stays on the device, in memory of its own."""
    out_at: int
    """Hook at which its copy out is queued."""
    reclaim_at: int
    """Hook at which compute is made to wait for that copy, and its HBM goes back."""
    in_at: int
    """Hook at which its HBM is taken again and the copy back queued: `use_at` at the latest."""
    use_at: int
    """Hook of the use for which it is back: its first one, or a later one."""
    kind: ActionKind = ActionKind.SWAP
    again: bool = False
    """Whether an earlier action of the plan moves it too. The host has its bytes since then: nothing is copied out, and at
    `reclaim_at` its HBM is dropped without a wait."""

    def __post_init__(self) -> None:
        if not 0 <= self.out_at <= self.reclaim_at <= self.in_at <= self.use_at:
            raise ValueError(
                f"action for tensor {self.tensor}: expected 0 <= out_at <= reclaim_at <= in_at <= use_at, got {self.out_at}, "
                f"{self.reclaim_at}, {self.in_at}, {self.use_at}"
            )
        if self.nbytes < 1:
            raise ValueError(f"action for tensor {self.tensor}: expected 1 byte or more to move, got {self.nbytes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapPlan:
    """The actions for one step, and what they are expected to come to. No actions: nothing moves."""

    fingerprint: int
    """Fingerprint of the trace it was made for."""
    num_hooks: int
    """Number of hooks of that trace."""
    actions: tuple[Action, ...]
    """Actions in the order in which they are queued, each direction's own: by `out_at`, and by `in_at`. First what is swapped,
    then what is recomputed, then what is held."""
    hbm_budget_bytes: int
    peak_bytes: int
    """Peak of device memory, as `simulate` has it."""
    host_bytes: int
    """The most pinned memory."""
    step_us: float
    """Time of the step, as `simulate` has it."""
    stall_us: float
    """Time of `step_us` in which compute waits for copies."""
    recompute_us: float = 0.0
    """Time of `step_us` in which operators of forward run again."""

    @property
    def swaps(self) -> tuple[Action, ...]:
        """Actions of what crosses the link."""
        if not self.actions or self.actions[-1].kind not in _NO_COPIES:  # those come last
            return self.actions
        return tuple(action for action in self.actions if action.kind not in _NO_COPIES)

    @property
    def recomputed(self) -> tuple[Action, ...]:
        """Actions of what is dropped and recomputed."""
        return self._of_kind(ActionKind.RECOMPUTE)

    @property
    def held(self) -> tuple[Action, ...]:
        """Actions of what is held for others to be recomputed from it."""
        return self._of_kind(ActionKind.HOLD)

    @property
    def moved_bytes(self) -> int:
        """Bytes that cross the link to the host. As many come back, and once more what is away more than once."""
        return sum(action.nbytes for action in self.swaps if not action.again)

    def check_made_for(self, trace: Trace) -> None:
        """Raise `ValueError` unless it was made for `trace`, as far as its fingerprint and its hooks tell."""
        if self.fingerprint != trace.fingerprint or self.num_hooks != len(trace.hook_tick):
            raise ValueError(
                f"plan: expected one for fingerprint {trace.fingerprint:#x} and {len(trace.hook_tick)} hooks, as this trace, "
                f"got one for {self.fingerprint:#x} and {self.num_hooks}; make a plan for this trace"
            )

    def head_copy_us(self, unswapped_us: float) -> float:
        """Time in which compute copies what stays of storages that move in part; the step takes `unswapped_us` unplanned."""
        return self.step_us - self.stall_us - self.recompute_us - unswapped_us

    def _of_kind(self, kind: ActionKind) -> tuple[Action, ...]:
        if not self.actions or self.actions[-1].kind not in _NO_COPIES:
            return ()
        return tuple(action for action in self.actions if action.kind is kind)


_NO_COPIES = (ActionKind.RECOMPUTE, ActionKind.HOLD)
