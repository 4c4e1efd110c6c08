"""Tells which kind of model a text names.

"llama-7b"                      built in
"package.module:function"       the user's own
anything else                   Hugging Face's: a file, a folder or a name
"""

from __future__ import annotations

import difflib
from pathlib import Path

import torch

from chameleon_mm.planning.builtin import BUILT_IN, built_in
from chameleon_mm.planning.hugging_face import hugging_face
from chameleon_mm.planning.own_function import own_function
from chameleon_mm.planning.workload import Build, ModelUnusable


def source_of(text: str, *, batch: int | None, seq: int | None, dtype: torch.dtype) -> Build:
    """Builder of the model that `text` names, all checked that can be. None: as the model's own default has it, or 1 row.

    Raises `ModelUnusable` for what cannot be found, and for sizes below 1.
    """
    for name, value in (("batch", batch), ("seq", seq)):
        if value is not None and value < 1:
            raise ValueError(f"--{name}: expected 1 or more, got {value}")
    if not text:
        raise ModelUnusable(
            f"MODEL: expected one of {', '.join(BUILT_IN)}, module:function, or a Hugging Face configuration, got ''"
        )
    if text in BUILT_IN:
        return built_in(text, batch=batch or 1, seq=seq)
    if ":" in text and not Path(text).exists():
        return own_function(text, batch=batch, seq=seq)
    if _is_a_path(text) and not Path(text).exists():
        raise ModelUnusable(
            f"MODEL: expected a file or folder with a Hugging Face configuration, got {text!r}, which does not exist; correct "
            f"the path, or name a built-in model or module:function"
        )
    likely = difflib.get_close_matches(text.lower(), BUILT_IN, n=1, cutoff=0.8)
    if likely and not Path(text).exists():  # rather than half a minute of asking the network for it
        raise ModelUnusable(f"MODEL: expected one of {', '.join(BUILT_IN)}, got {text!r}; {likely[0]}?")
    return hugging_face(text, batch=batch or 1, seq=seq, dtype=dtype)


def _is_a_path(text: str) -> bool:
    """Whether it cannot be a name on the hub, which is `name` or `owner/name`."""
    return text.startswith((".", "/", "~")) or text.count("/") > 1 or text.endswith(".json")
