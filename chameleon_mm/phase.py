"""Phases of a session, and which may follow which.

NEW --enter--> OPEN --step--> IN_STEP --end--> OPEN ... --leave--> CLOSED
"""

from __future__ import annotations

import enum

from chameleon_mm.errors import SessionClosedError


class Phase(enum.Enum):
    """State of a session."""

    NEW = "new"
    """Made, not entered."""
    OPEN = "open"
    """Inside `with session:`, between steps."""
    IN_STEP = "in_step"
    """Inside `with session.step():`. A session that is left in a step ends the step first."""
    CLOSED = "closed"
    """After `with session:`. Graphs made inside stay valid; the report stays readable."""

    def __str__(self) -> str:
        return self.value.replace("_", " ")


NEXT = {
    Phase.NEW: (Phase.OPEN,),
    Phase.OPEN: (Phase.IN_STEP, Phase.CLOSED),
    Phase.IN_STEP: (Phase.OPEN,),
    Phase.CLOSED: (),
}


class Lifecycle:
    """The phase of one session. What is not allowed in it raises `SessionClosedError`."""

    def __init__(self) -> None:
        self.phase = Phase.NEW

    def to(self, phase: Phase) -> None:
        """Enter `phase`."""
        if phase not in NEXT[self.phase]:
            raise SessionClosedError(f"a session that is {self.phase} cannot become {phase}")
        self.phase = phase

    def begin_step(self) -> None:
        """From OPEN to IN_STEP."""
        self.expect_open("step")
        self.to(Phase.IN_STEP)

    def expect_new(self) -> None:
        """Allow entering the session, once."""
        if self.phase is not Phase.NEW:
            raise SessionClosedError(f"expected a new session, got one that is {self.phase}; make another SwapSession")

    def expect_open(self, what: str) -> None:
        """Allow the session's method `what` between steps alone."""
        if self.phase is not Phase.OPEN:
            raise SessionClosedError(
                f"session.{what}(): expected an open session, got one that is {self.phase}; use it inside "
                f"`with session:`, one step at a time"
            )

    def expect_between_steps(self, what: str) -> None:
        """Allow setting `what` before the session and between steps."""
        if self.phase in (Phase.IN_STEP, Phase.CLOSED):
            raise SessionClosedError(
                f"{what}: expected to be set between steps of an open session, got one that is {self.phase}; set it "
                f"after the step"
            )
