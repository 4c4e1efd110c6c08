"""Operators that compute nothing: results have their shapes and memory that nobody writes, so that it takes none.

    with NoArithmetic():                    # entered first, so that it comes last
        with device.compute(): ...          # SimDevice(..., moves_bytes=False) counts, prices and orders as ever

    view, or all of it small     -> runs: views touch no memory, and an optimizer divides by what it counts
    all else                     -> shapes under fake tensors, once for each kind of call; results are new tensors of that shape

Tensors are plain ones, with storages and addresses: whoever swaps them does what it does where they are computed. Their memory
is the system's promise alone: pages that nobody touches are never there.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from chameleon_mm.units import KIB

COMPUTED_BYTES = 4 * KIB
"""Bytes that tensors given to an operator, and made by it, may have together for it to run: counts and norms have no more."""


_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format)


class _New(NamedTuple):
    """A result that is a new tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class _Given(NamedTuple):
    """A result that is an argument."""

    place: int
    """Its place among all that the operator is given, nests flattened."""


class _Outcome(NamedTuple):
    """Outcome of a kind of call: `results`, nested as `nest` says; None: it has to run."""

    results: tuple[Any, ...] | None
    nest: Any = None


_RUNS = _Outcome(None)


class NoArithmetic(TorchDispatchMode):
    """While active, this thread's operators on the CPU make results of the right shapes, and compute small numbers alone."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch annotates no argument of it
        self._fake = FakeTensorMode()
        self._outcomes: dict[Hashable, _Outcome] = {}

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        kind = (func, _kind(args), _kind(tuple(kwargs.items())))
        outcome = self._outcomes.get(kind)
        if outcome is None:
            outcome = self._outcomes[kind] = self._find(func, args, kwargs)
        if outcome.results is None:
            return func(*args, **kwargs)
        given = tree_flatten((args, kwargs))[0] if any(isinstance(one, _Given) for one in outcome.results) else []
        return tree_unflatten([_made(one, given) for one in outcome.results], outcome.nest)

    def _find(self, func: Any, args: Any, kwargs: Any) -> _Outcome:
        """The outcome of such a call. Raises as fake tensors do for what depends on numbers that are not there."""
        views = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)
        flat = tree_flatten((args, kwargs))[0]
        if views or any(isinstance(value, torch.UntypedStorage) for value in flat):
            return _RUNS
        fakes: dict[int, Tensor] = {}

        def faked(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if id(value) not in fakes:
                fakes[id(value)] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
            return fakes[id(value)]

        nbytes = sum(_nbytes(value) for value in flat if isinstance(value, Tensor))
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
            return _RUNS  # a view in all but its schema
        if nbytes + sum(map(_nbytes, made)) <= COMPUTED_BYTES:
            return _RUNS
        return _Outcome(tuple(_result(one, places) for one in results), nest)


def _kind(value: Any) -> Hashable:
    """Facts of an argument that decide the shapes of results."""
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


def _made(result: Any, given: list[Any]) -> Any:
    if isinstance(result, _Given):
        return given[result.place]
    if not isinstance(result, _New):
        return result
    t = torch.empty_strided(result.shape, result.stride, dtype=result.dtype, device="cpu")
    return t.zero_() if _nbytes(t) <= COMPUTED_BYTES else t


def _nbytes(t: Tensor) -> int:
    return t.numel() * t.element_size()
