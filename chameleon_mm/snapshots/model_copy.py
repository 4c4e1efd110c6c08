"""Copy of a model on the host: parameters, buffers, gradients that exist, and which of them `state_dict` names how.

copied = ModelCopy(model)
copied.take(copier, model)                 # what it raises leaves the copies that were made in `copied.copies`
copied.difference(model) -> text or None   # why it is no copy of `model`
copied.restore(copier, model, note_gradient)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from chameleon_mm.hosted import HostedTensor
from chameleon_mm.snapshots.tensor_copy import (
    Copier,
    Form,
    Hosts,
    TensorCopy,
    form_of,
    is_copyable,
    value_for_checkpoint,
    value_from_host,
    value_to_host,
)


def check_model(model: nn.Module, hosts: Hosts | None) -> None:
    """Raise `ValueError` where a parameter or buffer is more than elements in memory, or has none."""
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
    """Whether the storage of `t` reaches to the last element."""
    last = t.storage_offset() + sum((length - 1) * stride for length, stride in zip(t.shape, t.stride(), strict=True))
    return not t.numel() or t.untyped_storage().nbytes() >= (last + 1) * t.element_size()


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


class ModelCopy:
    """Copy of one model."""

    def __init__(self) -> None:
        self.copies: list[TensorCopy] = []
        self._tensors: dict[str, TensorCopy] = {}
        """Parameters and buffers, by each name that they have."""
        self._gradients: dict[str, Any] = {}
        """Gradients by the first name of their parameters: a copy, or what `value_to_host` made of another kind."""
        self._layout: dict[str, Any] = {}
        """What `state_dict` gave: a copy, or what `value_to_host` made of anything else."""

    def take(self, copier: Copier, model: nn.Module) -> None:
        """Copy `model`. Raises `HostMemoryExhausted`."""
        layout = model.state_dict(keep_vars=True)  # hooks of the model's run as ever: what they read comes back
        seen: dict[int, TensorCopy] = {}
        with torch._C.DisableTorchFunction(), torch.no_grad():
            for name, t in _named_tensors(model):
                if id(t) not in seen:
                    seen[id(t)] = self._copy(copier, t)
                self._tensors[name] = seen[id(t)]
            for name, p in model.named_parameters():
                gradient = p.grad
                if gradient is not None:
                    copied = self._copy(copier, gradient) if is_copyable(gradient) else value_to_host(gradient)
                    self._gradients[name] = copied
        with torch.no_grad():  # what hooks made may be views of what is away: whoever watches brings it back
            for name, value in layout.items():
                self._layout[name] = seen[id(value)] if id(value) in seen else value_to_host(value)

    def _copy(self, copier: Copier, t: Tensor | HostedTensor) -> TensorCopy:
        copy = copier.copy(t)
        self.copies.append(copy)
        return copy

    def difference(self, model: nn.Module) -> str | None:
        """Text of the first thing in which the model that was copied differs from `model`; None: it may be restored there."""
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
        """Write everything back, in place. Raises `torch.OutOfMemoryError` where a gradient finds no room."""
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
                    self._restore_gradient(copier, p, self._gradients[name])
                    note_gradient(p)

    @staticmethod
    def _restore_gradient(copier: Copier, p: nn.Parameter, copied: Any) -> None:
        gradient = p.grad
        if not isinstance(copied, TensorCopy):
            p.grad = None
            p.grad = value_from_host(copied)
        elif gradient is not None and is_copyable(gradient) and form_of(gradient) == copied.form:
            copier.put_back(copied, gradient)
        else:
            del gradient
            p.grad = None  # what was made of it makes room
            p.grad = copier.made_from(copied)

    def for_checkpoint(self) -> dict[str, Any]:
        """Entries of a checkpoint: plain tensors that hold the blocks."""
        tensors = {id(copy): copy.host_tensor() for copy in self.copies}
        model = {name: _for_checkpoint(value, tensors) for name, value in self._layout.items()}
        rest = {name: tensors[id(copy)] for name, copy in self._tensors.items() if name not in model}
        gradients = {name: _for_checkpoint(value, tensors) for name, value in self._gradients.items()}
        return {"model": model, "not_in_state_dict": rest, "gradients": gradients}


def _for_checkpoint(value: Any, tensors: dict[int, Tensor]) -> Any:
    return tensors[id(value)] if isinstance(value, TensorCopy) else value_for_checkpoint(value)


def _text(form: Form | None, device: torch.device) -> str:
    return f"no plain tensor on {device}" if form is None else f"{form} on {device}"
