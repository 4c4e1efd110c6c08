"""Phases of a session, and which may follow which.

NEW --enter--> OPEN --step--> IN_STEP --end--> OPEN ... --leave--> CLOSED
"""

from __future__ import annotations

import enum


class Phase(enum.Enum):
    """State of a session."""

    __hash__ = object.__hash__  # each member is one object; Enum's own hash is a call in Python, several times in each step

    NEW = "new"
    """Made, not entered."""
    OPEN = "open"
    """Inside `with session:`, between steps."""
    IN_STEP = "in step"
    """Inside `with session.step():`. Ends with it, or with the session where an exception ends that first."""
    CLOSED = "closed"
    """After `with session:`. Graphs made inside stay valid; the report stays readable."""


NEXT = {
    Phase.NEW: (Phase.OPEN,),
    Phase.OPEN: (Phase.IN_STEP, Phase.CLOSED),
    Phase.IN_STEP: (Phase.OPEN,),
    Phase.CLOSED: (),
}
"""Phases that may follow each."""
