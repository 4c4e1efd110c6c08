"""Views of a block: each holds it, none outlives its bytes, and `release` refuses while one lives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from chameleon_mm.device.protocols import Device
from chameleon_mm.device.sim import SimDevice
from chameleon_mm.errors import BlockInUseError, BlockReleasedError
from chameleon_mm.pool.block import PinnedBlock
from chameleon_mm.pool.pool import PinnedPool
from tests._programs import at_once
from tests.observed import SimRaceError

PAGE = 4096


@pytest.fixture
def pool(sim: SimDevice) -> Iterator[PinnedPool]:
    with PinnedPool("64KiB", sim, "64KiB") as pool:
        yield pool


def _in_inference_mode(block: PinnedBlock) -> Tensor:
    with torch.inference_mode():
        return block.tensor((10, 10), torch.uint8)[2:]


VIEWS: dict[str, Callable[[PinnedBlock], Any]] = {
    "tensor": lambda block: block.tensor((block.nbytes,), torch.uint8),
    "a view of a view": lambda block: block.tensor((4, 25), torch.uint8)[1:].t().detach(),
    "an alias by data": lambda block: block.tensor((100,), torch.int8).data,
    "a storage": lambda block: block.tensor((25,), torch.float32).untyped_storage(),
    "a tensor's array": lambda block: block.tensor((25,), torch.float32).numpy(),
    "numpy": lambda block: block.numpy((block.nbytes,), np.uint8),
    "a slice": lambda block: block.numpy((50,), np.int16)[3:].view(np.uint8),
    "memoryview": lambda block: np.asarray(block).data,
    "asarray": np.asarray,
    "numpy's dlpack": np.from_dlpack,
    "torch's dlpack": from_dlpack,
    "a capsule": lambda block: block.__dlpack__(),
    "inference mode": _in_inference_mode,
}


@pytest.mark.usefixtures("no_gc")
def test_a_view_keeps_its_block_and_the_last_one_lets_it_go(pool: PinnedPool) -> None:
    for name, make in VIEWS.items():
        block = pool.allocate(100)
        address = block.buffer.data_ptr()
        view = make(block)
        del block
        assert pool.stats().num_live == 1, name
        assert pool.allocate(100).buffer.data_ptr() != address, name
        del view
        assert pool.stats().num_live == 0, name
        assert pool.allocate(100).buffer.data_ptr() == address, name


@pytest.mark.parametrize("make", VIEWS.values(), ids=VIEWS.keys())
def test_release_refuses_while_a_view_lives(pool: PinnedPool, make: Callable[[PinnedBlock], Any]) -> None:
    block = pool.allocate(100)
    view = make(block)
    with pytest.raises(BlockInUseError, match=r"expected no view of this block of 100 bytes, got 1 live; drop"):
        block.release()
    assert (block.released, pool.stats().num_live) == (False, 1)
    assert issubclass(BlockInUseError, BufferError)
    del view
    block.release()
    assert (block.released, pool.stats().num_live) == (True, 0)


def test_a_released_block_gives_no_view(pool: PinnedPool) -> None:
    block = pool.allocate(100)
    block.release()
    for name in ("tensor", "numpy", "memoryview", "asarray", "numpy's dlpack", "torch's dlpack"):
        with pytest.raises(BlockReleasedError, match="of 100 bytes that was released"):
            VIEWS[name](block)


def test_all_views_are_the_same_bytes(pool: PinnedPool) -> None:
    block = pool.allocate(8)
    np.asarray(block).data[:] = bytes(range(8))
    expected = torch.arange(8, dtype=torch.uint8)
    array: Any = block
    for view in (block.buffer, block.tensor((8,), torch.uint8), from_dlpack(array)):
        assert torch.equal(view, expected)
        assert view.data_ptr() == block.buffer.data_ptr()
    for other in (
        block.numpy((8,), np.uint8),
        np.asarray(array),
        np.from_dlpack(array),
        np.frombuffer(np.asarray(block).data, "u1"),
    ):
        assert np.array_equal(other, expected.numpy())
        assert other.ctypes.data == block.buffer.data_ptr()
    from_dlpack(array)[3] = 77
    assert np.asarray(block).data[3] == 77
    assert (np.asarray(array).flags.writeable, np.asarray(block).data.readonly) == (True, False)
    assert array.__dlpack_device__() == (1, 0)


def test_zero_bytes_have_every_view(pool: PinnedPool) -> None:
    block: Any = pool.allocate(0)
    assert block.tensor((0, 3), torch.bfloat16).shape == (0, 3)
    assert block.numpy((0,), np.complex128).size == 0
    assert (np.asarray(block).size, from_dlpack(block).numel(), np.asarray(block).data.nbytes) == (0, 0, 0)
    assert pool.empty((3, 0), torch.float8_e5m2).shape == (3, 0)


@pytest.mark.parametrize("shape", [6, [6], (6,), torch.Size([6]), np.array([6]), np.int64(6)])
def test_a_number_alone_is_a_shape_of_one_dimension(pool: PinnedPool, shape: Any) -> None:
    block = pool.allocate("100B")
    assert block.tensor(shape, torch.int32).shape == block.numpy(shape, np.int32).shape == (6,)
    assert pool.empty(shape, torch.int32).shape == (6,)


@pytest.mark.parametrize(
    ("what", "shape", "dtype", "expected"),
    [
        ("empty", 4.5, torch.float32, "empty: expected a shape, .* got 4.5"),
        ("empty", "4", torch.float32, "empty: expected a shape, .* got '4'"),
        ("empty", (4,), np.float32, "empty: expected a torch.dtype .* got the class float32 itself"),
        ("tensor", (4,), np.float32, "tensor: expected a torch.dtype .*numpy"),
        ("tensor", None, torch.float32, "tensor: expected a shape, .* got None"),
        ("numpy", None, np.float32, "numpy: expected a shape, .* got None"),
        ("numpy", (4,), torch.float32, "numpy: expected a dtype of NumPy's .*tensor"),
        ("numpy", (4,), "marmot", "numpy: expected a dtype of NumPy's .* got 'marmot'"),
    ],
)
def test_what_is_no_shape_or_no_dtype_is_named_by_who_was_asked(
    pool: PinnedPool, what: str, shape: Any, dtype: Any, expected: str
) -> None:
    block = pool.allocate(16)
    with pytest.raises(TypeError, match=expected):
        getattr(pool if what == "empty" else block, what)(shape, dtype)
    block.release()
    assert pool.stats().num_live == 0


@pytest.mark.parametrize("shape", [(26,), (5, 6), (1 << 40, 1 << 40), (-1,), (2, -3)])
def test_a_shape_that_does_not_fit_is_refused(pool: PinnedPool, shape: tuple[int, ...]) -> None:
    block = pool.allocate(100)
    with pytest.raises(ValueError, match="tensor: expected"):
        block.tensor(shape, torch.float32)
    with pytest.raises(ValueError, match="numpy: expected"):
        block.numpy(shape, np.float32)
    assert block.tensor((25,), torch.float32).numel() == 25


@pytest.mark.parametrize("dtype", [object, np.dtype([("a", object), ("b", "f4")])])
def test_an_array_of_python_objects_is_refused(pool: PinnedPool, dtype: Any) -> None:
    with pytest.raises(ValueError, match="Python objects"):
        pool.allocate(100).numpy((1,), dtype)


def test_a_structured_array_is_a_view(pool: PinnedPool) -> None:
    block = pool.allocate(24)
    records = block.numpy((2,), np.dtype([("a", "<i8"), ("b", "<f4")]))
    records["a"], records["b"] = [1, 2], [0.5, 0.25]
    assert block.tensor((2, 12), torch.uint8)[:, 0].tolist() == [1, 2]


def test_a_view_made_while_another_thread_releases_never_sees_bytes_of_another_block(sim: SimDevice) -> None:
    pool = PinnedPool("4MiB", sim)
    wrong: list[str] = []
    for _ in range(200):
        block = pool.allocate(100)
        address = block.buffer.data_ptr()
        made: list[Any] = []

        def look(block: PinnedBlock = block, made: list[Any] = made) -> None:
            try:
                made.append(block.numpy((100,), np.uint8))
            except BlockReleasedError:
                made.append(None)

        def release(block: PinnedBlock = block) -> None:
            with suppress(BlockInUseError):
                block.release()

        at_once([look, release])
        del block, look, release
        if made[0] is not None and pool.allocate(100).buffer.data_ptr() == address:
            wrong.append("a view's bytes were given out")
        made.clear()
    assert wrong == []
    assert pool.stats().num_live == 0


# --- tensors that are all there is of a block


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.uint8,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.complex64,
        torch.complex128,
    ],
    ids=str,
)
def test_empty_is_a_tensor_whose_last_view_returns_its_block(device: Device, dtype: torch.dtype) -> None:
    with PinnedPool("1MiB", device) as pool:
        tensor = pool.empty((3, 5), dtype)
        assert (tensor.shape, tensor.dtype, tensor.is_contiguous(), tensor.device.type) == ((3, 5), dtype, True, "cpu")
        assert (pool.stats().requested_bytes, tensor.data_ptr() % PAGE) == (15 * dtype.itemsize, 0)
        row = tensor[1].detach()
        del tensor
        assert pool.stats().num_live == 1
        del row
        assert pool.stats().num_live == 0
        assert pool.empty((), dtype).shape == ()


def test_the_simulator_takes_every_view_for_host_memory(sim: SimDevice) -> None:
    with PinnedPool("1MiB", sim) as pool, sim.compute():
        before = sim.read_memory()
        neighbour, block = pool.allocate(100), pool.allocate(4096)
        views: list[Any] = [block.tensor((32, 32), torch.float32), from_dlpack(block), pool.empty((8,), torch.int8)]
        assert [sim.owns(view) for view in views] == [False, False, False]
        for view in views:
            view.zero_()
        assert sim.read_memory() == before
        del views, view, block, neighbour


def test_the_simulator_orders_a_view_and_the_raw_buffer_as_one_memory(sim: SimDevice) -> None:
    with PinnedPool("1MiB", sim) as pool:
        neighbour, block = pool.allocate(100), pool.allocate(4096)
        view, d2h = block.tensor((4096,), torch.uint8), sim.new_stream("d2h")
        source = sim.current_stream().alloc(4096)
        d2h.wait(sim.current_stream().record())
        d2h.copy(block.buffer, source)
        with sim.compute(), pytest.raises(SimRaceError):
            view.fill_(1)  # the host writes the bytes that the copy writes
        with sim.compute():
            neighbour.tensor((100,), torch.uint8).fill_(1)
        d2h.record().synchronize()
        with sim.compute():
            view.fill_(1)
        del view, block, neighbour


@pytest.mark.gpu
def test_on_cuda_every_view_is_pinned() -> None:
    with PinnedPool("16MiB", "cuda") as pool:
        block: Any = pool.allocate(PAGE)
        views = [block.tensor((PAGE,), torch.uint8), from_dlpack(block), torch.from_numpy(np.asarray(block))]
        views.append(pool.empty((7, 9), torch.bfloat16))
        assert [view.is_pinned() for view in views] == [True] * 4
        on_gpu = views[0].fill_(5).to("cuda", non_blocking=True)
        torch.cuda.synchronize()
        assert bool((on_gpu == 5).all())
        views.clear()
        block.release()
