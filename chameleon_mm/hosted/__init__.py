"""Device memory that has a place on the host and may be there instead: optimizer state, parameters, gradients."""

from __future__ import annotations

from chameleon_mm.hosted.home import Home
from chameleon_mm.hosted.hosted import Hosted, Where
from chameleon_mm.hosted.hosted_storage import HostedStorage
from chameleon_mm.hosted.hosted_tensor import HostedTensor

__all__ = ["Home", "Hosted", "HostedStorage", "HostedTensor", "Where"]
