"""`chameleon-mm plan`: predicts what a model's step needs and what a plan makes of it, without a GPU and without the memory."""

from __future__ import annotations
