"""Program that runs as `__main__` in this process, as `python script.py` or `python -m module` would run it.

program = Program("train.py", ("--epochs", "3"))
program.check()                    # ValueError for what is no program
ending = program.run()             # Ending(exit_code=0, error=None); what it raised is on stderr already
"""

from __future__ import annotations

import builtins
import importlib.abc
import importlib.util
import io
import os
import sys
import types
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a program ended."""

    exit_code: int
    """The status that Python would exit with; of an interrupt, that of a shell."""
    error: BaseException | None
    """The exception that ended it, if any but `SystemExit`; Python's traceback of it is printed."""

    @property
    def interrupted(self) -> bool:
        """Whether an interrupt ended it, that is Ctrl-C."""
        return isinstance(self.error, KeyboardInterrupt)


@dataclass(frozen=True, slots=True)
class Program:
    """A script, or a module by its name, with its arguments."""

    name: str
    """Path of the script, or name of the module."""
    arguments: tuple[str, ...] = ()
    is_module: bool = False

    def check(self) -> None:
        """Raise `ValueError` for a script that cannot be read. Modules are looked for as they run."""
        if self.is_module:
            return
        if self.name in ("-", "-c"):
            raise ValueError(
                f"run: expected a script or -m MODULE, got {self.name!r}; write the program to a file, and name that"
            )
        path = Path(self.name)
        if path.is_dir():
            raise ValueError(f"run: expected a Python script, got {self.name}, a folder; name the file in it, or use -m MODULE")
        if not path.is_file():
            raise ValueError(
                f"run: expected a Python script, got {self.name}, which does not exist; see `chameleon-mm run --help`"
            )

    def run(self) -> Ending:
        """Run it to its end. `sys.modules["__main__"]`, `sys.argv` and `sys.path[0]` are the program's from here on."""
        try:
            code, main = self._module() if self.is_module else self._script()
            exec(code, main.__dict__)
        except SystemExit as done:
            return Ending(exit_code=_exit_code(done), error=None)
        except BaseException as error:  # noqa: BLE001  # whatever ends a program: told as Python tells it
            _tell(error)
            return Ending(exit_code=130 if isinstance(error, KeyboardInterrupt) else 1, error=error)
        return Ending(exit_code=0, error=None)

    def _script(self) -> tuple[types.CodeType, types.ModuleType]:
        path = os.path.join(os.getcwd(), self.name)  # noqa: PTH109, PTH118  # os.path: "./" and links stay in `__file__`, as Python has them
        sys.argv = [self.name, *self.arguments]
        _first_in_path(str(Path(path).resolve().parent))
        main = _main(path, SourceFileLoader("__main__", path))
        with io.open_code(path) as file:
            source = file.read()
        return compile(source, path, "exec", dont_inherit=True), main

    def _module(self) -> tuple[types.CodeType, types.ModuleType]:
        sys.argv = ["-m", *self.arguments]  # as long as packages around the module are imported
        _first_in_path(str(Path.cwd()))
        spec = _find(self.name)
        if spec is not None and spec.submodule_search_locations is not None:
            package, spec = self.name, _find(f"{self.name}.__main__")
            if spec is None:
                raise ModuleMissing(
                    f"No module named {package}.__main__; {package!r} is a package and cannot be directly executed"
                )
        if spec is None or spec.origin is None or not isinstance(spec.loader, importlib.abc.InspectLoader):
            raise ModuleMissing(f"No module named {self.name}")
        code = spec.loader.get_code(spec.name)
        if not isinstance(code, types.CodeType):
            raise ModuleMissing(f"No code object available for {spec.name}")
        main = _main(spec.origin, spec.loader, spec)
        sys.argv = [spec.origin, *self.arguments]
        return code, main


class ModuleMissing(ImportError):
    """There is no module of the name that was given, or it is none that can be run."""


def _find(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:  # of the package around it
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            return None
        raise


def _main(path: str, loader: object, spec: ModuleSpec | None = None) -> types.ModuleType:
    """Make the module that is `__main__` from here on, and stays it: exit handlers, threads and pickles look there."""
    main = types.ModuleType("__main__")
    main.__dict__.update(
        __builtins__=builtins,
        __cached__=None if spec is None else spec.cached,
        __file__=path,
        __loader__=loader,
        __package__=None if spec is None else spec.parent,
        __spec__=spec,
    )
    if sys.version_info < (3, 14):
        main.__dict__.update(__annotations__={})
    sys.modules["__main__"] = main
    if "__mp_main__" in sys.modules:  # multiprocessing's other name of it, by which spawned workers call what they send
        sys.modules["__mp_main__"] = main
    return main


def _first_in_path(folder: str) -> None:
    """Have modules beside the program found first, in the place of those beside `chameleon-mm`."""
    if not sys.flags.safe_path:  # else Python put nothing there, and would not for the program
        sys.path[0] = folder


def _exit_code(done: SystemExit) -> int:
    """The status that Python makes of `sys.exit(...)`; what is no number is printed, as Python does."""
    if done.code is None:
        return 0
    if isinstance(done.code, int):
        return done.code
    sys.stderr.write(f"{done.code}\n")
    return 1


def _tell(error: BaseException) -> None:
    """Show `error` as Python would at the end of the program, by `sys.excepthook`, without frames of ours."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    if isinstance(error, ModuleMissing):
        sys.stderr.write(f"{sys.executable}: {error}\n")
        return
    error.__traceback__ = trace
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    sys.excepthook(type(error), error, trace)
