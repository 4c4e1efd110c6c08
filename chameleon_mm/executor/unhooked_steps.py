"""Decides which steps of a session run without its hooks: those that are expected to move nothing, with memory to spare.

    unhooked = UnhookedSteps(executor, device.hook_switch(save))
    if unhooked.begin(): ...                   # the step runs as plain PyTorch
    kind = unhooked.end(completed=...)         # the hooks are back
    unhooked.note(kind)                        # of each step that had them

A step without hooks is not watched, so it has to be one of a long row of equal steps whose plan moves nothing; the allocator
must have reserved little of the budget; and some steps of the row have hooks all the same. Where such a step wants more memory
than the allocator has, the hooks are back from that operator on, and what it saves goes by the default rule: `switch.cpp`.
"""

from __future__ import annotations

from chameleon_mm.device.protocols import HookSwitch
from chameleon_mm.executor.executor import Executor
from chameleon_mm.saved.timed_spans import StepKind

STEPS_BEFORE = 16
"""Steps in a row that followed, hook for hook, a plan that moves nothing, before one runs without hooks."""

MOST_STEPS_BEFORE = 1024
"""The most of them, where such steps keep getting their hooks back."""

MOST_UNHOOKED = 63
"""Steps in a row without hooks, before one that has them, and is timed."""

RESERVED_PART = 8
"""Part of the budget, one in so many, that the allocator may have reserved: a step without hooks takes no more than that."""


class UnhookedSteps:
    """Counts the steps that move nothing, and has others like them run without hooks. The thread that trains begins and ends
    them."""

    def __init__(self, executor: Executor, switch: HookSwitch | None) -> None:
        """`switch`: the switch of the executor's hooks; None: every step has them."""
        self._executor = executor
        self._switch = switch
        self._in_a_row = self._unhooked = 0
        self._needed = STEPS_BEFORE
        """Steps in a row before the next one without hooks: twice as many after each that got them back."""
        self.running = False
        """Whether a step runs that began without hooks."""
        self.samples = False
        """Whether the step that runs has hooks as a sample of those that have none."""

    def begin(self, hbm_budget_bytes: int) -> bool:
        """Take the hooks off for the step that begins within that budget, if it needs none, where the device may be asked.
        Returns whether they are off."""
        switch, executor = self._switch, self._executor
        if switch is None or self._in_a_row < self._needed:
            return False
        self.samples = self._unhooked >= MOST_UNHOOKED
        if self.samples or len(executor.parts.registry) or executor.parts.outs.have_work:
            return False
        if self.running:  # an interrupt came as the step before ended
            switch.on()
        self.running = True  # first: an interrupt may come as they are off
        now = switch.off(hbm_budget_bytes // RESERVED_PART)
        if now is None:
            self.running = False
            return False
        executor.budget.peak_seen_bytes, executor.budget.peak_at_begin_bytes = now
        executor.budget.headroom.end_step(completed=False)  # where hooks come back in the middle, no check is like one before
        executor.metrics.step = None  # it is not timed
        return True

    def end(self, *, completed: bool) -> StepKind:
        """Put the hooks back as the step ends. Returns its kind."""
        stayed_off = self._switch is not None and self._switch.on()
        self.running = False
        self._unhooked += 1
        if not stayed_off:
            self._executor.end_part()
        if not completed or not stayed_off:
            self.begin_anew()
            self._needed = min(2 * self._needed, MOST_STEPS_BEFORE)
        kind = StepKind.FAILED if not completed else StepKind.UNHOOKED if stayed_off else StepKind.BY_RULE
        self._executor.metrics.totals.steps_by_kind[kind] += 1  # as `Metrics.end_step` of one that is not timed
        return kind

    def put_back(self) -> None:
        """Put the hooks back, if they are off on the calling thread."""
        if self._switch is not None:
            self._switch.on()

    def note(self, kind: StepKind | None) -> None:
        """Note that a step has ended that had hooks, of `kind`; None: nobody knows."""
        moved_nothing = kind is StepKind.PLANNED and self._executor.director.moves_nothing
        if self.samples and moved_nothing:
            self._needed = STEPS_BEFORE
        self._unhooked, self.samples = 0, False
        self._in_a_row = self._in_a_row + 1 if moved_nothing else 0

    def begin_anew(self) -> None:
        """Have hooks in the next steps: another budget holds for them, or they may be others."""
        self._in_a_row = self._unhooked = 0
