"""Programs that the tests of the stand-in's runtime start in other processes: wrong ones, each with the right one.

    program(cuda, right=False); cuda.violations()   # one line, with the words that the program returns
    program(cuda, right=True); cuda.violations()    # none

`run_programs` runs them all; the others below need settings that are read as torch or the runtime loads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_size_t, c_void_p

import torch

from ._stand_in_calls import Graph, Runtime, device_count

WIDE = 12 << 20  # bytes: more than the allocator serves from a shared segment


def two_streams_without_an_event(cuda: Runtime, right: bool) -> list[str]:
    a, b = cuda.stream(), cuda.stream()
    device, host, other = cuda.malloc(64), cuda.pinned(64), cuda.pinned(64)
    cuda.copy(device, host, 64, a)
    if right:
        cuda.order(a, b)
    cuda.copy(other, device, 64, b)
    return ["the read by copy device to host", "the write by copy host to device", "no event orders them", "bytes 0 to 63"]


def a_write_over_what_is_being_read(cuda: Runtime, right: bool) -> list[str]:
    a, b = cuda.stream(), cuda.stream()
    device, host = cuda.malloc(64), cuda.pinned(64)
    cuda.copy(host, device, 64, a)
    if right:
        cuda.order(a, b)
    cuda.fill(device + 16, 0, 16, b)
    return ["the write by cudaMemsetAsync", "the read by copy device to host", "bytes 16 to 31"]


def an_operator_before_its_copy_arrived(cuda: Runtime, right: bool) -> list[str]:
    h2d = cuda.stream()
    device, host = cuda.malloc(64), cuda.pinned(64)
    cuda.copy(device, host, 64, h2d)
    if right:
        cuda.order(h2d, None)
    cuda.access(None, device, 64, writes=False, what="aten::mul.Tensor")
    return ["the read by aten::mul.Tensor (the null stream", "the write by copy host to device (stream "]


def a_blocking_stream(cuda: Runtime, right: bool) -> list[str]:
    """The legacy null stream orders itself with blocking streams, and with no other."""
    stream = cuda.stream(0 if right else 1)
    device, host = cuda.malloc(64), cuda.pinned(64)
    cuda.copy(device, host, 64, stream)
    cuda.access(None, device, 64, writes=True, what="aten::zero_")
    return ["the write by aten::zero_", "the write by copy host to device"]


def the_host_reads_what_is_still_arriving(cuda: Runtime, right: bool) -> list[str]:
    stream = cuda.stream()
    device, host = cuda.malloc(64), cuda.pinned(64)
    cuda.copy(host, device, 64, stream)
    if right:
        event = cuda.event()
        cuda.record(event, stream)
        while cuda.error("cudaEventQuery", c_void_p(event)):
            pass
    cuda.host_access(host, 64, writes=False)
    return ["the read by the test (the host)", "the write by copy device to host", "the host has not waited"]


def pinned_memory_freed(cuda: Runtime, right: bool) -> list[str]:
    stream = cuda.stream()
    device, host = cuda.malloc(64), cuda.pinned(64)
    cuda.copy(device, host, 64, stream)
    if right:
        cuda.synchronize(stream)
    cuda.call("cudaFreeHost", c_void_p(host))
    return ["freed while in use: cudaFreeHost", "the read by copy host to device", "bytes 0 to 63 of pinned allocation"]


def registered_memory_given_back(cuda: Runtime, right: bool) -> list[str]:
    stream, memory = cuda.stream(), ctypes.create_string_buffer(64)
    device = cuda.malloc(64)
    cuda.call("cudaHostRegister", memory, c_size_t(64), 0)
    cuda.copy(ctypes.addressof(memory), device, 64, stream)
    if right:
        cuda.synchronize(stream)
    cuda.call("cudaHostUnregister", memory)
    return ["freed while in use: cudaHostUnregister", "the write by copy device to host", "registered allocation"]


def device_memory_freed(_: Runtime, right: bool) -> list[str]:
    """Torch's allocator frees a segment: cudaFree waits for the device, but no stream had waited for the copy."""
    side, source = torch.cuda.Stream(), torch.empty(WIDE, dtype=torch.uint8, pin_memory=True)
    x = torch.full((WIDE,), 3, dtype=torch.uint8, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        source.copy_(x, non_blocking=True)
    if right:
        torch.cuda.current_stream().wait_stream(side)
    del x
    torch.cuda.empty_cache()
    return ["freed while in use: cudaFree", "the read by copy device to host", "device allocation"]


def block_handed_out(_: Runtime, right: bool) -> list[str]:
    """A copy into a block is pending on another stream, and torch's allocator gives the block to its next owner."""
    side, source = torch.cuda.Stream(), torch.empty(4096, dtype=torch.uint8, pin_memory=True)
    x = torch.empty(4096, dtype=torch.uint8, device="cuda")
    place = x.data_ptr()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.copy_(source, non_blocking=True)
    if right:
        x.record_stream(side)
    del x
    y = torch.empty(4096, dtype=torch.uint8, device="cuda")
    assert right or y.data_ptr() == place
    y.copy_(source, non_blocking=True)
    return ["the write by copy host to device (the null stream", "the write by copy host to device (stream "]


def graph_beside_a_pending_copy(cuda: Runtime, right: bool) -> list[str]:
    a, b = cuda.stream(), cuda.stream()
    device, host = cuda.malloc(64), cuda.pinned(64)
    with Graph(cuda, a) as graph:
        cuda.fill(device, 1, 64, a)
    cuda.copy(host, device, 64, b)
    if right:
        cuda.order(b, a)
    graph.launch(a)
    return ["the write by cudaMemsetAsync", "the read by copy device to host"]


def fork_within_a_graph(cuda: Runtime, right: bool) -> list[str]:
    a, b = cuda.stream(), cuda.stream()
    device, host = cuda.malloc(64), cuda.pinned(64)
    with Graph(cuda, a) as graph:
        cuda.order(a, b)
        cuda.fill(device, 1, 64, a)
        if right:
            cuda.order(a, b)
        cuda.copy(host, device, 64, b)
        cuda.order(b, a)
    assert graph.end_error == 0
    return ["unordered access within a graph", "the read by copy device to host", "the write by cudaMemsetAsync"]


PROGRAMS: list[Callable[[Runtime, bool], list[str]]] = [
    two_streams_without_an_event,
    a_write_over_what_is_being_read,
    an_operator_before_its_copy_arrived,
    a_blocking_stream,
    the_host_reads_what_is_still_arriving,
    pinned_memory_freed,
    registered_memory_given_back,
    device_memory_freed,
    block_handed_out,
    graph_beside_a_pending_copy,
    fork_within_a_graph,
]


def run_programs() -> dict[str, list[list[str]]]:
    """Return for each program: the text to expect, the wrong one's violations, the right one's."""
    torch.cuda.init()
    cuda, outcomes = Runtime(), {}
    for program in PROGRAMS:
        said = []
        for right in (False, True):
            wanted = program(cuda, right)
            said.append(cuda.violations())
            cuda.synchronize()
        outcomes[program.__name__] = [wanted, *said]
    return outcomes


def between_two_devices() -> list[object]:
    a = torch.arange(10, dtype=torch.uint8).to("cuda:0")
    b = a.to("cuda:1", non_blocking=True)
    back = torch.empty(10, dtype=torch.uint8, device="cuda:0")
    back.copy_(b, non_blocking=True)
    with torch.cuda.device(1):
        taken = torch.empty(WIDE, dtype=torch.uint8, device="cuda")
    unused = [torch.cuda.mem_get_info(device)[0] for device in (0, 1)]
    del taken
    return [device_count(Runtime()), str(b.device), back.tolist(), unused[0] - unused[1] == WIDE, Runtime().violations()]
