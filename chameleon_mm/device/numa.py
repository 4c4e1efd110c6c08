"""Host memory near the GPU: fresh pages come from the NUMA node that the GPU hangs on.

    node = near_node(pci_id)                    # sysfs; None where there is nothing to choose, or nothing may be chosen
    place = PreferredNode(node)
    place(address, nbytes)                      # mbind, before the first touch: only then is a page's node decided

Copies to and from the other socket's memory cross the link between the sockets and run slower. Why mbind rather than
set_mempolicy: it belongs to the range and not to a thread, so it holds for whichever threads populate the pages, and there is
no policy of the caller's to put back; and the kernel's NUMA balancing does not move pages of a range with a policy of its own.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import platform
from collections.abc import Callable
from pathlib import Path

from chameleon_mm.units import format_size

_log = logging.getLogger(__name__)

_MPOL_PREFERRED = 1
"""Policy by which a node is preferred. Not MPOL_BIND: where the node is full, that ends a process out of memory while other
nodes have some. This one is slower."""

_MBIND_NUMBERS = {"x86_64": 237, "aarch64": 235}
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)

Mbind = Callable[[int, int, int, "ctypes.Array[ctypes.c_ulong]", int, int], int]
"""The system call: `(address, nbytes, mode, node mask, bits of the mask + 1, flags) -> errno`, 0 for done."""


class PreferredNode:
    """Asks the kernel to take the pages of a range, none of which has been touched, from `node`. Thread-safe.

    Advice: it never raises, and a refusal leaves correct memory from whatever node the touching thread runs on. The first one
    is logged. `mbind` is the system call.
    """

    def __init__(self, node: int, mbind: Mbind | None = None) -> None:
        self.node = node
        self._mask = (ctypes.c_ulong * (node // _WORD_BITS + 1))()
        self._mask[node // _WORD_BITS] = 1 << node % _WORD_BITS
        self._mbind = mbind or _linux_mbind()
        self._refused = False

    def __call__(self, address: int, nbytes: int) -> None:
        """Note the preference for `nbytes` at `address`, which is a page's."""
        # One bit more than the mask has: the kernel takes one off.
        failure = self._mbind(address, nbytes, _MPOL_PREFERRED, self._mask, len(self._mask) * _WORD_BITS + 1, 0)
        if failure and not self._refused:
            self._refused = True  # the next refusal would say the same
            _log.warning(
                "chameleon_mm: %s of pinned memory: expected pages of NUMA node %d, near the GPU, got %s from mbind. The "
                "memory is good, copies may be slower: give the container CAP_SYS_NICE, or start the process by "
                "`numactl --cpunodebind=%d`",
                format_size(nbytes),
                self.node,
                os.strerror(failure),
                self.node,
            )


def near_node(pci_id: str | None, root: Path = Path("/")) -> int | None:
    """The NUMA node of the device at `pci_id` ("0000:06:00.0"), if its memory is one of several that this process may use.

    None where the kernel ties the device to no node (-1, as in many virtual machines), where there is one node, and where the
    node has no memory or is outside of the process's cpuset, which is logged: the process was kept off it on purpose. `root` is
    where `proc` and `sys` lie. Never raises.
    """
    text = kernel_text(root / f"sys/bus/pci/devices/{pci_id}/numa_node") if pci_id else ""
    if not text.isdecimal():  # "-1", or no such file
        return None
    node, usable = int(text), _usable_nodes(root)
    if node not in usable:
        if usable:
            _log.info(
                "chameleon_mm: host memory is not placed near the GPU at %s: it hangs on NUMA node %d, the process may "
                "use memory of %s only",
                pci_id,
                node,
                sorted(usable),
            )
        return None
    return node if len(usable) > 1 else None


def _usable_nodes(root: Path) -> set[int]:
    """Nodes that have memory, as far as the process's cpuset allows them; none where the kernel tells of none."""
    nodes = root / "sys/devices/system/node"
    present = numbers_in(kernel_text(nodes / "has_memory")) or numbers_in(kernel_text(nodes / "online"))
    for line in kernel_text(root / "proc/self/status").splitlines():
        name, _, listed = line.partition(":")
        if name == "Mems_allowed_list":
            return present & numbers_in(listed.strip())
    return present


def numbers_in(text: str) -> set[int]:
    """Set of the numbers in a text such as "0-2,8"; what is no such list is none."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not (first.isdecimal() and (last or first).isdecimal()):
            return set()
        found |= set(range(int(first), int(last or first) + 1))
    return found


def kernel_text(path: Path) -> str:
    """Text of one of the kernel's files, without blanks around it; empty where it is absent or not ours to read."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:  # absent, or not ours to read
        return ""


def _linux_mbind(machine: str | None = None) -> Mbind:
    """The system call by its number: libc has no function for it, and libnuma is one more library to be there."""
    number = _MBIND_NUMBERS.get(machine or platform.machine())
    if number is None:
        return lambda address, nbytes, mode, mask, max_node, flags: errno.ENOSYS
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long

    def mbind(address: int, nbytes: int, mode: int, mask: ctypes.Array[ctypes.c_ulong], max_node: int, flags: int) -> int:
        failed = call(
            ctypes.c_long(number),
            ctypes.c_void_p(address),
            ctypes.c_ulong(nbytes),
            ctypes.c_long(mode),
            mask,
            ctypes.c_ulong(max_node),
            ctypes.c_ulong(flags),
        )
        return ctypes.get_errno() if failed else 0

    return mbind
