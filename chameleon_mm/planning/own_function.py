"""A model of the user's own: a function that returns it with a batch.

    def tiny(batch, seq): return model, ids                          # model(ids) is a scalar, or has one as .loss
    def tiny(batch, seq): return model, (x, mask), loss_fn           # loss_fn(model(x, mask), (x, mask))
    own_function("package.module:tiny", batch=1, seq=None)()

A tuple or a list is a batch of several arguments, a mapping one of keywords, anything else is one argument. `loss_fn` is given
what the model returned and the batch as the function returned it, and returns the scalar tensor to go backward from.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from chameleon_mm.planning.gpu_operators import gpu_autocast
from chameleon_mm.planning.workload import Build, ModelUnusable, Workload, told_as

_RETURNS = "(model, batch) or (model, batch, loss_fn)"


def own_function(text: str, *, batch: int | None, seq: int | None, layers: int | None = None) -> Build:
    """The function that `text` names as `module:function`, its module looked for in the working directory, too.

    It is given those of `batch`, `seq` and `layers` that it has parameters for and that somebody said. Raises `ModelUnusable`
    where there is no such function; `build` raises it where the function fails or returns something else.
    """
    function = _find(text)
    given = _arguments(text, function, {"batch": batch, "seq": seq, "layers": layers})

    def build() -> Workload:
        with told_as(f"{text} failed under fake tensors"):
            returned = function(**given)
        model, data, loss_fn = _checked(text, returned)

        def loss() -> Tensor:
            return _scalar(text, _called(model, data), data, loss_fn)

        said = "".join(f", {name} {value}" for name, value in given.items())
        return Workload(about=f"{text}{said}", model=model, loss=loss)

    return build


def _find(text: str) -> Callable[..., Any]:
    module_name, _, function_name = text.partition(":")
    if not module_name or not function_name:
        raise ModelUnusable(f"MODEL: expected module:function, got {text!r}")
    imported = told_as(f"MODEL: expected a module that can be imported, got {module_name!r}")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # as `python -m` has it, and a console script has not
    with gpu_autocast(), imported:  # autocast as a decorator is made when it is imported
        module = importlib.import_module(module_name)
    function = getattr(module, function_name, None)
    if not callable(function):
        found = "no such name" if function is None else f"a {type(function).__name__}"
        raise ModelUnusable(f"MODEL: expected a function {function_name!r} in module {module_name!r}, found {found}")
    return function  # type: ignore[no-any-return]  # a module's attribute has any type


def _arguments(text: str, function: Callable[..., Any], known: Mapping[str, int | None]) -> dict[str, int]:
    parameters = inspect.signature(function).parameters
    for name, value in known.items():
        if value is not None and name not in parameters:
            raise ModelUnusable(f"--{name}: expected {text} to have a parameter {name!r} for it, found none; leave it out")
    given = {name: value for name, value in known.items() if value is not None}
    for name, parameter in parameters.items():
        plain = parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if plain and parameter.default is parameter.empty and name not in given:
            say = f"say --{name}" if name in known else "give it a default"
            raise ModelUnusable(f"MODEL: expected all that {text} needs, got nothing for its parameter {name!r}; {say}")
    return given


def _checked(text: str, returned: Any) -> tuple[nn.Module, Any, Callable[..., Any] | None]:
    if not isinstance(returned, tuple) or len(returned) not in (2, 3):
        raise ModelUnusable(f"{text}: expected it to return {_RETURNS}, got {_described(returned)}")
    model, batch, loss_fn = (*returned, None)[:3]
    if not isinstance(model, nn.Module):
        raise ModelUnusable(f"{text}: expected it to return {_RETURNS} with a torch.nn.Module first, got {_described(model)}")
    if loss_fn is not None and not callable(loss_fn):
        raise ModelUnusable(f"{text}: expected loss_fn(output, batch), got {_described(loss_fn)}")
    return model, batch, loss_fn


def _called(model: nn.Module, data: Any) -> Any:
    if isinstance(data, Mapping):
        return model(**data)
    return model(*data) if isinstance(data, (tuple, list)) else model(data)


def _scalar(text: str, output: Any, data: Any, loss_fn: Callable[..., Any] | None) -> Tensor:
    if loss_fn is not None:
        loss = loss_fn(output, data)
    else:
        loss = output["loss"] if isinstance(output, Mapping) and "loss" in output else getattr(output, "loss", output)
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise ModelUnusable(
            f"{text}: expected a scalar tensor to go backward from, got {_described(loss)}; return a third value, "
            f"loss_fn(output, batch)"
        )
    return loss


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}, requires_grad {value.requires_grad}"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"
