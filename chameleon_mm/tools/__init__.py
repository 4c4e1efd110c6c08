"""Commands that people run: the command line, the demo, the doctor, `plan` and `run`."""

from __future__ import annotations
