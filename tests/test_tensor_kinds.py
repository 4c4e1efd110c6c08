"""Every kind of tensor that autograd may save comes back bit for bit, or stays on the device and is counted by reason.

out = Keeper.apply(x, make())       # a custom function saves what `make` made; nobody else holds it
all that leaves the device has left
out.backward()                      # what the function gets back == what `make` makes once more
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import chameleon_mm as cm
from chameleon_mm.device import Device
from tests._programs import swapping_executor

NO_GC = pytest.mark.usefixtures("no_gc")
# Torch says so of some layouts and of complex32, once a process.
IN_BETA = pytest.mark.filterwarnings("ignore:.*(in beta state|prototype stage|experimental|deprecated):Warning")


class Swapping:
    """An executor that moves every storage, and its pool."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.pool = cm.PinnedPool("8MiB", device=device, chunk_bytes=1 << 20)
        self.executor = swapping_executor(device, self.pool)

    @property
    def kept(self) -> dict[str, int]:
        """Tensors that stayed, by reason, besides the last one that `through` saves."""
        return dict(self.executor.metrics.totals.kept_by_reason - Counter(leaf=1))

    @property
    def swapped_in_bytes(self) -> int:
        return self.executor.metrics.totals.bytes_swapped_in

    def through(self, make: Callable[[], Tensor]) -> Tensor:
        """Return the tensor that backward receives for the result of `make`."""
        x = torch.ones(1, device=self.device.torch_device, requires_grad=True)
        with self.device.compute():
            with torch.autograd.graph.saved_tensors_hooks(self.executor.save, self.executor.use):
                out: Tensor = Keeper.apply(x, make())  # type: ignore[no-untyped-call]  # torch leaves `apply` untyped
                out = out * 1  # another operator, and a hook: the function's saved tensor may now be copied
                self.executor.save(x)
            self.executor.end_step(completed=False)
            out.backward()
        del out
        assert self.pool.stats().num_live == 0
        seen, Keeper.seen = Keeper.seen, None
        assert seen is not None
        return seen


class Keeper(torch.autograd.Function):
    """Save the second argument; backward stores the tensor that came back."""

    seen: Tensor | None = None

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, saved: Tensor) -> Tensor:
        ctx.save_for_backward(saved)
        return x.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, None]:
        Keeper.seen = ctx.saved_tensors[0]  # type: ignore[attr-defined]  # save_for_backward's other half
        return grads[0], None


@pytest.fixture
def swapping(device: Device) -> Swapping:
    return Swapping(device)


# --- plain tensors move


def complex_numbers(base: Tensor) -> Tensor:
    return torch.view_as_complex(base.reshape(-1, 2))


PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda base: base,
    "0-dim": lambda base: base.sum(),
    "0-dim view": lambda base: base[3, 5],
    "one element of three dimensions": lambda base: base[3:4, 5:6, None],
    "transposed": lambda base: base.t(),
    "permuted": lambda base: base.view(4, 8, 8, 4).permute(3, 0, 2, 1),
    "offset": lambda base: base[3:, 5:],
    "every other": lambda base: base[::2, 1::3],
    "stride 0": lambda base: base[:1].expand(16, -1),
    "stride 0 in the middle": lambda base: base[:, None, :].expand(-1, 3, -1),
    "overlapping": lambda base: base.as_strided((4, 6), (2, 1), 7),
    "channels last": lambda base: base.view(1, 4, 16, 16).to(memory_format=torch.channels_last),
    "channels last, 3d": lambda base: base.view(2, 4, 2, 8, 8).to(memory_format=torch.channels_last_3d),
    "conjugate": lambda base: complex_numbers(base).conj(),
    "negative": lambda base: complex_numbers(base).conj().imag,
    "conjugate, transposed and offset": lambda base: complex_numbers(base).view(16, 32)[1:].mH,
    "other dtype over the same storage": lambda base: base.view(torch.int16)[:, 3:9],
    "no element of a storage": lambda base: base[:0],
}


@pytest.mark.parametrize("name", PLAIN)
@NO_GC
def test_a_plain_tensor_comes_back_as_it_was(name: str, swapping: Swapping) -> None:
    base = torch.randn(32, 32, device=swapping.device.torch_device)
    expected = PLAIN[name](base)
    got = swapping.through(lambda: PLAIN[name](base.clone()))
    assert (got.dtype, got.shape, got.stride()) == (expected.dtype, expected.shape, expected.stride())
    assert got.storage_offset() == expected.storage_offset()
    assert (got.is_conj(), got.is_neg()) == (expected.is_conj(), expected.is_neg())
    assert torch.equal(got, expected)
    assert swapping.swapped_in_bytes == expected.untyped_storage().nbytes()
    assert swapping.kept == {}


DTYPES = sorted(
    {t for t in vars(torch).values() if isinstance(t, torch.dtype) and not str(t).startswith(("torch.qint", "torch.quint"))},
    key=str,
)
"""All dtypes except the quantised ones, which also need scales. Those in 8-bit containers hold several numbers each."""


@IN_BETA
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_bit_patterns_of_a_dtype_come_back(dtype: torch.dtype, swapping: Swapping) -> None:
    """Every NaN payload, denormal and sign of zero; of types wider than two bytes a part."""
    patterns = torch.arange(1 << 16).to(torch.int32).view(torch.uint8)[: 4 * (1 << 16)]
    raw = (patterns % 2 if dtype is torch.bool else patterns).to(swapping.device.torch_device)
    got = swapping.through(lambda: raw.clone().view(dtype))
    assert got.dtype is dtype
    assert torch.equal(got.view(torch.uint8), raw)
    assert swapping.swapped_in_bytes == raw.numel()


@NO_GC
def test_an_empty_tensor_stays(swapping: Swapping) -> None:
    got = swapping.through(lambda: torch.empty(3, 0, 2, device=swapping.device.torch_device))
    assert (got.shape, got.stride()) == ((3, 0, 2), torch.empty(3, 0, 2).stride())
    assert swapping.kept == {"empty": 1}


# --- what stays: layouts that one storage does not describe


def quantised() -> Tensor:
    scale, zero = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.zeros(4, dtype=torch.int64)
    return torch.quantize_per_channel(torch.linspace(-3, 3, 16).view(4, 4), scale, zero, 0, torch.qint8)


def grid() -> Tensor:
    return torch.arange(16.0).view(4, 4)


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "COO": lambda: grid().to_sparse(),
    "CSR": lambda: grid().to_sparse_csr(),
    "CSC": lambda: grid().to_sparse_csc(),
    "BSR": lambda: grid().to_sparse_bsr((2, 2)),
    "BSC": lambda: grid().to_sparse_bsc((2, 2)),
    "MKL-DNN": lambda: grid().to_mkldnn(),
    "quantised": lambda: torch.quantize_per_tensor(grid(), 0.1, 0, torch.qint8),
    "quantised by channel": quantised,
}


@IN_BETA
@pytest.mark.parametrize("name", LAYOUTS)
@NO_GC
def test_another_layout_stays(name: str, sim: cm.SimDevice) -> None:
    swapping = Swapping(sim)
    expected = LAYOUTS[name]()
    got = swapping.through(LAYOUTS[name])
    assert (got.layout, got.dtype) == (expected.layout, expected.dtype)
    dense = [t.dequantize() if t.is_quantized else t.to_dense() for t in (got, expected)]
    assert torch.equal(dense[0], dense[1])
    assert swapping.kept == {"layout": 1}
    assert swapping.swapped_in_bytes == 0


# --- subclasses


class Labelled(Tensor):
    """Subclass that is a tensor itself: only its author knows its other data."""

    label: str


class Sealed(Labelled):
    """Says that it wraps other tensors, and fails to show them."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        raise RuntimeError("not now")

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: None, shape: torch.Size, stride: tuple[int, ...]) -> Tensor:
        raise AssertionError("nothing was taken apart")


@NO_GC
@pytest.mark.parametrize("kind", [Labelled, Sealed])
def test_a_subclass_that_cannot_be_taken_apart_stays(kind: type[Labelled], swapping: Swapping) -> None:
    def make() -> Tensor:
        made = torch.arange(6.0, device=swapping.device.torch_device).as_subclass(kind)
        made.label = "mine"
        return made

    got = swapping.through(make)
    assert isinstance(got, kind)
    assert torch.equal(got.as_subclass(Tensor).cpu(), torch.arange(6.0))
    assert swapping.kept == {"subclass": 1}
    assert swapping.swapped_in_bytes == 0
