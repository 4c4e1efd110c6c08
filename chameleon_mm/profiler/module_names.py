"""Path of the module whose forward runs, as `named_modules` has it: found on the stack, with no hook on anybody's module.

    names = ModuleNames(model)
    names.here()                 # "blocks.3.mlp.fc1"; "" outside of any module

Only frames of `nn.Module.__call__` are looked into: what they hold they hold until they return anyway, so that looking keeps no
tensor alive. A user's own frames are none of our business.
"""

from __future__ import annotations

import sys
import weakref
from types import FrameType

from torch import nn

_CALL = nn.Module._call_impl.__code__


class ModuleNames:
    """Names modules by their paths in `model`, where it is given and has them, else by those in the outermost one that runs."""

    def __init__(self, model: nn.Module | None) -> None:
        self._paths: weakref.WeakKeyDictionary[nn.Module, dict[int, str]] = weakref.WeakKeyDictionary()
        self._model = None if model is None else weakref.ref(model)

    def here(self) -> str:
        """Path of the innermost module whose forward runs on this thread; that of the outermost one is its class."""
        innermost: nn.Module | None = None
        outermost: nn.Module | None = None
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code is _CALL:
                outermost = frame.f_locals["self"]
                innermost = innermost if innermost is not None else outermost
            frame = frame.f_back
        if innermost is None or outermost is None:
            return ""
        model = None if self._model is None else self._model()
        path = None if model is None else self._paths_in(model).get(id(innermost))
        if path is None:
            path = self._paths_in(outermost).get(id(innermost), "")
        return path or type(innermost).__name__

    def _paths_in(self, root: nn.Module) -> dict[int, str]:
        paths = self._paths.get(root)
        if paths is None:
            paths = self._paths[root] = {id(module): path for path, module in root.named_modules()}
        return paths
