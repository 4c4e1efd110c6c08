"""Settings of torch's that decide which bits an operator computes, though it is not given them: read now, applied again later.

    settings = settings_now(is_product=True)       # where an operator runs
    with applied(settings): ...                    # where it runs again: as they were, and put back afterwards

The default dtype decides for all operators: it is the dtype of `zeros(3)` and of an integer divided by another. The precisions
and kernels that products and convolutions may use are read for these alone. All of them are the process's: while they are
applied, other threads see them too, but only where the user has changed one between an operator and its replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

_C: Any = torch._C


class _Setting(NamedTuple):
    """One setting of torch's."""

    read: Callable[[], Any]
    write: Callable[[Any], object]


def _precision(backend: str, op: str) -> _Setting:
    return _Setting(partial(_C._get_fp32_precision_getter, backend, op), partial(_C._set_fp32_precision_setter, backend, op))


def _plain(name: str) -> _Setting:
    return _Setting(getattr(_C, f"_get_{name}"), getattr(_C, f"_set_{name}"))


def _spread(name: str) -> _Setting:
    """A setting that is read as a tuple and written as several arguments."""
    write = getattr(_C, f"_set_{name}")

    def write_all(value: Any) -> None:
        write(*value) if isinstance(value, tuple) else write(value)

    return _Setting(getattr(_C, f"_get_{name}"), write_all)


_OF_PRODUCTS = (
    # Widest first: to write one may change the narrower ones.
    _precision("generic", "all"),
    _precision("cuda", "all"),
    _precision("mkldnn", "all"),
    _precision("cuda", "matmul"),
    _precision("cuda", "conv"),
    _precision("mkldnn", "matmul"),
    _precision("mkldnn", "conv"),
    _spread("cublas_allow_fp16_reduced_precision_reduction"),
    _spread("cublas_allow_bf16_reduced_precision_reduction"),
    _plain("cublas_allow_fp16_accumulation"),
    _plain("cudnn_enabled"),
    _plain("cudnn_benchmark"),
    _plain("cudnn_deterministic"),
    _plain("mkldnn_enabled"),
    _plain("mkldnn_deterministic"),
    _plain("deterministic_algorithms"),
    _plain("blas_preferred_backend"),
)


class KernelSettings(NamedTuple):
    """The settings under which an operator ran."""

    default_dtype: torch.dtype
    of_products: tuple[Any, ...] | None
    """Values of `_OF_PRODUCTS`; None: it is no product, and they do not matter."""


def settings_now(*, is_product: bool) -> KernelSettings:
    """The settings as they are."""
    return KernelSettings(torch.get_default_dtype(), _read() if is_product else None)


def _read() -> tuple[Any, ...]:
    return tuple([setting.read() for setting in _OF_PRODUCTS])


@contextmanager
def applied(settings: KernelSettings) -> Iterator[None]:
    """Context in which the settings are `settings`."""
    now = settings_now(is_product=settings.of_products is not None)
    if now == settings:
        yield
        return
    try:
        _apply(settings)
        yield
    finally:
        _apply(now)


def _apply(settings: KernelSettings) -> None:
    if settings.default_dtype is not torch.get_default_dtype():
        torch.set_default_dtype(settings.default_dtype)
    if settings.of_products is not None:
        for setting, value in zip(_OF_PRODUCTS, settings.of_products, strict=True):
            if setting.read() != value:
                setting.write(value)
