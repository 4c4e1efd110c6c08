"""Errors of the observer: what would be a bug on a GPU. No built-in that the library handles is a base of theirs."""

from __future__ import annotations


class SimError(Exception):
    """Error that the observer of a simulated device found, which would be a bug on a GPU."""


class SimRaceError(SimError):
    """Two conflicting accesses to one address have no happens-before between them."""


class SimLifetimeError(SimError):
    """Memory was used after it was given back, or a copy that was still pending lost its source or destination."""
