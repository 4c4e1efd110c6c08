"""Tests that the stand-in does not run, or not in each mode, by name. Each has its reason.

`conftest` skips the tests with their reasons where the stand-in is loaded. A GPU runs them all.
"""

from __future__ import annotations

_NVRTC = "compiles CUDA C++ at run time (NVRTC); the stand-in runs no machine code of a GPU"
_INDUCTOR = "inductor compiles Triton kernels for the GPU's machine code; the stand-in runs Triton in its interpreter alone"

TESTS: dict[str, str] = {
    "tests/test_gpu_small_memory.py::test_a_quarter_of_the_peak_is_enough_for_the_caching_allocator[large]": (
        "needs 32 GiB of device memory, which are the host's here"
    ),
    "tests/test_pinned_cupy.py::test_cupy_itself_never_writes_memory_that_a_copy_still_reads": f"CuPy's operators: {_NVRTC}",
    **{
        f"tests/test_compiled_regions.py::{test}inductor]": _INDUCTOR
        for test in (
            *(
                f"test_a_compiled_program_has_its_bits_in_a_session[cuda-{program}-"
                for program in (
                    "per block",
                    "whole",
                    "function",
                    "dynamic per block",
                    "graph break in blocks",
                    "experts",
                    "convolution",
                    "LoRA",
                    "buffers in place",
                    "dropout",
                    "attention",
                    "checkpoint around",
                )
            ),
            "test_each_direction_of_a_region_is_one_operator[cuda-",
            "test_loss_and_optimizer_may_be_compiled_as_full_graphs[cuda-",
            "test_the_session_chooses_the_partition_for_its_budget[cuda-",
            "test_a_choice_that_was_too_large_is_corrected_once[cuda-",
        )
    },
    **{
        f"tests/test_op_db.py::test_every_operator_in_each_dtype[cuda-{name}]": reason
        for name, reason in {
            **{
                f"jiterator_{name}": _NVRTC
                for name in ("unary", "binary", "binary_return_by_ref", "2inputs_2outputs", "4inputs_with_extra_args")
            },
            **{
                f"torch_ops_aten__{name}_attention_forward": "called by itself with other keys than queries: see README.md"
                for name in ("flash", "efficient")
            },
            "sparse_mm_reduce": "torch has the operator on the CPU alone",
        }.items()
    },
}
"""Reason by test."""

LATE_ALONE: dict[str, str] = {
    "tests/test_bench_gpu_suite.py::test_every_part_of_the_suite_runs_on_the_stand_in": (
        "rehearsed in mode late alone: that the whole script runs has nothing to do with the mode"
    ),
    "tests/test_native_reclaim.py::test_without_the_wait_in_malloc_the_programs_go_wrong": (
        "run in mode late alone: in mode early every copy is done before anybody could wait for it"
    ),
    "tests/test_pinned_dropped.py::test_without_the_wait_wrong_bytes_arrive_on_cuda": (
        "run in mode late alone: in mode early the copy is done before anybody could wait for it"
    ),
    "tests/test_op_db.py": (
        "run in mode late alone: copies are late there, and nothing else about an operator depends on the mode"
    ),
    **{
        f"tests/test_{name}.py": "run in mode late alone: what dynamo compiles has nothing to do with the mode"
        for name in ("compile", "compiled_regions")
    },
    "tests/test_mixed_training.py": "run in mode late alone, where copies are late; smaller random programs run in both",
    "tests/test_plain_models.py": "run in mode late alone, where copies are late; smaller models run in both",
    "tests/test_stand_in_compute.py": "run in mode late alone: operators run the same kernels in each mode",
    "tests/test_kernels_exact.py": "run in mode late alone: kernels compute the same in each mode",
    "tests/test_stand_in_runtime.py": "run in mode late alone: it starts a process in each mode by itself",
    **{
        f"tests/test_bench_{name}.py": "run in mode late alone: what a bench writes has nothing to do with the mode"
        for name in ("gpu_suite", "measure", "pinned", "themes", "training")
    },
    **{
        f"tests/test_{name}.py": "run in mode late alone: what steps there are, and what is said of them, is one"
        for name in ("attach", "composite", "odd_uses", "progress", "session_life", "true_report")
    },
    **{
        f"tests/test_{name}.py": "run in mode late alone, where memory comes back latest: a budget that holds there holds"
        for name in (
            "gpu_small_memory",
            "hidden_memory",
            "inner_memory",
            "memory_against_allocator",
            "native_memory",
            "random_lengths",
            "real_out_of_memory",
        )
    },
    "tests/test_ranks_on_cuda.py": "run in mode late alone: ranks add gloo's copies, for which the host waits in each mode",
    "tests/test_process_life.py": "run in mode late alone: how a process ends has nothing to do with the mode",
    **{
        f"tests/test_{name}": "run in mode late alone, where copies are late; tests of the same copies run in both"
        for name in (
            "uncovered_bytes.py::test_every_step_of_a_session_has_eagers_bits",
            "parameter_swap.py::test_a_program_has_plain_pytorchs_bits",
            "optimizer_state.py::test_training_has_plain_pytorchs_bits",
            "pins.py",
            "budget_change.py",
        )
    },
    **{
        f"tests/test_{name}.py": "run in mode late alone: other programs on the path that random ones go in both modes"
        for name in ("relied_on", "tensor_kinds")
    },
}
"""Reason by test or file that runs in one mode, which is enough.

Tests that break an order on purpose run in both modes, as do tests of order: streams, threads, transfers, events of pinned
memory, random programs and mixes."""
