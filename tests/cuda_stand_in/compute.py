"""Operators without a GPU: every ATen kernel of the CUDA key runs the CPU's kernel on the same memory.

    kernel of an operator:
        begin(stream)                   what the stream holds runs first: the operator sees what its stream may see
        report(arguments)               the runtime checks that nothing unordered touches the same bytes
        CPU kernel on aliases           of the arguments' memory; results move to new CUDA tensors
        wrote(stream, results)          they read as 0xff on other streams until something orders itself after this one

Allocation, views, streams, events and copies between host and device stay torch's own. `install` is a `torch.backends` entry
point: `import torch` calls it, in subprocesses, too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import DispatchKey

from tests.cuda_stand_in import bindings, capture, library, sparse
from tests.cuda_stand_in.memory import CPU, HostView, hide, on_device, report
from tests.cuda_stand_in.random_state import Draws

_STAYS = {
    "_efficientzerotensor", "_empty_affine_quantized", "_fused_sdp_choice", "_has_compatible_shallow_copy_type",
    "_local_scalar_dense", "_pin_memory", "_record_function_enter", "_resize_output_", "_to_copy", "alias", "as_strided",
    "detach", "empty", "empty_like", "empty_strided", "is_pinned", "is_set_to", "new_empty", "new_empty_strided", "pin_memory",
    "record_stream", "resize_", "resize_as_", "set_",
}  # fmt: skip
"""Operators whose CUDA kernels move no bytes, or move them by the runtime: they stay torch's own."""


class OnHost(NamedTuple):
    """A result of a formula that stays on the CPU, as the real operator's does."""

    tensor: Tensor


Formula = Callable[..., Any]
"""Replacement of a CPU kernel: formula(operator, draws, *arguments), with CPU tensors."""


class Kernel:
    """Kernel of an operator for the CUDA key."""

    # No closure here calls itself: such a cycle would keep an operator's arguments alive until a collection.

    def __init__(self, op: torch._ops.OpOverload, formula: Formula | None = None) -> None:
        schema = op._schema
        self.op = op
        self.formula = formula
        self.what = op.name().encode()
        self.names = [a.name for a in schema.arguments]
        self.written = [i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
        self.written_names = {self.names[i] for i in self.written}
        self.sources = [self._argument_of(r) for r in schema.returns]
        self.tensors = [i for i, a in enumerate(schema.arguments) if isinstance(a.type, torch._C.TensorType)]
        packet = getattr(torch.ops.aten, schema.name.partition("::")[2])
        self.scalar_form = getattr(packet, "Scalar", None) if op._overloadname == "Tensor" else None
        self.takes_generator = formula is None and torch.Tag.nondeterministic_seeded in op.tags and "generator" in self.names
        self.host_waits = torch.Tag.dynamic_output_shape in op.tags or torch.Tag.data_dependent_output in op.tags

    def _argument_of(self, result: Any) -> int | None:
        """Position of the written argument that is this result; None if there is none."""
        if result.alias_info is not None:
            for i in self.written:
                alias = self.op._schema.arguments[i].alias_info
                if alias is not None and alias.before_set & result.alias_info.before_set:
                    return i
        return None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        device = device_of(args, kwargs)
        current = torch._C._cuda_getDevice()
        if current == device.index:
            return self._on(device, args, kwargs)
        torch._C._cuda_setDevice(device.index)  # the default stream is the current device's
        try:
            return self._on(device, args, kwargs)
        finally:
            torch._C._cuda_setDevice(current)

    def _on(self, device: torch.device, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        if self.host_waits:
            library.synchronize(stream)
        if library.capturing(stream):
            return capture.record(self, device, stream, args, kwargs)
        library.begin(stream)
        self.report(stream, args, kwargs)
        view = HostView()
        low_args, low_kwargs = self.lowered(args, kwargs, view)
        out = self.run(low_args, low_kwargs, Draws(device, kwargs.get("generator")))
        touched = self.written_back(args, kwargs, low_args, low_kwargs, HostView())

        def raised(result: Tensor) -> Tensor:
            made = on_device(result, device, stream, self.what)
            touched.append(made)
            return made

        final = self.results(out, args, kwargs, raised)
        hide(stream, touched)
        return final

    def report(self, stream: int, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        for name, a in (*zip(self.names, args, strict=False), *kwargs.items()):
            for x in a if isinstance(a, (list, tuple)) else (a,):
                if isinstance(x, Tensor) and x.is_cuda:
                    kind = library.WRITE_IN_PLACE if name in self.written_names else library.READ
                    report(stream, x, kind, self.what)

    def lowered(self, args: Sequence[Any], kwargs: dict[str, Any], view: HostView) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments as the CPU's kernel takes them."""
        low_kwargs = {name: lowered(a, view) for name, a in kwargs.items()}
        if "pin_memory" in low_kwargs:
            low_kwargs["pin_memory"] = None
        return [lowered(a, view) for a in args], low_kwargs

    def run(self, args: list[Any], kwargs: dict[str, Any], draws: Any) -> Any:
        """Runs on CPU tensors, which it may write."""
        if self.formula is not None:
            return self.formula(self.op, draws, *args, **kwargs)
        if self.takes_generator:
            kwargs = {**kwargs, "generator": draws.generator()}
        call = self.op
        for i in self.tensors:  # a number that an operator took for a tensor comes as a number again
            if i < len(args) and isinstance(args[i], (bool, int, float, complex)):
                if self.scalar_form is not None and i:
                    call = self.scalar_form
                else:
                    args = [*args[:i], number_tensor(args[i], args), *args[i + 1 :]]
        if self.written or not (reduced := reduced_dtype(args)):
            return call(*args, **kwargs)
        try:
            return call(*args, **kwargs)
        except RuntimeError as error:
            if not any(f"not implemented for '{name}'" in str(error) for name in ("Half", "BFloat16")):
                raise
            return in_float32(call, args, kwargs, reduced)

    def given(self, args: Sequence[Any], kwargs: dict[str, Any], i: int) -> Any:
        return args[i] if i < len(args) else kwargs.get(self.names[i])

    def written_back(
        self, args: Sequence[Any], kwargs: dict[str, Any], low_args: Sequence[Any], low_kwargs: dict[str, Any], view: HostView
    ) -> list[Tensor]:
        """Return the written arguments; an `out=` whose size changed gets its size and its bytes here."""
        touched = []
        for i in self.written:
            high, low = self.given(args, kwargs, i), self.given(low_args, low_kwargs, i)
            for h, low_h in zip(high, low, strict=True) if isinstance(high, (list, tuple)) else ((high, low),):
                if not isinstance(h, Tensor) or not h.is_cuda:
                    continue
                if low_h.size() != h.size():
                    items = sum((n - 1) * stride for n, stride in zip(low_h.size(), low_h.stride(), strict=True)) + 1
                    h.resize_(items if low_h.numel() else 0)
                    h.as_strided_(low_h.size(), low_h.stride())
                    view.of(h).copy_(low_h)
                touched.append(h)
        return touched

    def results(self, out: Any, args: Sequence[Any], kwargs: dict[str, Any], raised: Callable[[Tensor], Tensor]) -> Any:
        """Return the operator's results: the arguments that it wrote, and new tensors."""
        if not self.sources:
            return None
        outs = (out,) if len(self.sources) == 1 else out
        final = tuple(
            on_high(o, raised) if source is None else self.given(args, kwargs, source)
            for o, source in zip(outs, self.sources, strict=True)
        )
        return final[0] if len(final) == 1 else final


def device_of(args: Iterable[Any], kwargs: dict[str, Any]) -> torch.device:
    """Return the device of the first CUDA tensor, or the one requested from a factory."""
    for a in (*args, *kwargs.values()):
        for x in a if isinstance(a, (list, tuple)) else (a,):
            if isinstance(x, Tensor) and x.is_cuda:
                return x.device
    asked = kwargs.get("device")
    if asked is not None and torch.device(asked).index is not None:
        return torch.device(asked)
    return torch.device("cuda", torch._C._cuda_getDevice())


def lowered(x: Any, view: HostView) -> Any:
    if isinstance(x, Tensor):
        return view.of(x)
    if isinstance(x, torch.device):
        return CPU
    if isinstance(x, torch.Generator):
        return None  # `Kernel.run` passes one of the CPU
    return type(x)([lowered(y, view) for y in x]) if isinstance(x, (list, tuple)) else x


def on_high(x: Any, raised: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(x, OnHost):
        return x.tensor
    if isinstance(x, Tensor):
        return raised(x)
    return [on_high(y, raised) for y in x] if isinstance(x, (list, tuple)) else x


def reduced_dtype(args: Iterable[Any]) -> torch.dtype | None:
    """Return the 16-bit dtype of the tensor arguments; None if there is none, or if one is float32."""
    found = {a.dtype for a in args if isinstance(a, Tensor)}
    if torch.float32 in found:
        return None
    return next((dtype for dtype in (torch.float16, torch.bfloat16) if dtype in found), None)


def in_float32(call: Callable[..., Any], args: Iterable[Any], kwargs: dict[str, Any], dtype: torch.dtype) -> Any:
    """Computes in float32, and rounds the results of, an operator that the CPU lacks for a 16-bit `dtype`.

    Whether a GPU has it is not checked.
    """
    wide = [a.float() if isinstance(a, Tensor) and a.dtype == dtype else a for a in args]

    def narrow(x: Tensor) -> Tensor:
        return x.to(dtype) if x.dtype == torch.float32 else x

    out = call(*wide, **kwargs)
    return type(out)(map(narrow, out)) if isinstance(out, (tuple, list)) else narrow(out)


def number_tensor(number: Any, args: Sequence[Any]) -> Tensor:
    """A number as a tensor: as precise as torch keeps one, unless that would change the result's dtype."""
    precise = torch.float64 if isinstance(number, float) else torch.complex128 if isinstance(number, complex) else None
    made = torch.tensor(number, dtype=precise)
    other = next((a for a in args if isinstance(a, Tensor)), None)
    if other is not None and torch.result_type(other, made) != (wanted := torch.result_type(other, number)):
        return made.to(wanted)
    return made


_COPY = torch.ops.aten.copy_.default
_copy_on_device = Kernel(_COPY)


def copy_(dst: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
    """Leave the runtime's copies to torch. A copy that a GPU makes by a kernel is an operator."""
    by_runtime = dst.dtype == src.dtype and dst.is_conj() == src.is_conj() and dst.is_neg() == src.is_neg()
    by_runtime = by_runtime and dst.size() == src.size() and dst.stride() == src.stride()
    by_runtime = by_runtime and torch._prims_common.is_non_overlapping_and_dense_or_false(dst)
    if by_runtime or dst.is_cuda != src.is_cuda:
        if capture.active(dst if dst.is_cuda else src):
            return capture.copy_(dst, src, non_blocking, torch_copy_)
        return torch_copy_(dst, src, non_blocking)
    if dst.device != src.device:  # torch would let a kernel of one device read the other's memory
        dense = torch.empty_like(dst, device=src.device, memory_format=torch.contiguous_format).copy_(src)
        src = torch.empty_like(dense, device=dst.device).copy_(dense)
    return _copy_on_device(dst, src, non_blocking)  # type: ignore[no-any-return]  # a kernel returns what its schema says


def torch_copy_(dst: Tensor, src: Tensor, non_blocking: bool) -> Tensor:
    kind = library.copy_kind(library.INTO_PLACE)  # the earlier kind may be one that the library set for its own copy
    if kind != library.STRICT or not (dst.is_cuda and src.is_cuda):
        library.copy_kind(kind)
    try:
        return _COPY._op_dk(DispatchKey.CompositeExplicitAutograd, dst, src, non_blocking)  # type: ignore[no-any-return]  # as above
    finally:
        library.copy_kind(kind)


_table: torch.library.Library | None = None


def operators() -> Iterable[torch._ops.OpOverload]:
    """Operators with a CUDA kernel that have one of the CPU, too.

    Others are left alone: a kernel of the CUDA key would cost a composite operator its autograd, and a view is none.
    """
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"):
        packet, _, overload = name.removeprefix("aten::").partition(".")
        if not name.startswith("aten::") or packet in _STAYS:
            continue
        try:
            op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        except AttributeError:  # registered, and not shown to Python
            continue
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns)
        if not is_view and torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, "CPU"):
            yield op


def install() -> None:
    """Registers the kernels."""
    global _table  # noqa: PLW0603 - registrations last as long as the table, which is as long as the process
    if _table is not None:
        return
    from tests.cuda_stand_in import formulas

    bindings.install()
    capture.install()
    _table = torch.library.Library("aten", "IMPL")
    torch.backends.cudnn.enabled = False  # convolutions and recurrent layers go by kernels that a CPU has, too
    torch.backends.cuda.enable_cudnn_sdp(False)
    by_formula = formulas.table()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that its kernels are replaced
        for op in operators():
            if op not in by_formula:
                _table.impl(op, Kernel(op), "CUDA", allow_override=True)
        for op, formula in by_formula.items():
            _table.impl(op, Kernel(op, formula), "CUDA", allow_override=True)
        for op, key in sparse.operators():
            _table.impl(op, Kernel(op), key, allow_override=True)
        _table.impl(_COPY, copy_, "CUDA")
    _hide_from_dynamo()


def _hide_from_dynamo() -> None:
    """Skip these kernels in dynamo, which would compile any Python that runs below a graph break."""
    frames = torch._C._dynamo.eval_frame  # torch.compiler.disable would import all of dynamo
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    for function in (copy_, Kernel.__call__):
        frames.set_code_exec_strategy(function.__code__, skip)
