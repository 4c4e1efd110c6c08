"""Find the modules that pins name: by a pattern of paths, as the module itself, or by a class.

check_pins("keep", ["*.lm_head", nn.LayerNorm])       # checks only types, before there is a model
modules = pinned_modules("keep", pins, model)         # ValueError for a pin that names no module, with near names
"""

from __future__ import annotations

from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from chameleon_mm.errors import describe

NEAR_NAMES = 3
"""Number of near names in an error."""


def check_pins(option: str, pins: object) -> None:
    """Raise `TypeError` unless `pins` is a list or tuple of patterns, modules and classes of modules."""
    if not isinstance(pins, (list, tuple)):
        raise TypeError(f"{option}: expected a list of patterns, modules or classes, got {describe(pins)}; put it in [...]")
    for pin in pins:
        if not isinstance(pin, (str, nn.Module)) and not (isinstance(pin, type) and issubclass(pin, nn.Module)):
            raise TypeError(f'{option}: expected a path ("*.lm_head"), a module or a class, got {describe(pin)}; leave it out')


def pinned_modules(option: str, pins: object, model: nn.Module | None) -> list[nn.Module]:
    """Return the modules of `model` that `pins` name, without their submodules.

    A pattern is matched with each path of `named_modules` by `fnmatch.fnmatchcase`; `*` matches dots too. Raises `TypeError` as
    `check_pins` does. Raises `ValueError` without a model, or for a pin that names none of its modules.
    """
    check_pins(option, pins)
    assert isinstance(pins, (list, tuple))
    if pins and model is None:
        raise ValueError(f"{option}: expected a session that knows its model; make it SwapSession(model=model, {option}=[...])")
    found: dict[int, nn.Module] = {}
    for pin in pins:
        paths = {} if model is None else dict(model.named_modules(remove_duplicate=False))
        some = {id(module): module for path, module in paths.items() if _names(pin, path, module)}
        if not some:
            raise ValueError(_no_match(option, pin, paths))
        found |= some
    return [*found.values()]


def text_of(pin: str | nn.Module | type[nn.Module]) -> str:
    """Return a short text for a pin: its pattern or the name of its class."""
    return pin if isinstance(pin, str) else pin.__name__ if isinstance(pin, type) else type(pin).__name__


def _names(pin: object, path: str, module: nn.Module) -> bool:
    if isinstance(pin, str):
        return fnmatchcase(path, pin)
    return isinstance(module, pin) if isinstance(pin, type) else module is pin


def _no_match(option: str, pin: str | nn.Module | type[nn.Module], paths: dict[str, nn.Module]) -> str:
    if isinstance(pin, str):
        # Paths that resemble the pattern, else paths whose last part resembles its last part.
        bare, first = pin.strip("*."), {path.rpartition(".")[2]: path for path in reversed(paths)}
        near = get_close_matches(bare, paths) or [first[part] for part in get_close_matches(bare.rpartition(".")[2], first)]
        near = near or [path for path in paths if path]
    else:
        classes = sorted({type(module).__name__ for module in paths.values()})
        near = get_close_matches(text_of(pin), classes, NEAR_NAMES) or classes
    got = repr(pin) if isinstance(pin, str) else f"the class {pin.__name__}" if isinstance(pin, type) else describe(pin)
    names = ", ".join(near[:NEAR_NAMES]) or "none: it has no parts"
    return f"{option}: expected a pin that names a module of the model, got {got}, which names none; near names: {names}"
