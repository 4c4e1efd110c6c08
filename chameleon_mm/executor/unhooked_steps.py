"""Decides which steps of a session run without its hooks: those that are expected to move nothing, with memory to spare.

    unhooked = UnhookedSteps(executor, device.hook_switch(save))
    if unhooked.begin(hbm_budget_bytes): ...   # the step runs as plain PyTorch
    kind = unhooked.end(completed=...)         # the hooks are back
    unhooked.note(kind)                        # of each step that had them

A step without hooks is not watched, so it has to be one of a long row of equal steps whose plan moves nothing; the allocator
must have reserved little of the budget; and some steps of the row have hooks all the same. Where such a step wants more memory
than the allocator has, the hooks are back from that operator on, and what it saves goes by the default rule: `switch.cpp`.
"""

from __future__ import annotations

from chameleon_mm.device.protocols import HookSwitch
from chameleon_mm.executor.executor import Executor
from chameleon_mm.process import ThisProcess
from chameleon_mm.saved.timed_spans import StepKind

STEPS_BEFORE = 16
"""Steps in a row that followed, hook for hook, a plan that moves nothing, before one runs without hooks."""

MOST_STEPS_BEFORE = 1024
"""The most of them, where such steps keep getting their hooks back."""

MOST_UNHOOKED = 63
"""Steps in a row without hooks, before one that has them, and is timed."""

RESERVED_DIVISOR = 8
"""The budget by this is what the allocator may have reserved as a step without hooks begins."""


class UnhookedSteps:
    """Counts the steps that move nothing, and has others like them run without hooks. The thread that trains begins and ends
    them."""

    def __init__(self, executor: Executor, switch: HookSwitch | None) -> None:
        """`switch`: the switch of the executor's hooks; None: every step has them."""
        self._executor = executor
        self._switch = switch
        self._in_a_row = self._unhooked = 0
        self._needed = STEPS_BEFORE
        """Steps in a row before the next one without hooks: doubled after each that got its hooks back or failed; reset by a
        sample that moves nothing."""
        self.running = False
        """Whether a step runs that began without hooks."""
        self._are_off = False
        """Whether the hooks may be off on some thread: an interrupt, or the end of a step on another thread, left them so."""
        self.is_sample = False
        """Whether the step that runs has hooks as a sample of those that have none."""

    def begin(self, hbm_budget_bytes: int, *, hooked: bool = False) -> bool:
        """Take the hooks off for the step that begins within that budget, if it is expected to move nothing. Returns whether
        they are off. `hooked`: they stay, as somebody wants them, or the device may not be asked."""
        switch, executor = self._switch, self._executor
        if self._are_off:
            self.running = False
            self.put_back()
        if hooked or switch is None or self._in_a_row < self._needed:
            return False
        self.is_sample = self._unhooked >= MOST_UNHOOKED
        if self.is_sample or len(executor.parts.registry) or executor.parts.outs.have_work:
            return False
        self.running = self._are_off = True  # first: an interrupt may come as they are off
        now = switch.off(hbm_budget_bytes // RESERVED_DIVISOR)
        if now is None:
            self.running = self._are_off = False
            return False
        executor.budget.peak_seen_bytes, executor.budget.peak_at_begin_bytes = now
        executor.budget.headroom.end_step(completed=False)  # checks after hooks come back cannot be compared with earlier ones
        executor.metrics.step = None  # it is not timed
        return True

    def end(self, *, completed: bool) -> StepKind | None:
        """Put the hooks back as the step ends. Returns its kind; None in a forked child, whose device it is not."""
        stayed_off = self.put_back()
        self.running = False
        self._unhooked += 1
        if not completed or not stayed_off:
            self.begin_anew()
            self._needed = min(2 * self._needed, MOST_STEPS_BEFORE)
        if ThisProcess.pid != self._executor.hook_lock.pid:
            return None
        kind = StepKind.FAILED if not completed else StepKind.UNHOOKED if stayed_off else StepKind.BY_RULE
        self._executor.metrics.totals.steps_by_kind[kind] += 1  # as `Metrics.end_step` of one that is not timed
        if not stayed_off:
            self._executor.end_part()
        return kind

    def put_back(self) -> bool:
        """Put the hooks back, if they are off on the calling thread. Returns whether they were off all the time, and the
        allocator had all that was asked of it."""
        were_off = None if self._switch is None else self._switch.on()
        self._are_off = self._are_off and were_off is None
        return bool(were_off)

    def note(self, kind: StepKind | None) -> None:
        """Note that a step has ended that had hooks, of `kind`; None: nobody knows."""
        moved_nothing = kind is StepKind.PLANNED and self._executor.director.moves_nothing
        if self.is_sample and moved_nothing:
            self._needed = STEPS_BEFORE
        self._unhooked, self.is_sample = 0, False
        self._in_a_row = self._in_a_row + 1 if moved_nothing else 0

    def begin_anew(self) -> None:
        """Start counting again: the budget has changed, or the steps may differ now."""
        self._in_a_row = self._unhooked = 0
