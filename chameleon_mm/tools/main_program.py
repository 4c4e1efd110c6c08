"""Program that runs as `__main__` in this process, like `python script.py` or `python -m module`.

program = Program("train.py", ("--epochs", "3"))
program.check()                    # ValueError if the script is not a file
ending = program.run()             # Ending(exit_code=0, error=None); an error is already printed
"""

from __future__ import annotations

import builtins
import io
import os
import runpy
import sys
import types
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    exit_code: int
    """Exit status that Python would give; after an interrupt, a shell's (130)."""
    error: BaseException | None
    """Exception that ended the program, unless `SystemExit`; its traceback is already printed."""

    @property
    def interrupted(self) -> bool:
        """True if an interrupt (Ctrl-C) ended the program."""
        return isinstance(self.error, KeyboardInterrupt)


@dataclass(frozen=True, slots=True)
class Program:
    """Script, or module by its name, with its arguments."""

    name: str
    """Path of the script, or name of the module."""
    arguments: tuple[str, ...] = ()
    is_module: bool = False

    def check(self) -> None:
        """Raise `ValueError` if the script is no file. A module is looked up only when it runs."""
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
        """Run the program to its end. `sys.modules["__main__"]`, `sys.argv` and `sys.path[0]` stay the program's afterwards."""
        try:
            if self.is_module:
                sys.argv = ["-m", *self.arguments]
                _first_in_path(str(Path.cwd()))
                _main()
                runpy._run_module_as_main(self.name)  # type: ignore[attr-defined]  # the function that `python -m` calls
            else:
                self._run_script()
        except SystemExit as done:
            return Ending(exit_code=_exit_code(done), error=None)
        except BaseException as error:  # noqa: BLE001  # any exception may end a program: shown as Python shows it
            _tell(error)
            return Ending(exit_code=130 if isinstance(error, KeyboardInterrupt) else 1, error=error)
        return Ending(exit_code=0, error=None)

    def _run_script(self) -> None:
        path = os.path.join(os.getcwd(), self.name)  # noqa: PTH109, PTH118  # os.path: "./" and links stay in `__file__`, as Python has them
        sys.argv = [self.name, *self.arguments]
        _first_in_path(str(Path(path).resolve().parent))
        loader = SourceFileLoader("__main__", path)
        main = _main(__cached__=None, __file__=path, __loader__=loader, __package__=None, __spec__=None)
        with io.open_code(path) as file:
            source = file.read()
        exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)


def _main(**names: object) -> types.ModuleType:
    """Make the module `__main__`, which stays until the process ends, because exit handlers, threads and pickles use it."""
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, **names)
    if sys.version_info < (3, 14):
        main.__dict__.update(__annotations__={})
    sys.modules["__main__"] = main
    if "__mp_main__" in sys.modules:  # multiprocessing's second name, under which spawned workers pickle objects
        sys.modules["__mp_main__"] = main
    return main


def _first_in_path(folder: str) -> None:
    """Put the program's folder first on `sys.path`, in place of the folder of `chameleon-mm`."""
    if not sys.flags.safe_path:  # with safe_path, Python puts no folder there
        sys.path[0] = folder


def _exit_code(done: SystemExit) -> int:
    """Exit status that Python gives for `sys.exit(...)`. Prints a code that is no number, as Python does."""
    if done.code is None:
        return 0
    if isinstance(done.code, int):
        return done.code
    sys.stderr.write(f"{done.code}\n")
    return 1


def _tell(error: BaseException) -> None:
    """Show `error` by `sys.excepthook`, as Python would at the end of the program, without the frames of this file."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    error.__traceback__ = trace
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    sys.excepthook(type(error), error, trace)
