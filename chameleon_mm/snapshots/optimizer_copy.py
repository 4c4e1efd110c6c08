"""Copy of an optimizer on the host: its state, wherever that is, and what its groups of parameters are set to.

copied = OptimizerCopy(optimizer, model)
copied.take(copier, optimizer)
copied.difference(optimizer, model) -> text or None
copied.restore(copier, optimizer, leave)        # `leave(params)`: state of theirs is new, and may leave the device

State is read and written as it lies in its dicts, past what brings it back to the device for its readers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from chameleon_mm.hosted import HostedTensor
from chameleon_mm.snapshots.tensor_copy import (
    Copier,
    TensorCopy,
    form_of,
    is_copyable,
    value_for_checkpoint,
    value_from_host,
    value_to_host,
)


class OptimizerCopy:
    """Copy of one optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        self.copies: list[TensorCopy] = []
        self._kind = type(optimizer).__name__
        self._params = _params_by_name(optimizer, model)
        self._groups = [
            {key: value_to_host(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
        ]
        self._state: dict[Any, dict[Any, Any]] = {}
        """By the number of the parameter, counted through the groups, or by the key itself where it is no parameter."""

    def take(self, copier: Copier, optimizer: torch.optim.Optimizer) -> None:
        """Copy the state. Raises `HostMemoryExhausted`."""
        numbers = _numbers(optimizer)
        with torch._C.DisableTorchFunction(), torch.no_grad():
            for key, state in list(optimizer.state.items()):
                copied = self._state[_key(key, numbers)] = {}
                for name, value in list(dict.items(state)):
                    if isinstance(value, (Tensor, HostedTensor)) and is_copyable(value):
                        copied[name] = copier.copy(value)
                        self.copies.append(copied[name])
                    else:
                        copied[name] = value_to_host(value)

    def difference(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> str | None:
        """Text of the first thing in which the optimizer that was copied differs from `optimizer`, of `model`; None: it may be
        restored there."""
        if (kind := type(optimizer).__name__) != self._kind:
            return f"got one of the optimizer {self._kind}, here {kind}"
        params = _params_by_name(optimizer, model)
        if params != self._params:
            counts = [[len(group) for group in groups] for groups in (self._params, params)]
            if counts[0] != counts[1]:
                return f"got one whose optimizer has groups of {counts[0]} parameters, here {counts[1]}"
            return "got one whose optimizer has the parameters in another order"
        return None

    def restore(self, copier: Copier, optimizer: torch.optim.Optimizer, leave: Callable[[list[Tensor]], None]) -> None:
        """Write everything back, in place, remove the state that is newer, and make what is gone. Raises
        `torch.OutOfMemoryError` where that finds no room."""
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
        """Restore the state of one parameter. Returns whether a tensor had to be made."""
        made = False
        for name in [name for name in dict.keys(state) if name not in copied]:
            dict.__delitem__(state, name)
        for name, value in copied.items():
            current = dict.get(state, name)
            if not isinstance(value, TensorCopy):
                dict.__setitem__(state, name, value_from_host(value, current))
            elif is_copyable(current) and form_of(current) == value.form and _device(current) == value.device:
                copier.put_back(value, current)
            else:
                del current
                dict.pop(state, name, None)  # makes room
                dict.__setitem__(state, name, copier.made_from(value))
                made = True
        return made

    def for_checkpoint(self) -> dict[str, Any]:
        """The entry of a checkpoint: plain tensors that hold the blocks.

        It is a `state_dict` with names in place of the numbers of parameters, as torch's `get_optimizer_state_dict` makes: a
        checkpoint turns keys into text, and `load_state_dict` would find no state of a parameter "0".
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
    """Names in the model of the parameters of each group; None for one of somebody else's."""
    names = {id(p): name for name, p in model.named_parameters()}
    return [[names.get(id(p)) for p in group["params"]] for group in optimizer.param_groups]


def _numbers(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    params = (p for group in optimizer.param_groups for p in group["params"])
    return {id(p): number for number, p in enumerate(params)}


def _key(key: Any, numbers: dict[int, int]) -> Any:
    return numbers.get(id(key), key) if isinstance(key, Tensor) else key


def _device(t: Tensor | HostedTensor) -> torch.device:
    return t.form[3] if isinstance(t, HostedTensor) else t.device
