"""Ways to run a sample of an operator, all with plain eager's outcome; and the sweep of an operator's samples over them.

    ways = ways_of(SimDevice)                       # by name, each with a device of its own
    sweep("mul", ways, dtypes=(torch.float32,), samples=2, twice=1)

The oracle is `run(op, sample)`: eager, with nothing of ours and no dispatch mode around it. Where another outcome comes, it is
allowed for two reasons alone, each of which is measured there and then:
  eager does not give its own again (`plain_varies`), such as where it reads memory that nobody wrote;
  torch computes it otherwise under any dispatch mode: a bare mode gives the same, and the operator is in `OTHER_UNDER_A_MODE`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import chameleon_mm as cm
from chameleon_mm.device import Device
from chameleon_mm.plan.rule import Limits
from chameleon_mm.record.recorder import Recorder
from chameleon_mm.swap.classify import ProtectedStorages
from chameleon_mm.swap.executor import Executor
from chameleon_mm.swap.handles import Handle, SwappedView
from tests._fakes import Unwatched
from tests._op_samples import OPS, BareMode, Outcome, differentiable, run, samples_of

OTHER_UNDER_A_MODE = {
    "cumprod": "gradient: rows with zeros are not looked for",
    "linalg_eig": "gradient of the gradient",
    "linalg_eigh": "gradient of the gradient",
    "masked_cumprod": "as cumprod",
    "masked_fill": "gradient of the value: a sum over `where` instead of over what the mask selects",
    "masked_prod": "as prod",
    "matrix_exp": "gradient of the gradient",
    "ormqr": "gradient: its strides",
    "prod": "gradient: zeros are not looked for, products of what is before and behind instead of a quotient",
}
"""Operators whose gradient autograd computes by another formula under any dispatch mode, even one that does nothing."""

OTHER_FORWARD_UNDER_A_MODE = {
    "__rmatmul__": "as matmul",
    "linalg_cond": "as linalg_svdvals",
    "linalg_eigvalsh": "of what needs no gradient: computed with the vectors, as if it did",
    "linalg_matrix_norm": "as linalg_svdvals",
    "linalg_svdvals": "of what needs no gradient: computed with the vectors, as if it did",
    "matmul": "of what needs no gradient, one of the batches being one matrix: a product, instead of one for each of the batch",
    "norm_nuc": "as linalg_svdvals",
}
"""Operators that torch decomposes differently under any dispatch mode, before the mode sees them: in a recorded step, too."""

PLAIN_RUNS = 6
"""Number of eager runs of a sample whose outcomes differ, before eager counts as deterministic."""

FORWARD_DTYPES = (torch.float32, torch.complex64, torch.int64, torch.bool)

SESSION_STEPS = 2
"""Steps per sample in a session: the first is recorded, the second follows its plan."""


class Way:
    """Way to run a sample. `mode`, `records`: True if a dispatch mode is on in its backward, in its forward."""

    mode = records = False

    def __init__(self, make_device: Callable[[], Device]) -> None:
        self.device = make_device()

    def run(self, op: Any, sample: Any, *, twice: bool) -> Iterator[Outcome]:
        """Each time it runs."""
        yield run(op, sample, self.within, twice=twice)

    def within(self) -> AbstractContextManager[Any]:
        """Context in which the sample runs."""
        raise NotImplementedError(f"{type(self).__name__}: expected a context of its own")

    def live_blocks(self) -> int:
        """Blocks of host memory that are still in use."""
        return 0

    def moved_bytes(self) -> int | None:
        """Bytes that left the device; None: nothing swaps."""
        return None

    def close(self) -> None:
        """End the way; no sample runs in it afterwards."""


class InCompute(Way):
    """Within `device.compute()`, and nothing else."""

    mode = True

    def within(self) -> AbstractContextManager[Any]:
        return self.device.compute()


class Recorded(Way):
    """Recorded from its beginning to its end."""

    mode = True

    def within(self) -> AbstractContextManager[Any]:
        return Recorder(self.device)


class SweepingExecutor(Executor):
    """Swap every storage, return its HBM at every look, and count the saves that swap."""

    def __init__(self, device: Device) -> None:
        self.pool = cm.PinnedPool("64MiB", device=device, chunk_bytes=1 << 20)
        self.swapped = 0
        limits, protected = Limits(leaving_bytes=0), ProtectedStorages()
        super().__init__(device, self.pool, min_bytes=0, limits=limits, protected=protected)

    def save(self, t: Tensor) -> Handle:
        handle = super().save(t)
        self.swapped += isinstance(handle, SwappedView)
        return handle


class Swapped(Way):
    """Everything leaves the device before each backward begins."""

    def __init__(
        self, make_device: Callable[[], Device], make_executor: Callable[[Device], SweepingExecutor] = SweepingExecutor
    ) -> None:
        super().__init__(make_device)
        self.executor = make_executor(self.device)

    def run(self, op: Any, sample: Any, *, twice: bool) -> Iterator[Outcome]:
        yield run(op, sample, self.within, twice=twice, before_backward=lambda: self.executor.end_step(completed=False))

    def within(self) -> AbstractContextManager[Any]:
        return torch.autograd.graph.saved_tensors_hooks(self.executor.save, self.executor.use)

    def live_blocks(self) -> int:
        return self.executor.pool.stats().num_live

    def moved_bytes(self) -> int:
        return self.executor.metrics.totals.bytes_swapped_out

    def close(self) -> None:
        totals = self.executor.metrics.totals
        moved = totals.bytes_swapped_out > 0  # not in: storages that the caller holds stay, and are copied
        assert moved == (self.executor.swapped > 0), f"{self.executor.swapped} saves were to move"


class SwappedInCompute(Swapped):
    """Variant on a device that sees every operator: a use before the copy back would read poison, or raise."""

    mode = True

    @contextmanager
    def within(self) -> Iterator[None]:
        with self.device.compute(), super().within():
            yield


class SavedOnCpu(Way):
    """`save_on_cpu` around forward and backward."""

    def __init__(self, make_device: Callable[[], Device]) -> None:
        super().__init__(make_device)
        self.manager = cm.save_on_cpu(device=self.device, min_bytes=0)

    def within(self) -> AbstractContextManager[Any]:
        return self.manager

    def live_blocks(self) -> int:
        return self.manager.pool.stats().num_live

    def moved_bytes(self) -> int:
        return self.manager.pool.stats().peak_live_bytes  # it has no report: its pool was made for it


class InSession(Way):
    """Steps of a session without room for saved tensors: the first is recorded, the second follows a plan made from it."""

    records = True

    def __init__(self, make_device: Callable[[], Device]) -> None:
        super().__init__(make_device)
        budget = self.device.allocated_bytes() + 4096
        self.session = cm.SwapSession(budget, "64MiB", device=self.device, min_bytes=0)
        self.session.__enter__()

    def run(self, op: Any, sample: Any, *, twice: bool) -> Iterator[Outcome]:
        for _ in range(SESSION_STEPS):
            yield run(op, sample, self.within, twice=twice)

    def within(self) -> AbstractContextManager[Any]:
        return self.session.step()

    def live_blocks(self) -> int:
        return self.session.pool.stats().num_live

    def moved_bytes(self) -> int:
        return self.session.report().bytes_swapped_out

    def close(self) -> None:
        self.session.__exit__(None, None, None)


IN_SIMULATOR: dict[str, Callable[[], Way]] = {
    "compute": lambda: InCompute(cm.SimDevice),
    "recorded": lambda: Recorded(Unwatched),
    "swapped": lambda: Swapped(Unwatched),
    "swapped in compute": lambda: SwappedInCompute(cm.SimDevice),
    "save_on_cpu": lambda: SavedOnCpu(Unwatched),
    "session": lambda: InSession(Unwatched),
}
ON_CUDA: dict[str, Callable[[], Way]] = {
    "recorded": lambda: Recorded(cm.CudaDevice),
    "swapped": lambda: Swapped(cm.CudaDevice),
    "save_on_cpu": lambda: SavedOnCpu(cm.CudaDevice),
    "session": lambda: InSession(cm.CudaDevice),
}


# --- the oracle

ZERO_DIM = "too many indices for tensor of dimension 0"
"""Error of eager itself: on a GPU, deterministic `scatter_add` and `index_add` become `index_put`, which takes no index of a
tensor without dimensions. All ways must raise it."""


def run_plain(op: Any, sample: Any, *, twice: bool) -> tuple[Outcome, Callable[[Outcome], Outcome]]:
    """Return eager's outcome, and a function that selects the parts that torch declares reproducible."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        outcome = run(op, sample, twice=twice)
    # Said on CUDA alone, of each operator whose result depends on the order in which threads add.
    deterministic = not any("does not have a deterministic implementation" in str(w.message) for w in said)
    return outcome, lambda some: some if deterministic else some.without_data()


def plain_varies(op: Any, sample: Any, plain: Outcome, *, twice: bool) -> bool:
    """True if eager gives several outcomes of this sample when its memory holds different garbage each time."""
    for attempt in range(PLAIN_RUNS):
        garbage = [torch.full((n,), -1.5 if attempt % 2 else float("nan")) for n in (1, 3, 7, 12, 25, 50, 100, 200, 1000) * 4]
        del garbage
        if run(op, sample, twice=twice) != plain:
            return True
    return reads_what_nobody_wrote(op, sample, twice=twice)


def reads_what_nobody_wrote(op: Any, sample: Any, *, twice: bool) -> bool:
    """True if eager's outcome changes when torch fills the memory of `empty` and similar factories before returning it."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic  # a module whose attributes are properties
    filled_before = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        outcomes = []
        for filled in (False, True):
            memory.fill_uninitialized_memory = filled
            outcomes.append(run(op, sample, twice=twice))
    finally:
        memory.fill_uninitialized_memory = filled_before
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    return outcomes[0] != outcomes[1]


# --- an operator


def sweep(
    name: str,
    ways: dict[str, Way],
    *,
    device_type: str = "cpu",
    dtypes: Sequence[torch.dtype],
    samples: int,
    twice: int,
) -> int:
    """Samples of one operator, each plain and in all `ways`; the first `twice` of them are differentiated twice, too.

    Where torch has no gradient of it in these dtypes, nothing. Returns how many were compared.
    """
    wanted = differentiable(OPS[name], device_type, dtypes)
    return sum(_sweep_of(name, ways, device_type, dtype, samples, twice, requires_grad=True) for dtype in wanted)


def sweep_without_gradient(name: str, ways: dict[str, Way], *, device_type: str = "cpu", samples: int) -> int:
    """The same of outputs alone, of samples that require no gradient, in the first dtype of a few that the operator has."""
    dtypes = [dtype for dtype in FORWARD_DTYPES if dtype in OPS[name].supported_dtypes(device_type)][:1]
    return sum(_sweep_of(name, ways, device_type, dtype, samples, 0, requires_grad=False) for dtype in dtypes)


def _sweep_of(
    name: str, ways: dict[str, Way], device_type: str, dtype: torch.dtype, samples: int, twice: int, *, requires_grad: bool
) -> int:
    op, compared = OPS[name], 0
    for number, sample in enumerate(samples_of(op, device_type, dtype, samples, requires_grad=requires_grad)):
        for again in (False, True)[: 2 if number < twice else 1]:
            what = f"{name}, {dtype}, sample {number}{', twice' if again else ''}{'' if requires_grad else ', no gradient'}"
            plain, promised = run_plain(op, sample, twice=again)
            assert again or not plain.error or ZERO_DIM in plain.error, f"{what}: {plain.error}"
            for label, way in ways.items():
                for outcome in way.run(op, sample, twice=again):
                    _compare(f"{what}, {label}", name, sample, promised(plain), promised(outcome), way, twice=again)
                assert way.live_blocks() == 0, f"{what}, {label}: {way.live_blocks()} blocks of host memory live on"
            compared += 1
    return compared


def _compare(what: str, name: str, sample: Any, plain: Outcome, outcome: Outcome, way: Way, *, twice: bool) -> None:
    if outcome == plain or plain_varies(OPS[name], sample, plain, twice=twice):
        return
    bare = run(OPS[name], sample, BareMode, twice=twice)
    gives = "gives" if bare == outcome else "does not give"
    assert way.mode or way.records, f"{what}: not what eager gives (a bare dispatch mode {gives} it)"
    assert outcome == bare, f"{what}: neither what eager gives nor what a bare dispatch mode does"
    listed = name in OTHER_FORWARD_UNDER_A_MODE or (way.mode and name in OTHER_UNDER_A_MODE)
    assert listed, f"{what}: what a bare dispatch mode gives, but of an operator that is not listed"


def differs_under_a_mode(name: str, dtypes: Sequence[torch.dtype], at_most: int) -> bool:
    """True if a dispatch mode that does nothing changes some sample, and eager without it gives the same outcome again."""
    op = OPS[name]
    for twice, requires_grad in ((False, False), (False, True), (True, True)):
        for dtype in differentiable(op, "cpu", dtypes):
            for sample in samples_of(op, "cpu", dtype, at_most, requires_grad=requires_grad):
                plain = run(op, sample, twice=twice)
                if run(op, sample, BareMode, twice=twice) != plain and not plain_varies(op, sample, plain, twice=twice):
                    return True
    return False


@contextmanager
def opened(ways: dict[str, Callable[[], Way]]) -> Iterator[dict[str, Way]]:
    """Each of `ways`, ready to run; afterwards closed."""
    made = {label: make() for label, make in ways.items()}
    yield made
    for way in made.values():
        way.close()


def skip_without_samples(name: str, compared: int) -> None:
    if not compared:
        pytest.skip(f"torch has no sample of {name} here")
