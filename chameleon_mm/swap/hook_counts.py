"""Counts of hooks, inside and between steps. They show misuse of a session.

counts.saves += 1; counts.uses += 1              # at every hook of autograd
counts.begin_step(session's own hook); counts.end_step(completed=...)
misuse(counts, thread="MainThread")              # -> "session.step() was never called: ..."
"""

from __future__ import annotations

import logging

import torch

from chameleon_mm.record.dispatch_state import saved_tensor_hooks_on_top
from chameleon_mm.units import format_size

_log = logging.getLogger(__name__)

UNNAMED_STEPS = 16
"""Number of backward passes without a step before a warning. Some are allowed: gradients may be accumulated."""


class HookCounts:
    """Hooks and steps since the executor began.

    Several threads may run hooks at once, so increments may be lost. Only the difference between zero and non-zero is reliable.
    """

    def __init__(self) -> None:
        self.steps = 0
        """Number of completed steps. The counts below named `steps_` are among these."""
        self.steps_without_saves = 0
        self.steps_without_uses = 0
        """Steps with saves but without uses."""
        self.steps_without_gradients = 0
        """Steps without saves that began with gradients disabled."""
        self.steps_under_others = 0
        """Steps without saves that began with other hooks on top of the session's."""
        self.saves_between = 0
        """Number of saves outside of steps."""
        self.uses_between = 0
        self.saves = self.uses = 0
        """Numbers of hooks since the last step began or ended. The hooks count here."""
        self.expects_steps = False
        """True if the user should begin steps; a warning follows if no step begins."""
        self.was_told = False
        self.attached: str | None = None
        """Class of the attached model, whose steps begin automatically; None: the user begins steps."""
        self.trained_on: str | None = None
        """Latest thread, other than the attached one, on which the optimizer stepped; None: there is none."""
        self._any_begun = False
        self._unnamed_steps = 0
        self._in_step: tuple[bool, bool] | None = None
        """State as the running step began: gradients were enabled; the session's hooks were on top. None: no step runs."""

    def begin_step(self, pack_hook: object) -> None:
        """Begin a step, on this thread. `pack_hook`: pack hook that autograd should call; None: unknown."""
        self.count_between_steps()
        self._any_begun = True
        top = saved_tensor_hooks_on_top()
        on_top = pack_hook is None or top is None or top[0] is pack_hook
        self._in_step = torch.is_grad_enabled() and not torch.is_inference_mode_enabled(), on_top

    def end_step(self, *, completed: bool) -> None:
        if completed and self._in_step is not None:
            gradients, on_top = self._in_step
            self.steps += 1
            if not self.saves:
                self.steps_without_saves += 1
                self.steps_without_gradients += not gradients
                self.steps_under_others += not on_top
            elif not self.uses:
                self.steps_without_uses += 1
        self.saves = self.uses = 0
        self._in_step = None

    def end_unnamed_step(self) -> None:
        """Count a step without `begin_step`, when its last saved tensor is released. Warn once if all steps are such steps."""
        self._unnamed_steps += 1
        if self._unnamed_steps == UNNAMED_STEPS and self.expects_steps and not self._any_begun:
            self.was_told = True
            _log.warning("chameleon_mm: %s", NEVER_CALLED)

    def count_between_steps(self) -> None:
        """Add hooks since the last step to the counts between steps. Inside a step, do nothing."""
        if self._in_step is None:
            self.saves_between += self.saves
            self.uses_between += self.uses
            self.saves = self.uses = 0


_STEP = "`with session.step():`"
_ATTACH_INSIDE = (
    "attach inside of them, and several models at once, as attach(nn.ModuleList([a, b])): each attach enters hooks of its own"
)

NEVER_CALLED = (
    f"session.step() was never called: everything was swapped by the default rule, with no plan and nothing timed; put each "
    f"optimizer step, forward and backward, inside {_STEP}"
)


def misuse(counts: HookCounts, *, steps_begun: int, closed: bool, thread: str, frozen: bool) -> str | None:
    """Return a message about misuse of the session, with a remedy; None if it is not misused.

    `closed`: the session's `with` block has ended. `thread`: name of the thread that entered it. `frozen`: the session knows
    the model, and none of its parameters requires a gradient.
    """
    counts.count_between_steps()
    if counts.trained_on is not None and not counts.steps:
        return (
            f"attach was called on the thread {thread}, and the optimizer steps on {counts.trained_on}, so nothing can be "
            f"swapped: hooks are each thread's own; call attach on the thread that trains"
        )
    if not steps_begun:
        return _without_steps(counts, closed=closed, thread=thread)
    if counts.steps and counts.steps_without_saves == counts.steps:
        return _without_saves(counts, thread=thread, frozen=frozen)
    if counts.steps_without_uses and counts.uses_between:
        return (
            f"in {counts.steps_without_uses} of {counts.steps} steps the forward ran inside of the step and the backward "
            f"outside, where no plan reaches; put forward and backward of an optimizer step inside the same {_STEP}"
        )
    return None


def limits_problem(hbm_budget_bytes: int, capacity_bytes: int, host_bytes: int, min_bytes: int) -> str | None:
    """Return a sentence about limits with which nothing can ever move; None: something may move."""
    if hbm_budget_bytes > capacity_bytes:
        return (
            f"hbm_budget: expected at most the device's {format_size(capacity_bytes)}, got {format_size(hbm_budget_bytes)}, so "
            f"plans swap nothing before memory runs out; lower it"
        )
    if host_bytes < min_bytes:
        return (
            f"host_budget: expected at least min_bytes, {format_size(min_bytes)}, the least storage that moves, got "
            f"{format_size(host_bytes)}, so nothing can be pinned; raise it"
        )
    return None


def _without_steps(counts: HookCounts, *, closed: bool, thread: str) -> str | None:
    if counts.attached is not None:
        if not closed and not counts.saves_between:
            return None
        return (
            f"no step was found, so nothing was planned: neither the attached {counts.attached} nor a child of it was called "
            f"on the thread {thread} with gradients on; attach the module that the training loop calls, on the loop's thread"
        )
    if counts.saves_between:
        return NEVER_CALLED
    if not closed:
        return None
    return (
        f"session.step() was never called, and autograd saved nothing on the thread that entered the session ({thread}), so "
        f"nothing could be swapped; run the training loop on that thread inside `with session:`, each optimizer step inside "
        f"{_STEP}"
    )


def _without_saves(counts: HookCounts, *, thread: str, frozen: bool) -> str:
    """Return the probable reason why no step saved a tensor."""
    said = f"no hook of this session ran in any of its {counts.steps} steps, so nothing could be swapped: "
    if frozen:
        return f"{said}the model has no parameter that requires a gradient; thaw what it should train, or use no session"
    if counts.saves_between:
        return f"{said}the forward ran between the steps; put forward and backward of each optimizer step inside {_STEP}"
    if counts.steps_without_gradients == counts.steps:
        return f"{said}gradients were off as each step began; train outside of torch.no_grad() and torch.inference_mode()"
    if counts.steps_under_others == counts.steps:
        return f"{said}other saved-tensor hooks were entered after the session's, and only the innermost are called; " + (
            "enter the session inside of them" if counts.attached is None else _ATTACH_INSIDE
        )
    return (
        f"{said}autograd saved nothing on the thread that entered it ({thread}); run the forward on that thread, or enter the "
        f"session on the forward's; with gradients on; and not all of it inside other saved-tensor hooks or a checkpoint"
    )
