"""Swap a model's parameters and their gradients: an operator's inputs are on the device before it runs.

    operator of the model:  its parameters are on the device, or are copied back now; the next ones are prefetched
    gradient made:          its copy out is queued at once; it is copied back for the optimizer
    optimizer's step:       bucket by bucket: parameters, gradients and state are copied back; written ones are copied out

Every access to a parameter brings it to the device: its module's forward, any torch function, autograd's uses. A frozen
parameter is copied out once, because its host copy stays valid. A quantised weight moves as its stored bytes. If it is a
wrapper subclass, its plain inner tensors move, each in its own storage.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.hooks import RemovableHandle

from chameleon_mm.device import Stream
from chameleon_mm.errors import InfeasibleBudget, TransferFailed, describe
from chameleon_mm.record.dispatch_state import PLAIN_DISPATCH, saved_tensor_hooks_on_top
from chameleon_mm.state import hosted
from chameleon_mm.state.hosted import Home, HostedStorage, Where, is_alone, tensor_over
from chameleon_mm.state.parameter_watch import ParameterWatch
from chameleon_mm.state.window import DeviceBesideWindow, Window
from chameleon_mm.swap.executor import Executor
from chameleon_mm.units import allocated_size, format_size

# --- Bytes to reserve for parameters and gradients within a budget

WINDOW_SHARE = 0.4
"""Share of the budget, less memory that never moves, for parameters and gradients if they do not all fit. The rest is for
activations, optimizer state and operators' own memory. Measured: a simulated step of the demo's GPT with parameters swapped (8
layers of width 256, H200, a third of the peak as budget) takes 12.2 ms with 0.25, 10.6 ms with 0.4, 9.1 ms with 0.6. The rest
then makes the peak 0.99, 1.10 and 1.21 of the budget."""

LEAST_STORAGES = 3
"""Number of storages of the largest size that must fit: a parameter, its gradient, and the next parameter."""


def charged_sizes(tensors: Iterable[Tensor]) -> list[int]:
    """Return the allocator's size of each storage of `tensors`, for storages of at least `MIN_BYTES`."""
    storages = {id(s): s for t in tensors for s in [t.untyped_storage()] if s.nbytes() >= hosted.MIN_BYTES}
    return [allocated_size(storage.nbytes()) for storage in storages.values()]


def window_for(sizes: Sequence[int], hbm_budget_bytes: int, fixed_bytes: int = 0) -> int:
    """Return the bytes to reserve for parameters of these `sizes` and their gradients, besides `fixed_bytes` that never move.
    Raises `InfeasibleBudget` if there is no room for the largest."""
    if not sizes:
        return 0
    window = min(2 * sum(sizes), max(LEAST_STORAGES * max(sizes), int(WINDOW_SHARE * (hbm_budget_bytes - fixed_bytes))))
    if window + fixed_bytes >= hbm_budget_bytes:
        beside = f", beside {format_size(fixed_bytes)} that never move" if fixed_bytes else ""
        raise InfeasibleBudget(
            f"hbm_budget: expected more than {format_size(window + fixed_bytes)}, the room for a parameter of "
            f"{format_size(max(sizes))}, its gradient and what comes next{beside}, got {format_size(hbm_budget_bytes)}; raise "
            f"the budget or split that parameter",
            smallest_bytes=window + fixed_bytes + 1,
        )
    return window


def plain_parts(t: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors that hold the bytes of `t`: `t` itself, or its inner tensors if its class lists them."""
    wrapper: Any = t  # the stub's protocol class cannot be a Tensor for mypy
    if type(t).__torch_dispatch__ is PLAIN_DISPATCH:
        yield t
    elif is_traceable_wrapper_subclass(wrapper):
        for name in wrapper.__tensor_flatten__()[0]:
            yield from plain_parts(getattr(wrapper, name))


_log = logging.getLogger(__name__)


def check_parameters(parameters: object, model: nn.Module | None) -> bool:
    """True if parameters are swapped. Raises `ValueError` for an invalid choice, without a model, and for a model that cannot
    be swapped."""
    if not isinstance(parameters, str) or parameters not in ("keep", "swap"):
        raise ValueError(f"parameters: expected 'keep' or 'swap', got {describe(parameters)}; 'swap' lets them leave the GPU")
    if parameters == "keep":
        return False
    if model is None:
        raise ValueError("parameters='swap': expected the model whose parameters are swapped, got none; pass model=, too")
    for name, module in model.named_modules():
        if (kind := _not_eager(module)) is not None:
            raise ValueError(
                f"parameters='swap': expected a model that runs in eager mode on one device, got one whose {name or 'root'} is "
                f"{kind}; leave parameters='keep'"
            )
    for name, p in model.named_parameters():
        if is_lazy(p):
            raise ValueError(
                f"parameters='swap': expected parameters that have a shape, got {name}, which a lazy module makes in its first "
                f"forward; run one batch before the session is made"
            )
        if type(p).__torch_dispatch__ is not PLAIN_DISPATCH and (p.requires_grad or not _is_quantised(p)):
            raise ValueError(
                f"parameters='swap': expected plain tensors, or frozen ones that wrap plain tensors, got {type(p).__name__} "
                f"for {name}, which is trained, or which somebody else shards (FSDP2 does); leave parameters='keep'"
            )
    return True


def _is_quantised(p: Tensor) -> bool:
    """True if `p` is a wrapper subclass with plain inner tensors of its own. Those of a `DTensor` belong to its mesh."""
    return not hasattr(p, "device_mesh") and any(True for _ in plain_parts(p))


def _not_eager(module: nn.Module) -> str | None:
    """Return the name of the mode in which `module` runs if that is not eager mode on one device; else None."""
    if isinstance(module, torch.jit.ScriptModule):
        return "TorchScript, which reads parameters where no Python sees it"
    if hasattr(module, "_orig_mod"):
        return "compiled"
    return "in DistributedDataParallel" if isinstance(module, nn.parallel.DistributedDataParallel) else None


class ParameterSwap:
    """Keeps the parameters of one model, and their gradients, within a share of a session's budget."""

    def __init__(
        self,
        executor: Executor,
        model: nn.Module,
        beside: DeviceBesideWindow,
        *,
        hbm_budget_bytes: int,
        other_movable_bytes: int,
    ) -> None:
        """`other_movable_bytes`: other bytes on the device that will be swapped out. Raises `InfeasibleBudget`."""
        self._executor = executor
        self._home = Home(executor)
        self._model = model
        self._whole = list(model.parameters())
        self._params: list[Tensor] = []
        """Parameters. A wrapper subclass is replaced by its plain inner tensors."""
        self._keys: dict[int, int] = {}
        self._list_params()
        self._sizes = charged_sizes(self._params)
        self._fixed_bytes = max(0, executor.device.allocated_bytes() - self.resident_bytes - other_movable_bytes)
        self.window = Window(self._home, limit_bytes=self.window_bytes(hbm_budget_bytes), note_taken=beside.note_taken)
        me = weakref.ref(self)
        beside.window = lambda: it.window if (it := me()) is not None and it._active else None
        self._handles: list[RemovableHandle] = []
        self._hooked: set[int] = set()
        """Ids of the parameters whose gradients have hooks."""
        self._active = False
        self._save: Callable[[Tensor], Any] | None = None
        self._pickled: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()
        self._modules: dict[int, tuple[weakref.ref[nn.Module], list[nn.Parameter]]] = {}

    # --- attaching

    def attach(self, stack: ExitStack) -> None:
        """Swap the parameters out, and bring each to the device at every access, until `stack` is closed."""
        stack.callback(self.detach)
        device = self._home.device.torch_device
        if elsewhere := [n for n, p in self._model.named_parameters() if p.device != device and next(plain_parts(p)) is not p]:
            raise ValueError(
                f"parameters='swap': expected weights of wrapper subclasses on {device}, where the session runs, got "
                f"{elsewhere[0]} elsewhere; move the model first"
            )
        self._active = True
        for p in self._params:
            if p.device != device:
                p.data = p.data.to(device)
            self._adopt(p)
        for module in self._model.modules():
            own = list(module.parameters(recurse=False))
            if own:
                self._modules[id(module)] = weakref.ref(module), own
        self._handles.append(register_module_forward_pre_hook(self._before_forward))
        stack.enter_context(ParameterWatch(self))

    def _list_params(self) -> None:
        self._params = [part for p in self._whole for part in plain_parts(p)]
        self._keys = {id(p): 2 * i for i, p in enumerate(self._params)}

    def detach(self) -> None:
        """Bring all parameters and gradients back to the device. If some no longer fit, move them to pageable host memory and
        warn."""
        if not self._active:
            return
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooked.clear()
        on_host = 0
        with self._home.entered() as compute:
            for entry in sorted(self.window.entries, key=lambda entry: entry.kind != "gradient"):
                try:
                    entry.swap_in(compute)
                    entry.arrive(compute)
                except (torch.OutOfMemoryError, TransferFailed):
                    on_host += self._to_host_memory(entry, compute)
        self._active = False
        self.window.clear()
        if on_host:
            _log.warning(
                "chameleon_mm: %s of parameters and gradients do not fit on the device and are in host memory now; use the "
                "model inside a session with parameters='swap', which takes them from there",
                format_size(on_host),
            )

    def _to_host_memory(self, entry: HostedStorage, compute: Stream) -> int:
        """Move the tensors over the storage of `entry`, which is on the host, to pageable host memory."""
        storage, memory = entry.ref(), entry.host_bytes(compute).untyped_storage()
        for p in self._params:
            gradient = p.grad
            if p.untyped_storage() is storage:
                p.grad = None
                p.data = tensor_over(memory, p)
                p.grad = None if gradient is None else gradient.to(p.device)
            elif gradient is not None and gradient.untyped_storage() is storage:
                p.grad = None
                p.data = p.data.cpu()  # torch keeps a gradient on its parameter's device
                p.grad = tensor_over(memory, gradient)
        return entry.nbytes

    @property
    def resident_bytes(self) -> int:
        """Bytes of parameters and gradients that are on the device now and may be swapped out."""
        tensors = (t for p in self._params for t in (p, p.grad) if t is not None and self._may_leave(t))
        return sum(charged_sizes(tensors))

    def window_bytes(self, hbm_budget_bytes: int) -> int:
        """Return the bytes to reserve within a budget. Raises `InfeasibleBudget`."""
        return window_for(self._sizes, hbm_budget_bytes, self._fixed_bytes)

    def change_window(self, limit_bytes: int) -> None:
        """Set another limit for parameters and gradients. Call it between steps."""
        self.window.limit_bytes = limit_bytes
        if self._active:
            with self._home.entered():
                self.window.make_room(0, keep=())

    # --- steps

    def begin_step(self) -> None:
        """Begin a step: also swap out parameters and gradients replaced since the last step."""
        with torch._C.DisableTorchFunction():
            self._list_params()
            for p in self._params:
                self._adopt(p)
        self.window.sequence.begin_step()

    def end_step(self, *, completed: bool) -> None:
        """End the step; if it `completed`, the next is expected to use parameters in the same order."""
        self.window.sequence.end_step(completed=completed)
        self.window.leave_node()
        with self._home.entered() as compute:
            for entry in self.window.entries:
                if entry.where is Where.COMING and entry.kind == "gradient":
                    entry.arrive(compute)  # it may have no later use; once it arrived, only its users hold it

    def bring(self, params: Iterable[Tensor]) -> None:
        """Bring `params` and their gradients to the device, for an optimizer's step."""
        with torch._C.DisableTorchFunction():
            found = [entry for p in params for t in (p, p.grad) if t is not None for entry in self.find_all(t)]
            self.use(found, "an optimizer's step")

    def send_out(self, params: Iterable[Tensor]) -> None:
        """Queue the copies out of `params`, which were written, perhaps by kernels that do not increase a version counter."""
        with self._home.entered():
            written = [entry for p in params if (entry := self.find(p)) is not None and entry.where is Where.ON_DEVICE]
            for entry in written:
                entry.host_is_current = False
            self.window.send_out(written)

    # --- calls of a watch

    def refuse_swap_of(self, t: object) -> None:
        """Raise `RuntimeError` if `t` is a parameter and torch converts modules by swapping tensors, which drops its hooks."""
        if id(t) in self._keys and torch.__future__.get_swap_module_params_on_conversion():
            raise RuntimeError(
                "parameters='swap': expected a conversion of the model that keeps its tensors, got one under "
                "torch.__future__.set_swap_module_params_on_conversion(True); turn that off, or convert before the session"
            )

    def find(self, t: Tensor) -> HostedStorage | None:
        """Return the entry of the storage of `t`; None: the storage never moves."""
        if t.layout is not torch.strided or not torch._C._has_storage(t):
            return None
        try:
            return self.window.find(t.untyped_storage())
        except RuntimeError:  # a functorch wrapper, which has no storage
            return None

    def find_all(self, t: Tensor) -> list[HostedStorage]:
        """Return the entries of the storages of `t`, which may be a wrapper subclass."""
        parts = (t,) if type(t).__torch_dispatch__ is PLAIN_DISPATCH else plain_parts(t)
        return [entry for part in parts if (entry := self.find(part)) is not None]

    def use(self, entries: Sequence[HostedStorage], what: str) -> None:
        """Bring `entries` to the device, for the function named `what`."""
        self._pickled.clear()  # the function may write them
        away = sum(entry.nbytes for entry in entries if entry.where is Where.ON_HOST)
        if away:
            self._home.check_readable(f"parameters for {what}", away)
        with self._home.entered():
            self.window.use(entries)

    def _use_by_node(self, entry: HostedStorage) -> None:
        if entry.where is Where.ON_HOST:
            self._home.check_readable("parameters for a backward", entry.nbytes)
        with self._home.entered():
            self.window.use_by(torch._C._current_autograd_node(), entry)

    def fit_together(self, entries: Sequence[HostedStorage]) -> bool:
        return sum(entry.charged_bytes for entry in entries) <= self.window.limit_bytes // 2

    def is_at_work(self) -> bool:
        """True if this thread works on swapped tensors under the executor's lock. Then it must not request them again."""
        return self._executor.hook_lock.thread == get_ident()

    def sees_saves(self) -> bool:
        """True if this object's hooks see autograd's saves now, and their uses."""
        hooks = saved_tensor_hooks_on_top()
        return hooks is not None and hooks[0] is self._save

    def use_at(self, nodes: Iterable[Node], entries: Sequence[HostedStorage]) -> None:
        """Bring `entries` to the device whenever one of `nodes` runs."""

        def use(gradients: Sequence[Tensor]) -> None:
            with torch._C.DisableTorchFunction():
                for entry in entries:
                    if self._active and entry.ref() is not None:
                        self._use_by_node(entry)

        for node in nodes:
            node.register_prehook(use)

    def pickled(self, t: Tensor, entry: HostedStorage) -> Tensor:
        """Return a copy of `t` in pageable host memory. Tensors that share a storage share it in their copies too."""
        memory = self._pickled.get(id(entry))
        if memory is None:
            with self._home.entered() as compute:
                memory = self._pickled[id(entry)] = entry.host_bytes(compute).untyped_storage()
        return tensor_over(memory, t)

    # --- for its callers

    def use_hook(self, use: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
        """Return an unpack hook that calls `use` and brings the result to the device."""

        def used(handle: Any) -> Tensor:
            with torch._C.DisableTorchFunction():
                t = use(handle)
                for entry in self.find_all(t) if self._active else ():
                    self._use_by_node(entry)
                return t

        return used

    def save_hook(self, save: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        """Return a pack hook that calls `save` unseen by the watch."""

        def saved(t: Tensor) -> Any:
            with torch._C.DisableTorchFunction():
                return save(t)

        self._save = saved
        return saved

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        known = self._modules.get(id(module))
        if known is None or known[0]() is not module:
            return
        with torch._C.DisableTorchFunction():
            self.use([entry for p in known[1] for entry in self.find_all(p)], type(module).__name__)

    def _before_accumulating(self, ref: weakref.ref[Tensor]) -> Callable[[Tensor], None]:
        def before(grad: Tensor) -> None:
            with torch._C.DisableTorchFunction():
                p = ref()
                if p is not None and p.grad is not None and (entry := self.find(p.grad)) is not None:
                    self._use_by_node(entry)

        return before

    def note_gradient(self, p: Tensor) -> None:
        """Queue the copy out of the gradient of `p`, which was just made or added to."""
        if not self._active:
            return
        with self._home.entered():
            entry = self._entry_of_gradient(p)
            if entry is not None:
                self.window.sequence.note(entry.key)
                self.window.send_out([entry])
                self.window.make_room(0, keep=())

    def _entry_of_gradient(self, p: Tensor) -> HostedStorage | None:
        """Return the entry of the gradient of `p`, added if needed; None: there is no gradient that may be swapped out."""
        g = p.grad
        if g is None or (entry := self.find(g)) is not None:
            return None if g is None else entry
        if not self._may_leave(g) or g.requires_grad or not is_alone(g):  # with a graph: autograd may have saved it
            return None
        self._home.recording.hide(g.untyped_storage())
        return self._add(g, self._keys[id(p)] + 1, is_gradient=True)

    def _add(self, t: Tensor, key: int, *, is_gradient: bool) -> HostedStorage:
        self._executor.protected.add(t.untyped_storage())  # so the executor does not move it when autograd saves it
        return self.window.add(t, key, is_gradient=is_gradient)

    def _adopt(self, p: Tensor) -> None:
        """Swap out the storages of `p` and of its gradient, if they are new and may be swapped out."""
        entry = self.find(p)
        if entry is not None:
            entry.follow(p)
        elif self._may_leave(p):
            with self._home.entered():
                self.window.free(self._add(p, self._keys[id(p)], is_gradient=False))
        if p.requires_grad and id(p) not in self._hooked:  # `p` may have been frozen until now
            self._hooked.add(id(p))
            self._handles.append(p.register_hook(self._before_accumulating(weakref.ref(p))))
            self._handles.append(p.register_post_accumulate_grad_hook(self.note_gradient))
        if p.grad is not None and id(p) in self._hooked and self.find(p.grad) is None:
            with self._home.entered():
                if (entry := self._entry_of_gradient(p)) is not None:
                    self.window.free(entry)

    def _may_leave(self, t: Tensor) -> bool:
        if t.layout is not torch.strided or not torch._C._has_storage(t) or not self._home.device.owns(t):
            return False
        storage = t.untyped_storage()
        return storage.resizable() and storage.nbytes() >= hosted.MIN_BYTES
