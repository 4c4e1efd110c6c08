"""Sessions, and what puts one around a training: `attach`, `save_on_cpu`, `install`, step bounds."""

from __future__ import annotations
