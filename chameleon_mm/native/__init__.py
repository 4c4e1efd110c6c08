"""The optional C++ helpers: built on request for the torch that is installed, and used from then on; without them all works.

    build("memory")          # compile it, where no build fits: a quarter of a minute. `chameleon-mm native` builds them all
    load("memory")           # the module, or None: not built for this torch, or not loadable; never compiles
    status("memory")         # the same, in words: `chameleon-mm doctor` prints it

A build is made for one Python, one torch, one C++ ABI and one source, and the name of its file says which: after an update of
any of them there is none, until it is built again. `memory` and `notes` stand for Python that is there anyway and is their
reference; `reclaim` is what torch's allocator calls. Sessions use what is built when they are made.
"""

from __future__ import annotations

from chameleon_mm.native.building import HELPERS, build, builds, folder, remove, useful
from chameleon_mm.native.loading import Status, load, status

__all__ = ["HELPERS", "Status", "build", "builds", "folder", "load", "remove", "status", "useful"]
