"""Parameters, gradients and optimizer state on the host; copies of what a step begins with, to run it again or to keep it."""

from __future__ import annotations
