"""Files that are written whole, and files of a cache, which may be anything when they are read again."""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chameleon_mm.device import native
from chameleon_mm.files import cache_folder, read_file, write_file
from chameleon_mm.follow.link_rates import UNMEASURED_LINK, link_cost_for
from chameleon_mm.swap.calibration import _about, cache_file, keep, kept
from tests._fakes import UnsimulatedDevice, refusing

GOOD = json.dumps({"about": _about(UnsimulatedDevice()), "values": {"d2h_gbps": 1.0}}).encode()
"""What would be taken if it were followed."""
NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


def text(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


def sparse(path: Path) -> None:
    path.write_bytes(b"{")
    os.truncate(path, 100 << 20)


def link(path: Path) -> None:
    (path.parent / "elsewhere").write_bytes(GOOD)
    path.symlink_to(path.parent / "elsewhere")


def changeable(mode: int) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.write_bytes(GOOD)
        path.chmod(mode)

    return make


def foreign(path: Path) -> None:
    path.write_bytes(GOOD)
    os.chown(path, NOBODY, NOBODY)


PLANTED = {
    **{f"cut at {at}": text(GOOD[:at]) for at in (0, 1, 5, len(GOOD) // 2, len(GOOD) - 1)},
    "not UTF-8": text(b'{"a": "\xff\xfe"}'), "a list": text(b"[1, 2]"), "a number": text(b"7"), "a text": text(b'"abc"'),
    "null": text(b"null"), "NaN": text(b'{"a": NaN}'), "infinity": text(b'{"a": -Infinity}'),
    "digits without end": text(b'{"a": ' + b"9" * 10_000 + b"}"), "deep": text(b"[" * 200_000),
    "deep objects": text(b'{"a":' * 100_000), "zeros": text(bytes(4096)), "sparse": sparse, "a FIFO": os.mkfifo, "a link": link,
    "a link to nothing": lambda path: path.symlink_to("nothing"), "a folder": Path.mkdir, "for the group": changeable(0o660),
    "for all": changeable(0o666), "foreign": foreign,
}  # fmt: skip


@pytest.fixture
def planted(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "foreign" and os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    path = tmp_path / "own.json"
    PLANTED[request.param](path)
    return path


@pytest.mark.parametrize("planted", PLANTED, indirect=True)
def test_whatever_is_there_ends_no_session_and_is_replaced(
    planted: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What `kept` may return is checked where it is used, by its kind."""
    device, other = UnsimulatedDevice(), {path.name for path in planted.parent.iterdir()} - {planted.name}
    monkeypatch.setattr("chameleon_mm.swap.calibration.cache_folder", lambda: planted.parent)
    file = planted.rename(cache_file(device, "link"))
    with caplog.at_level(logging.WARNING, logger="chameleon_mm"):
        assert kept(device, "link") is None
        assert link_cost_for(device) == UNMEASURED_LINK
    assert all("\n" not in record.message and len(record.message) < 500 for record in caplog.records)
    assert keep(device, "link", {"d2h_gbps": 50.0}) is not file.is_dir()
    if not file.is_dir():
        assert kept(device, "link") == {"d2h_gbps": 50.0}
        assert stat.S_IMODE(file.lstat().st_mode) == 0o600
    assert {path.name for path in file.parent.iterdir()} == {file.name, *other}
    assert all((file.parent / name).read_bytes() == GOOD for name in other)


VALUES = st.recursive(st.none() | st.booleans() | st.floats() | st.text() | st.integers(), st.lists, max_leaves=5)


@given(
    st.binary(max_size=64)
    | st.builds(lambda values: json.dumps({"about": _about(UnsimulatedDevice()), "values": values}).encode(), VALUES)
    | st.builds(
        lambda values: json.dumps({"about": _about(UnsimulatedDevice()), "values": values}).encode(),
        st.dictionaries(st.sampled_from(("d2h_gbps", "h2d_gbps", "duplex_gbps", "exact_products")), VALUES),
    )
)
def test_any_content_of_a_calibration_is_a_link(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    device, folder = UnsimulatedDevice(), tmp_path_factory.getbasetemp()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("chameleon_mm.swap.calibration.cache_folder", lambda: folder)
        write_file(cache_file(device, "link"), content, private=True)
        assert link_cost_for(device).d2h_gbps > 0


@as_root
def test_a_folder_that_another_user_can_change_is_not_read_and_not_written(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    write_file(folder / "x", "", private=True)
    os.chown(folder, NOBODY, NOBODY)
    for use in (lambda: read_file(folder / "x", 1), lambda: write_file(folder / "y", "", private=True)):
        with pytest.raises(PermissionError, match=f"only this user can change, got owner {NOBODY} and mode 0o700"):
            use()
    assert [path.name for path in folder.iterdir()] == ["x"]


def test_folders_of_a_cache_are_this_user_s_alone(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        path = tmp_path / "a" / "b" / "x"
        write_file(path, "", private=True)
        assert {stat.S_IMODE(each.stat().st_mode) for each in path.parents[:2]} == {0o700}
        path.parent.chmod(0o775)  # as an earlier version made it
        with pytest.raises(PermissionError, match="mode 0o775"):
            read_file(path, 1)
        write_file(path, "1", private=True)
        assert read_file(path, 1) == b"1"
    finally:
        os.umask(before)


@pytest.mark.parametrize("private", [True, False])
@pytest.mark.parametrize("failing", ["os.fsync", "pathlib.Path.replace"])
def test_a_full_disk_is_an_os_error_and_leaves_the_earlier_file(
    private: bool, failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_file(tmp_path / "x", "earlier", private=private)
    monkeypatch.setattr(failing, refusing(OSError, errno.ENOSPC, "full"))
    with pytest.raises(OSError, match="full"):
        write_file(tmp_path / "x", "later", private=private)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["earlier"]


def test_a_full_device_is_an_os_error() -> None:
    with pytest.raises(OSError, match="No space left"):
        write_file(Path("/dev/full"), "x")


def test_what_a_rename_would_change_is_written_in_place(tmp_path: Path) -> None:
    target, link, second, fifo = (tmp_path / name for name in ("target", "link", "second", "fifo"))
    target.write_text("earlier")
    target.chmod(0o640)
    write_file(target, "once")
    assert (target.read_text(), stat.S_IMODE(target.stat().st_mode)) == ("once", 0o640)
    link.symlink_to(target)
    write_file(link, "twice")
    second.hardlink_to(target)
    assert link.is_symlink() and second.read_text() == "twice"
    write_file(second, "again")
    assert target.read_text() == "again"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    write_file(fifo, "through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)
    assert stat.S_ISFIFO(fifo.stat().st_mode)


@as_root
def test_another_user_s_file_stays_that_user_s(tmp_path: Path) -> None:
    foreign(tmp_path / "x")
    write_file(tmp_path / "x", "mine")
    assert ((tmp_path / "x").read_text(), (tmp_path / "x").stat().st_uid) == ("mine", NOBODY)


def test_a_missing_folder_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"expected a file in an existing folder, got .*x; make .*no first"):
        write_file(tmp_path / "no" / "x", "")


# --- where the cache is


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"HOME": "/h", "XDG_CACHE_HOME": "/x"}, "/x/chameleon_mm"),
        ({"HOME": "/h", "XDG_CACHE_HOME": ""}, "/h/.cache/chameleon_mm"),
    ],
)
def test_the_cache_is_where_the_user_has_caches(
    variables: dict[str, str], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(native, "CACHE", None)
    assert str(cache_folder()) == folder
    assert cache_file(UnsimulatedDevice(), "link").parent == cache_folder()
    assert native.folder() == cache_folder() / "native"


@pytest.mark.parametrize("missing", ["a home", "the package"])
def test_without_a_folder_for_caches_all_works(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as for a user without a home
    if missing == "the package":
        monkeypatch.setitem(sys.modules, "platformdirs", None)
    monkeypatch.setattr(native, "CACHE", None)
    with pytest.raises(RuntimeError, match=r"home|HOME|platformdirs"):
        cache_folder()
    assert not keep(UnsimulatedDevice(), "link", {})
    assert kept(UnsimulatedDevice(), "link") is None
    assert native.load("notes") is None
    assert native.status("notes").words.startswith("not built: ")
