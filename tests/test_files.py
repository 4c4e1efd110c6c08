"""Files that are written whole, and cache files, which may contain anything when they are read again."""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chameleon_mm.device import native
from chameleon_mm.files import cache_folder, read_file, write_file
from chameleon_mm.follow.link_rates import UNMEASURED_LINK, link_cost_for
from chameleon_mm.swap.calibration import _about, cache_file, keep, kept
from tests._fakes import UnsimulatedDevice, refusing
from tests.test_report import made_up

GOOD = json.dumps({"about": _about(UnsimulatedDevice()), "values": {"d2h_gbps": 1.0}}).encode()
"""Valid content, which is accepted if a link to it is followed."""
NOBODY = 65534
CONTENTS = {
    **{f"cut at {at}": GOOD[:at] for at in (0, 1, 5, len(GOOD) // 2, len(GOOD) - 1)},
    "not UTF-8": b'{"a": "\xff\xfe"}', "a list": b"[1, 2]", "a number": b"7", "a text": b'"abc"', "null": b"null",
    "NaN": b"NaN", "digits without end": b'{"a": ' + b"9" * 10_000 + b"}", "deep": b"[" * 200_000,
    "deep objects": b'{"a":' * 100_000, "zeros": bytes(4096), "an empty object": b"{}", "no rates": b'{"values": []}',
}  # fmt: skip


def changed(*changes: Callable[[Path], object]) -> Callable[[Path], None]:
    def plant(path: Path) -> None:
        path.write_bytes(GOOD)
        for change in changes:
            change(path)

    return plant


PLANTED: dict[str, Callable[[Path], object]] = {
    **{name: partial(lambda content, path: path.write_bytes(content), content) for name, content in CONTENTS.items()},
    "sparse": changed(lambda path: os.truncate(path, 100 << 20)), "a FIFO": os.mkfifo, "a folder": Path.mkdir,
    "a link": changed(lambda path: path.rename(path.with_name("elsewhere")), lambda path: path.symlink_to("elsewhere")),
    "a link to nothing": lambda path: path.symlink_to("nothing"), "for the group": changed(lambda path: path.chmod(0o660)),
    "for all": changed(lambda path: path.chmod(0o666)), "foreign": changed(lambda path: os.chown(path, NOBODY, NOBODY)),
}  # fmt: skip
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


@pytest.mark.parametrize("what", [name if name != "foreign" else pytest.param(name, marks=as_root) for name in PLANTED])
def test_whatever_is_there_ends_no_session_and_is_replaced(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device = UnsimulatedDevice()
    monkeypatch.setattr("chameleon_mm.swap.calibration.cache_folder", lambda: tmp_path)
    file = cache_file(device, "link")
    PLANTED[what](file)
    with caplog.at_level(logging.WARNING, logger="chameleon_mm"):
        assert kept(device, "link") is None
        assert link_cost_for(device) == UNMEASURED_LINK
    assert all("\n" not in record.message and len(record.message) < 500 for record in caplog.records)
    assert what not in CONTENTS or "is passed over, as it cannot be read" in caplog.text
    assert keep(device, "link", {"d2h_gbps": 50.0}) is not file.is_dir()
    if not file.is_dir():
        assert kept(device, "link") == {"d2h_gbps": 50.0}
        assert stat.S_IMODE(file.lstat().st_mode) == 0o600
    assert {path.name for path in tmp_path.iterdir()} <= {file.name, "elsewhere"}
    assert what != "a link" or (tmp_path / "elsewhere").read_bytes() == GOOD


VALUES = st.recursive(st.none() | st.booleans() | st.floats() | st.text() | st.integers(), st.lists, max_leaves=5)


@given(st.binary(max_size=64) | VALUES | st.dictionaries(st.sampled_from(("d2h_gbps", "h2d_gbps", "duplex_gbps")), VALUES))
def test_any_content_of_a_calibration_is_a_link(tmp_path_factory: pytest.TempPathFactory, values: Any) -> None:
    device, folder = UnsimulatedDevice(), tmp_path_factory.getbasetemp()
    content = values if isinstance(values, bytes) else json.dumps({"about": _about(device), "values": values})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("chameleon_mm.swap.calibration.cache_folder", lambda: folder)
        write_file(cache_file(device, "link"), content, private=True)
        assert link_cost_for(device).d2h_gbps > 0


@as_root
def test_a_folder_of_another_user_is_not_read_and_not_written(tmp_path: Path) -> None:
    write_file(tmp_path / "cache" / "x", "", private=True)
    os.chown(tmp_path / "cache", NOBODY, NOBODY)
    for use in (lambda path: read_file(path, 1), lambda path: write_file(path, "", private=True)):
        with pytest.raises(PermissionError, match=f"only this user can change, got owner {NOBODY} and mode 0o700"):
            use(tmp_path / "cache" / "x")


def test_folders_of_a_cache_are_this_user_s_alone(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "x"
    write_file(path, "", private=True)
    assert {stat.S_IMODE(each.stat().st_mode) for each in path.parents[:2]} == {0o700}
    path.parent.chmod(0o775)
    for use in (lambda: read_file(path, 1), lambda: write_file(path, "1", private=True)):
        with pytest.raises(PermissionError, match="mode 0o775"):
            use()


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


def test_what_a_rename_would_change_is_written_in_place(tmp_path: Path) -> None:
    target, link, second = (tmp_path / name for name in ("target", "link", "second"))
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
    with pytest.raises(OSError, match="No space left"):
        write_file("/dev/full", "x")
    if os.geteuid() == 0:
        second.unlink()
        os.chown(target, NOBODY, NOBODY)
        write_file(target, "theirs")
        assert target.stat().st_uid == NOBODY


@pytest.mark.parametrize("write", [lambda path: write_file(path, ""), made_up().save_html, made_up().save_trace])
def test_a_missing_folder_is_one_line(write: Callable[[str], None], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"expected a file in an existing folder, got .*x; make .*no first"):
        write(str(tmp_path / "no" / "x"))


@pytest.mark.parametrize(("xdg", "folder"), [("/x", "/x/chameleon_mm"), ("", "/h/.cache/chameleon_mm")])
def test_the_cache_is_where_the_user_has_caches(xdg: str, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/h")
    monkeypatch.setenv("XDG_CACHE_HOME", xdg)
    monkeypatch.setattr(native, "CACHE", None)
    assert str(cache_folder()) == folder
    assert cache_file(UnsimulatedDevice(), "link").parent == cache_folder()
    assert native.folder() == cache_folder() / "native"


@pytest.mark.parametrize("missing", ["a home", "the package"])
def test_without_a_folder_for_caches_all_works(
    missing: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as for a user without a home
    if missing == "the package":
        monkeypatch.setitem(sys.modules, "platformdirs", None)
    monkeypatch.setattr(native, "CACHE", None)
    with pytest.raises((FileNotFoundError, RuntimeError), match=r"home|HOME|platformdirs"):
        cache_folder()
    with caplog.at_level(logging.INFO, logger="chameleon_mm"):
        assert not keep(UnsimulatedDevice(), "link", {})
    assert "cannot be kept" in caplog.text
    assert kept(UnsimulatedDevice(), "link") is None
    assert native.load("notes") is None
    assert native.status("notes").startswith("not built: ")
