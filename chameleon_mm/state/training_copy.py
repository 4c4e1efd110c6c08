"""Copies of a model and of an optimizer on the host.

copied = OptimizerCopy(copies, optimizer, model)
copied.take(copier, optimizer)
copied.difference(optimizer, model) -> text or None
copied.restore(copier, optimizer, leave)        # calls `leave(params)` for new state, which may be swapped out

State is read and written directly in its dicts, without the methods that bring it to the device for readers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from chameleon_mm.state.tensor_copy import (
    Copier,
    Form,
    TensorCopy,
    form_of,
    is_copyable,
    value_for_checkpoint,
    value_from_host,
    value_to_host,
)

if TYPE_CHECKING:
    from chameleon_mm.state.parameter_swap import ParameterSwap

# --- Copy of a model on the host: parameters, buffers, gradients that exist, and their names in `state_dict`


def check_model(model: nn.Module, hosts: ParameterSwap | None) -> None:
    """Raise `ValueError` if a parameter or buffer has no memory, or is not just elements in memory."""
    for name, t in _named_tensors(model):
        if not is_copyable(t):
            problem = f"{type(t).__name__} ({t.layout}) for {name}"
        elif not _has_memory(t) and (hosts is None or hosts.find(t) is None):
            problem = f"{name} without memory, which somebody else frees between uses (FSDP does)"
        else:
            continue
        raise ValueError(
            f"session.snapshot(): expected parameters and buffers that are plain tensors in memory, got {problem}; save such a "
            f"model with torch.distributed.checkpoint or its own state_dict"
        )


def _has_memory(t: Tensor) -> bool:
    """True if the storage of `t` is large enough for the last element."""
    last = t.storage_offset() + sum((length - 1) * stride for length, stride in zip(t.shape, t.stride(), strict=True))
    return not t.numel() or t.untyped_storage().nbytes() >= (last + 1) * t.element_size()


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


class ModelCopy:
    def __init__(self, copies: list[TensorCopy]) -> None:
        """`copies`: list to which every new copy is added."""
        self._copies = copies
        self._tensors: dict[str, TensorCopy] = {}
        """Copies of parameters and buffers, by each of their names."""
        self._gradients: dict[str, Any] = {}
        """Gradients by the first name of the parameter: a copy, or the result of `value_to_host` for other kinds."""
        self._layout: dict[str, Any] = {}
        """Result of `state_dict`, by name: a copy, or the result of `value_to_host` for other values."""

    def take(self, copier: Copier, model: nn.Module) -> None:
        """Copy `model`. Raises `HostMemoryExhausted`."""
        layout = model.state_dict(keep_vars=True)  # hooks of the model run as usual and bring tensors to the device
        seen: dict[int, TensorCopy] = {}
        with torch._C.DisableTorchFunction(), torch.no_grad():
            for name, t in _named_tensors(model):
                if id(t) not in seen:
                    seen[id(t)] = copier.copy_value(t, self._copies)
                self._tensors[name] = seen[id(t)]
            for name, p in model.named_parameters():
                if p.grad is not None:
                    self._gradients[name] = copier.copy_value(p.grad, self._copies)
        with torch.no_grad():  # the watch brings tensors made by hooks to the device
            for name, value in layout.items():
                self._layout[name] = seen[id(value)] if id(value) in seen else value_to_host(value)

    def difference(self, model: nn.Module) -> str | None:
        """Return the first difference between the copied model and `model`, as text; None: `restore` may be called."""
        with torch._C.DisableTorchFunction():
            here = dict(_named_tensors(model))
            missing = next((name for name in here if name not in self._tensors), None)
            if missing is not None:
                return f"got one without {missing}"
            for name, copy in self._tensors.items():
                if name not in here:
                    return f"got one with {name}, which the model has not"
                form = form_of(here[name]) if is_copyable(here[name]) else None
                if form != copy.form or here[name].device != copy.device:
                    return f"got one whose {name} is {_text(copy.form, copy.device)}, here {_text(form, here[name].device)}"
        return None

    def restore(self, copier: Copier, model: nn.Module, note_gradient: Callable[[Tensor], None]) -> None:
        """Restore everything in place. Raises `torch.OutOfMemoryError` if a gradient finds no room."""
        with torch._C.DisableTorchFunction(), torch.no_grad():
            for name, p in model.named_parameters():
                if name not in self._gradients:
                    p.grad = None  # first: it makes room
            done: set[int] = set()
            for name, t in _named_tensors(model):
                if id(t) not in done:
                    done.add(id(t))
                    copier.put_back(self._tensors[name], t)
            for name, p in model.named_parameters():
                if name in self._gradients:
                    restore_gradient(copier, p, self._gradients[name], p.grad, copier.put_back)
                    note_gradient(p)

    def for_checkpoint(self) -> dict[str, Any]:
        """Return the model's entries of a checkpoint: plain tensors that hold the blocks."""
        of_model = (*self._tensors.values(), *self._gradients.values())
        tensors = {id(copy): copy.host_tensor() for copy in of_model if isinstance(copy, TensorCopy)}
        model = {name: _for_checkpoint(value, tensors) for name, value in self._layout.items()}
        rest = {name: tensors[id(copy)] for name, copy in self._tensors.items() if name not in model}
        gradients = {name: _for_checkpoint(value, tensors) for name, value in self._gradients.items()}
        return {"model": model, "not_in_state_dict": rest, "gradients": gradients}


def restore_gradient(
    copier: Copier, p: nn.Parameter, copied: Any, gradient: Tensor | None, write: Callable[[TensorCopy, Tensor], None]
) -> None:
    """Restore the gradient of `p`: in place in `gradient` by `write` if the form is equal (a bucket may alias it), else as a
    new tensor. `copied`: its copy, or the result of `value_to_host` for other kinds. Raises `torch.OutOfMemoryError`."""
    if isinstance(copied, TensorCopy) and copied.is_like(gradient):
        write(copied, gradient)
        p.grad = gradient
        return
    gradient = p.grad = None  # freeing the current gradient makes room
    p.grad = copier.made_from(copied) if isinstance(copied, TensorCopy) else value_from_host(copied)


def _for_checkpoint(value: Any, tensors: dict[int, Tensor]) -> Any:
    return tensors[id(value)] if isinstance(value, TensorCopy) else value_for_checkpoint(value)


def _text(form: Form | None, device: torch.device) -> str:
    return f"no plain tensor on {device}" if form is None else f"{form} on {device}"


class OptimizerCopy:
    def __init__(self, copies: list[TensorCopy], optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        """`copies`: list to which every new copy is added."""
        self._copies = copies
        self._kind = type(optimizer).__name__
        self._params = _params_by_name(optimizer, model)
        self._groups = [
            {key: value_to_host(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
        ]
        self._state: dict[Any, dict[Any, Any]] = {}
        """State by the number of the parameter, counted over all groups. A key that is not a parameter stays the key."""

    def take(self, copier: Copier, optimizer: torch.optim.Optimizer) -> None:
        """Copy the state. Raises `HostMemoryExhausted`."""
        numbers = _numbers(optimizer)
        with torch._C.DisableTorchFunction(), torch.no_grad():
            for key, state in list(optimizer.state.items()):
                copied = self._state[_key(key, numbers)] = {}
                for name, value in list(dict.items(state)):
                    copied[name] = copier.copy_value(value, self._copies)

    def difference(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> str | None:
        """Return the first difference between the copied optimizer and `optimizer`, of `model`, as text; None: `restore` may be
        called."""
        if (kind := type(optimizer).__name__) != self._kind:
            return f"got one of the optimizer {self._kind}, here {kind}"
        params = _params_by_name(optimizer, model)
        if params != self._params:
            counts = [[len(group) for group in groups] for groups in (self._params, params)]
            if counts[0] != counts[1]:
                return f"got one whose optimizer has groups of {counts[0]} parameters, here {counts[1]}"
            return "got one whose optimizer has the parameters in another order"
        return None

    def restore(self, copier: Copier, optimizer: torch.optim.Optimizer, leave: Callable[[list[Tensor]], object]) -> None:
        """Restore everything in place, remove newer state, and make missing tensors. Raises `torch.OutOfMemoryError` if there
        is no room for those."""
        numbers = _numbers(optimizer)
        with torch._C.DisableTorchFunction(), torch.no_grad():
            for group, copied in zip(optimizer.param_groups, self._groups, strict=True):
                for name in [name for name in group if name != "params" and name not in copied]:
                    del group[name]
                for name, value in copied.items():
                    group[name] = value_from_host(value, group.get(name))
            for key in list(optimizer.state):
                if _key(key, numbers) not in self._state:
                    del optimizer.state[key]
            keys = {_key(p, numbers): p for group in optimizer.param_groups for p in group["params"]}
            for number, entry in self._state.items():
                key = keys.get(number, number)
                if key not in optimizer.state:
                    optimizer.state[key] = {}
                if self._restore_state(copier, optimizer.state[key], entry) and isinstance(key, Tensor):
                    leave([key])

    @staticmethod
    def _restore_state(copier: Copier, state: dict[Any, Any], copied: dict[Any, Any]) -> bool:
        """Restore the state of one parameter. Return True if a tensor had to be made."""
        made = False
        for name in [name for name in dict.keys(state) if name not in copied]:
            dict.__delitem__(state, name)
        for name, value in copied.items():
            current = dict.get(state, name)
            if not isinstance(value, TensorCopy):
                dict.__setitem__(state, name, value_from_host(value, current))
            elif value.is_like(current):
                copier.put_back(value, current)
            else:
                del current
                dict.pop(state, name, None)  # makes room
                dict.__setitem__(state, name, copier.made_from(value))
                made = True
        return made

    def for_checkpoint(self) -> dict[str, Any]:
        """Return the optimizer's entry of a checkpoint: plain tensors that hold the blocks.

        It is a `state_dict` with names instead of parameter numbers, like the result of torch's `get_optimizer_state_dict`. A
        checkpoint turns keys into text, so `load_state_dict` would not find state under the number "0".
        """
        names = [name for params in self._params for name in params]
        names = [f"parameter {number}" if name is None else name for number, name in enumerate(names)]
        numbered = dict(enumerate(names))
        state = {
            numbered.get(key, key): {
                name: value.host_tensor() if isinstance(value, TensorCopy) else value_for_checkpoint(value)
                for name, value in entry.items()
            }
            for key, entry in self._state.items()
        }
        groups, start = [], 0
        for group, params in zip(self._groups, self._params, strict=True):
            plain = {name: value_for_checkpoint(value) for name, value in group.items()}
            groups.append({**plain, "params": names[start : start + len(params)]})
            start += len(params)
        return {"state": state, "param_groups": groups}


def _params_by_name(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[list[str | None]]:
    """Return the model's names of the parameters of each group; None for a parameter that is not in the model."""
    names = {id(p): name for name, p in model.named_parameters()}
    return [[names.get(id(p)) for p in group["params"]] for group in optimizer.param_groups]


def _numbers(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    params = (p for group in optimizer.param_groups for p in group["params"])
    return {id(p): number for number, p in enumerate(params)}


def _key(key: Any, numbers: dict[int, int]) -> Any:
    return numbers.get(id(key), key) if isinstance(key, Tensor) else key
