"""Operators on shapes only: the operators that a GPU would run, without computing.

    with NoArithmetic():                    # entered first, because the last mode entered runs first
        with device.compute(): ...          # SimDevice(..., moves_bytes=False) counts, prices and orders as usual

    view, or few bytes in all    -> runs: views touch no memory, and an optimizer divides by its step count
    all else                     -> shapes under fake tensors, once per kind of call; results are new tensors of that shape

Tensors are ordinary ones, with storages and addresses: swapping treats them like computed tensors. Their memory is only
reserved: the operating system provides a page when something first touches it.

    with ShapesAlone(): ...                 # for a step that is only recorded: fake tensors, of any size on any machine
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorConverter,
    FakeTensorMode,
    in_kernel_invocation_manager,
)
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from chameleon_mm.units import KIB

# --- Differences between GPU and CPU for a step under fake tensors: operators that save other tensors, and autocast
#
# The CPU's fused attention takes no dropout: torch would fall back to a kernel that saves s x s matrices. CUDA's takes dropout
# and saves a seed. The CPU's dropout saves its multiplier, in the dtype of x. The CPU's RMS norm consists of several operators
# that each save something; CUDA's is one operator. Only shapes count, so attention drops nothing here.
#
# Fake tensors are on the CPU, so the CPU's autocast replaces CUDA's. Both cast down matrix products, convolutions, attention.
# CUDA's casts more operators up to float32: `in_float32` does that, by the names that torch documents. The remaining
# differences are rare: products of a matrix and a vector, and cells of recurrent layers, stay in float32 here.

_DROPOUT_P = 4
"""Index of dropout's probability among the positional arguments of attention."""

_RMS_NORMS = (F.rms_norm, torch.rms_norm)

PLANNED_ON, PLANNED_FOR = "cpu", "cuda"
"""Device of the tensors of a step without a GPU, and the device whose autocast is redirected to it."""

_IN_FLOAT32 = frozenset({
    "__pow__", "__rdiv__", "__rpow__", "__rtruediv__", "acos", "asin", "binary_cross_entropy_with_logits", "cdist", "cosh",
    "cosine_embedding_loss", "cosine_similarity", "cross_entropy", "cumprod", "cumsum", "dist", "erfinv", "exp", "expm1",
    "frobenius_norm", "group_norm", "hinge_embedding_loss", "huber_loss", "interpolate", "kl_div", "l1_loss", "layer_norm",
    "linalg_matrix_norm", "linalg_norm", "linalg_vector_norm", "log", "log10", "log1p", "log2", "log_softmax", "logsumexp",
    "margin_ranking_loss", "mse_loss", "multi_margin_loss", "multilabel_margin_loss", "native_layer_norm", "nll_loss", "norm",
    "normalize", "nuclear_norm", "pdist", "poisson_nll_loss", "pow", "prod", "reciprocal", "renorm", "rms_norm", "rsqrt",
    "sinh", "smooth_l1_loss", "soft_margin_loss", "softmax", "softmin", "softplus", "sum", "tan", "triplet_margin_loss",
})  # fmt: skip
_NARROW = (torch.bfloat16, torch.float16)


class GpuOperators(TorchFunctionMode):
    """While active, this thread's attention, dropout, RMS norms and float32 operators under autocast are a GPU's."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            return _dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            args = (*args[:_DROPOUT_P], *(0.0 for _ in args[_DROPOUT_P : _DROPOUT_P + 1]), *args[_DROPOUT_P + 1 :])
            if "dropout_p" in kwargs:
                kwargs = {**kwargs, "dropout_p": 0.0}
        args, kwargs = in_float32(getattr(func, "__name__", ""), args, kwargs)
        return _rms_norm(*args, **kwargs) if func in _RMS_NORMS else func(*args, **kwargs)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: A002 - F.dropout's name
    if inplace or not training or p in (0.0, 1.0):  # no fused kernel on a GPU either
        return F.dropout(input, p, training, inplace)
    dropped, _ = torch.native_dropout(input, p, training)
    return dropped


def _rms_norm(input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:  # noqa: A002 - F.rms_norm's name
    if weight is not None and weight.dtype != input.dtype:  # the fused kernel takes one dtype, on a GPU too
        return F.rms_norm(input, list(normalized_shape), weight, eps)
    normalised: Tensor = _FusedRmsNorm.apply(input, list(normalized_shape), weight, eps)  # type: ignore[no-untyped-call]  # torch's
    return normalised


class _FusedRmsNorm(torch.autograd.Function):
    """CUDA's fused RMS norm. A build without CUDA has only its shapes; below autograd it stays one operator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, normalized_shape: list[int], weight: Tensor | None, eps: float | None) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            out, scales = torch.ops.aten._fused_rms_norm(x, normalized_shape, weight, eps)
        ctx.save_for_backward(x, weight, scales)
        ctx.normalized_shape = normalized_shape
        return out  # type: ignore[no-any-return]  # as the operator's schema has it

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        x, weight, scales = ctx.saved_tensors
        needed = [ctx.needs_input_grad[0], weight is not None and ctx.needs_input_grad[2]]
        with torch._C._AutoDispatchBelowAutograd():
            of_x, of_weight = torch.ops.aten._fused_rms_norm_backward(grads[0], x, ctx.normalized_shape, scales, weight, needed)
        return of_x, None, of_weight, None


@contextmanager
def gpu_autocast() -> Iterator[None]:
    """While active, autocast for CUDA acts on the CPU tensors of a step without a GPU instead, in the same dtype."""
    autocast = torch.amp.autocast_mode.autocast
    original = autocast.__init__

    def init(self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any) -> None:
        if device_type == PLANNED_FOR:
            device_type, dtype = PLANNED_ON, dtype or torch.get_autocast_dtype(device_type)
        original(self, device_type, dtype, *args, **kwargs)

    # All spellings of autocast call this: torch.autocast, torch.amp's, torch.cuda.amp's, and those imported by name.
    autocast.__init__ = init  # type: ignore[method-assign]  # put back below
    try:
        yield
    finally:
        autocast.__init__ = original  # type: ignore[method-assign]  # as it was


def in_float32(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Cast the arguments of the operator `name` up to float32, if autocast is active and CUDA's casts them up."""
    if name not in _IN_FLOAT32 or not torch.is_autocast_enabled(PLANNED_ON):
        return args, kwargs
    return tuple(map(_wide, args)), {key: _wide(value) for key, value in kwargs.items()}


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _NARROW else value


COMPUTED_BYTES = 4 * KIB
"""Maximum total bytes of inputs and results of operators that are computed. Counts and norms have no more."""

_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format)


class _New(NamedTuple):
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def on(self, device: str) -> Tensor:
        """Return a new tensor with its own storage."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)


class _Given(NamedTuple):
    place: int
    """Index among all arguments of the operator, nests flattened."""


class _Outcome(NamedTuple):
    """Outcome of a kind of call: `results`, nested by `nest`; None: the operator must run."""

    results: tuple[Any, ...] | None
    nest: Any = None

    @classmethod
    def of(cls, results: Sequence[Any], nest: Any, places: dict[int, int]) -> _Outcome:
        """Return the outcome of a call that returned `results`. `places`: indexes of its arguments, by id."""
        return cls(tuple(_result(one, places) for one in results), nest)

    def made(self, make: Callable[[_New], Tensor], args: Any, kwargs: Any) -> Any:
        """Return the results of such a call with these arguments. `make` makes new tensors."""
        assert self.results is not None
        given = tree_flatten((args, kwargs))[0] if any(isinstance(one, _Given) for one in self.results) else ()
        made = [make(it) if isinstance(it, _New) else given[it.place] if isinstance(it, _Given) else it for it in self.results]
        return made[0] if self.nest.is_leaf() else tree_unflatten(made, self.nest)


_RUNS = _Outcome(None)


class ValuesReadAsZero(TorchDispatchMode):
    """Mode in which reading a fake tensor's value gives 0. `trunc_normal_` reads what it drew, and drop-path rates are read
    from a `linspace`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch annotates no argument of it
        self.notes: tuple[str, ...] = ()
        """Note if a number was read; else empty."""

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not torch.ops.aten._local_scalar_dense.default or not isinstance(args[0], FakeTensor):
            return func(*args, **(kwargs or {}))
        if args[0].dtype is torch.bool:
            return False
        self.notes = ("numbers that the model reads from tensors while it is built count as 0, such as rates of its layers",)
        return 0.0 if args[0].is_floating_point() else 0


@cache
def makes_views(func: Any) -> bool:
    """True for an operator that returns views of its arguments, by its schema, which is read once."""
    return any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)


class NoArithmetic(TorchDispatchMode):
    """While active, this thread's CPU operators return results of the right shapes, and compute only small ones."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch annotates no argument of it
        self._fake = FakeTensorMode()
        self._outcomes: dict[Hashable, _Outcome] = {}

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if makes_views(func):
            return func(*args, **kwargs)
        kind = (func, _kind(args), _kind(tuple(kwargs.items())))
        outcome = self._outcomes.get(kind)
        if outcome is None:
            outcome = self._outcomes[kind] = self._find(func, args, kwargs)
        return func(*args, **kwargs) if outcome.results is None else outcome.made(_reserved, args, kwargs)

    def _find(self, func: Any, args: Any, kwargs: Any) -> _Outcome:
        """Return the outcome of such a call. Raises the errors of fake tensors if it depends on values, which are missing."""
        flat = tree_flatten((args, kwargs))[0]
        if any(isinstance(value, torch.UntypedStorage) for value in flat):
            return _RUNS
        fakes: dict[int, Tensor] = {}

        def faked(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if id(value) not in fakes:
                fakes[id(value)] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
            return fakes[id(value)]

        nbytes = sum(value.nbytes for value in flat if isinstance(value, Tensor))
        with self._fake:
            fake_args, fake_kwargs = tree_map(faked, (args, kwargs))
            try:
                out = func(*fake_args, **fake_kwargs)
            except (DataDependentOutputException, DynamicOutputShapeException):
                if nbytes > COMPUTED_BYTES:
                    raise
                return _RUNS
        results, nest = tree_flatten(out)
        places = {id(value): i for i, value in enumerate(tree_flatten((fake_args, fake_kwargs))[0])}
        made = [one for one in results if isinstance(one, Tensor) and id(one) not in places]
        shared = {id(fake.untyped_storage()) for fake in fakes.values()}
        if any(one.device.type != "cpu" or id(one.untyped_storage()) in shared for one in made):
            return _RUNS  # a view, although its schema does not say so
        if nbytes + sum(one.nbytes for one in made) <= COMPUTED_BYTES:
            return _RUNS
        return _Outcome.of(results, nest, places)


def _reserved(new: _New) -> Tensor:
    t = new.on("cpu")
    return t.zero_() if t.nbytes <= COMPUTED_BYTES else t


def _kind(value: Any) -> Hashable:
    """Properties of an argument that determine the shapes of results."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device.type
    if isinstance(value, (tuple, list)):
        return tuple(map(_kind, value))
    return value if isinstance(value, (int, str)) else str(value) if isinstance(value, _NAMED) else str(type(value))


def _result(value: Any, places: dict[int, int]) -> Any:
    if not isinstance(value, Tensor):
        return value
    if id(value) in places:
        return _Given(places[id(value)])
    return _New(tuple(value.shape), tuple(value.stride()), value.dtype)


# --- A mode for a step that is recorded: all tensors are fake, and have no address

_CPU = torch.device("cpu")


class _NoTensorMemo(FakeTensorConverter):
    """Keeps no weak reference to results of operators: `Module.to` refuses a parameter that has one.

    Such references would find the fake tensor of a result again, but no operator returns the same result twice. The base class
    still remembers real tensors from outside.
    """

    def set_tensor_memo(self, t: Tensor, v: FakeTensor) -> None:
        """Do nothing."""


class _Unlike(Exception):
    """The shapes of a call's arguments do not determine its results."""


class ShapesAlone(FakeTensorMode):
    """Mode in which all tensors are fake, including those from outside it.

    Torch needs 0.25 ms to find a call's results. So a repeated kind of call gets new tensors like the first one's, without
    torch. For a view, only the kernel is called.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.fake_tensor_converter = _NoTensorMemo()
        self.cache_enabled = False  # torch's own, which takes most of that time
        self._outcomes: dict[Hashable, _Outcome] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] = MappingProxyType({})
    ) -> Any:
        if func is torch.ops.prim.device.default:  # autograd's query, more frequent than operators
            return args[0].device
        try:
            kind = (func, torch.get_default_dtype(), self._kind(args), self._kind(tuple(kwargs.items())))
        except _Unlike:
            return super().__torch_dispatch__(func, types, args, kwargs)
        outcome = self._outcomes.get(kind)
        if outcome is _VIEWS:
            with in_kernel_invocation_manager(self):
                out = func(*args, **kwargs)
            return self._wrapped(out) if isinstance(out, Tensor) else type(out)(map(self._wrapped, out))
        if outcome is not None and outcome.results is not None:
            return outcome.made(lambda new: self._wrapped(new.on("meta")), args, kwargs)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if outcome is None:
            self._outcomes[kind] = _outcome(func, args, kwargs, out)
        return out

    def _wrapped(self, t: Tensor) -> Tensor:
        return FakeTensor(self, t, _CPU)

    def _kind(self, value: Any) -> Hashable:
        """Return the properties of an argument that determine the shapes of results. Raises `_Unlike` if others may matter."""
        if isinstance(value, Tensor):
            if type(value) is not FakeTensor or value.fake_mode is not self or not _is_plain(value):
                raise _Unlike
            return value.shape, value.stride(), value.dtype
        if isinstance(value, (tuple, list)):
            return tuple(map(self._kind, value))
        if value is not None and not isinstance(value, _PLAIN):
            raise _Unlike
        return type(value), value  # True differs from 1: another dtype


_PLAIN = (bool, int, float, str, *_NAMED)

_VIEWS = _Outcome(None)


def _is_plain(fake: Any) -> bool:
    """True if `fake` has only shape, strides and dtype: no value known to torch, no lazy bit."""
    is_known = fake.constant is not None or fake.fake_device != _CPU
    return not is_known and fake.layout is torch.strided and not fake.is_conj() and not fake.is_neg()


def _outcome(func: Any, args: Any, kwargs: Any, out: Any) -> _Outcome:
    """Return the outcome of a kind of call under `ShapesAlone`. `out`: result of one such call."""
    if not isinstance(func, torch._ops.OpOverload) or torch.Tag.inplace_view in func.tags:
        return _RUNS
    flat, (results, nest) = tree_flatten((args, kwargs))[0], tree_flatten(out)
    places = {id(value): i for i, value in enumerate(flat)}
    given = {id(value.untyped_storage()) for value in flat if isinstance(value, Tensor)}
    made = [one for one in results if isinstance(one, Tensor) and id(one) not in places]
    storages = [id(one.untyped_storage()) for one in made]
    if given.issuperset(storages) and len(made) == len(results) and not func._schema.is_mutable:
        return _VIEWS
    times = Counter(map(id, flat))
    if len({*given, *storages}) < len(given) + len(made) or any(isinstance(t, Tensor) and times[id(t)] > 1 for t in results):
        return _RUNS  # results share a storage, or the argument of one is unknown
    is_told = all(one is None or id(one) in places or (type(one) is FakeTensor and _is_whole(one)) for one in results)
    return _Outcome.of(results, nest, places) if is_told else _RUNS


def _is_whole(fake: Tensor) -> bool:
    """True if `fake` is like a new tensor of its shape, strides and dtype, with its own storage."""
    like = _result(fake, {}).on("meta").untyped_storage()
    return _is_plain(fake) and not fake.storage_offset() and fake.untyped_storage().nbytes() == like.nbytes()
