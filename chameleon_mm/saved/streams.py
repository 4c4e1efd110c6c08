"""The compute streams that hooks have seen, and how they are joined before memory is dropped.

    compute = streams.current()                # at every save and use of what moves: the calling thread's
    streams.join_all(alloc_stream)             # before a saved storage is dropped: everybody's work so far, then anybody's next

A caching allocator gives a dropped block to the stream that allocated it, which need not be the one that saved it, and torch
does not tell whose it is. In eager the graph keeps the block until backward; dropped in forward, it could be overwritten by its
owner under a copy, or under a kernel of another stream that still reads it. So all streams are joined before it goes.
"""

from __future__ import annotations

from chameleon_mm.device import Device, Stream


class ComputeStreams:
    """The streams on which tensors may have been allocated. Not thread-safe: the executor holds its lock."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._seen: list[Stream] = []

    def current(self) -> Stream:
        """The calling thread's compute stream, which is remembered."""
        stream = self._device.current_stream()
        if stream not in self._seen:
            self._seen.append(stream)
        return stream

    def join_all(self, alloc_stream: Stream) -> None:
        """Order all streams after what each has been given so far. Costs nothing while `alloc_stream` is the only one."""
        others = [other for other in self._seen if other is not alloc_stream]
        for other in others:
            alloc_stream.wait(other.record())  # what they did with a block -> what follows on `alloc_stream`
        if others:
            so_far = alloc_stream.record()
            for other in others:
                other.wait(so_far)  # what anybody did with it, copies that were waited for too -> its owner's next use of it
