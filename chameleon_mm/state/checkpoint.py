"""Checkpoint in the format of `torch.distributed.checkpoint`, by one process without a process group.

write_checkpoint(path, contents)         # contents() -> nested dicts of tensors on the host and plain values
dcp.load(state, checkpoint_id=path); dcp_to_torch_save(path, file)      # reads it without this package

Import this module only to write: it imports `torch.distributed.checkpoint`, which takes a second or two.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict

from chameleon_mm.state.checkpoint_folder import new_folder
from chameleon_mm.state.tensor_copy import is_copyable


def write_checkpoint(path: Path, contents: Callable[[], dict[str, Any]]) -> None:
    """Write the result of `contents()` to the folder `path`, replacing an earlier checkpoint: Note [Checkpoint folder]. Raises
    `OSError`, and the errors of pickling a value; the earlier checkpoint is then unchanged."""
    with new_folder(Path(os.path.realpath(path))) as part:
        failure = _save(part, contents())
        if isinstance(failure, OSError):
            raise OSError(
                failure.errno,
                f"{path}: expected room and rights for a checkpoint, got {failure.strerror!r}; what was there is untouched, "
                f"make room or choose another folder",
            )
        if failure is not None:
            raise failure


def _save(folder: Path, contents: dict[str, Any]) -> BaseException | None:
    """Save `contents` in `folder`, with each file synced to disk. Returns the error, or None."""
    # Copying ahead would create a context on the current GPU of this thread. All tensors are on the host already.
    writer = FileSystemWriter(folder, sync_files=True, per_thread_copy_ahead=0)
    try:
        # Same as `save(no_dist=True)` without its warning about a missing process group, which cannot be silenced on one thread
        # only. `torch_save_to_dcp` makes the same call.
        _save_state_dict(contents, storage_writer=writer, planner=_Planner(), no_dist=True)
    except CheckpointException as failures:
        error: BaseException | None = next(iter(failures.failures.values()))[0]
        below = error
        while below is not None and not isinstance(below, OSError):
            below = below.__context__  # closing an archive after a failed write hides the first error
        return below or error
    return None


class _Pickled(NamedTuple):
    """Tensor that is pickled like other values."""

    tensor: Tensor


class _Planner(DefaultSavePlanner):
    """Planner that also writes values that torch's planner drops or cannot write: empty mappings (`load_state_dict` of an
    optimizer needs its "state", even if empty), and tensors that are not just elements in memory, such as sparse ones."""

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        empty = {".".join(path): path for path in _empty_mappings(state_dict)}
        self.mappings = {**self.mappings, **empty}
        values = {**self.state_dict, **{name: {} for name in empty}}
        self.state_dict = {
            name: _Pickled(value) if isinstance(value, Tensor) and not is_copyable(value) else value
            for name, value in values.items()
        }

    def transform_object(self, write_item: WriteItem, value: Any) -> Any:
        return super().transform_object(write_item, value.tensor if isinstance(value, _Pickled) else value)


def _empty_mappings(values: Mapping[Any, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            at = (*path, str(key))
            if value:
                yield from _empty_mappings(value, at)
            else:
                yield at
