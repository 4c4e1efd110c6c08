"""States of a saved storage, which may follow which, and what all storages of one executor share.

ON_DEVICE --swap_out--> SWAPPING_OUT --reclaim--> ON_HOST --swap_in--> SWAPPING_IN --use--> RESTORED --drop--> ON_HOST
    ^__ cancel_swap_out _____|  |__ reclaim, others hold it: RESTORED __________________________^
                                                       any of them --retire (last handle gone)--> RETIRED
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from chameleon_mm.pinned import PinnedPool
from chameleon_mm.saved.calling_thread import ComputeStreams
from chameleon_mm.saved.checksums import Checksums
from chameleon_mm.saved.metrics import Metrics
from chameleon_mm.transfer import Transfer

if TYPE_CHECKING:
    from chameleon_mm.saved.saved_storage import SavedStorage


class State(enum.Enum):
    """State of a saved storage: where its bytes are."""

    ON_DEVICE = "on_device"
    """On the device alone. Begins when it is saved; ends when its copy out is queued."""
    SWAPPING_OUT = "swapping_out"
    """On the device, with a copy out queued or running. Ends when compute is ordered after that copy and the HBM is dropped."""
    ON_HOST = "on_host"
    """On the host, or nowhere: a recipe stands for it. Begins when its HBM is dropped; ends when a copy back is queued, it is
    unpacked from its group, wherever that is, or it is recomputed."""
    SWAPPING_IN = "swapping_in"
    """On the host, with a copy back queued or running. Ends at the first use, which orders compute after that copy."""
    RESTORED = "restored"
    """On both. Begins at the first use after a swap-in, or when the copy out is over and others still refer to the storage.
    Ends when its HBM is dropped: once nobody else has it, under pressure, or by a plan that brings it back for a later use."""
    RETIRED = "retired"
    """Nowhere: the last handle is gone, and nothing is held any more."""


NEXT = {
    State.ON_DEVICE: (State.SWAPPING_OUT, State.ON_HOST, State.RESTORED, State.RETIRED),
    State.SWAPPING_OUT: (State.ON_HOST, State.RESTORED, State.ON_DEVICE, State.RETIRED),
    State.ON_HOST: (State.SWAPPING_IN, State.RESTORED, State.RETIRED),
    State.SWAPPING_IN: (State.RESTORED, State.ON_HOST, State.RETIRED),
    State.RESTORED: (State.RESTORED, State.ON_HOST, State.ON_DEVICE, State.RETIRED),
    State.RETIRED: (),
}
"""States that may follow each. From ON_DEVICE to ON_HOST at once goes what was packed into a group, in stream order, and what
is dropped to be recomputed; from RESTORED to ON_DEVICE what was recomputed, as what it is made from is about to change, and
what is saved again with bytes that its copy lacks."""


@dataclass(frozen=True, slots=True)
class SwapContext:
    """Everything that a storage needs to be swapped: one set per executor."""

    pool: PinnedPool
    transfer: Transfer
    metrics: Metrics
    streams: ComputeStreams
    checksums: Checksums | None = None
    """Checksums of what goes out, compared with what comes back; None: not checked."""
    held: dict[SavedStorage, None] = field(default_factory=dict)
    """Storages whose bytes are elsewhere too, and whose memory goes once nobody else refers to them. Each hook tries."""
