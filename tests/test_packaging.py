"""Contents of an installation: one top-level name, real files in place of links, no figures, the same wheel from the sdist.

The copy keeps the links as links: following them is the build's part.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import chameleon_mm as cm
from chameleon_mm import integrations
from chameleon_mm.bench import _training_peers
from tests.release import native_project

pytestmark = pytest.mark.slow

_ROOT = Path(__file__).resolve().parents[1]
_LINKS = ("bench", "kernels")
PACKAGE = "chameleon_mm_native"


def _build(kind: str, source: Path, out: Path) -> Path:
    command = [sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy of the checkout with one measured figure in it, so that building leaves the real one unchanged."""
    pytest.importorskip("build", reason="the packaging tests need `build` and `hatchling`: pip install -e '.[dev]'")
    pytest.importorskip("hatchling", reason="the packaging tests need `build` and `hatchling`: pip install -e '.[dev]'")
    copy = tmp_path_factory.mktemp("checkout") / "chameleon_mm"
    keep_out = shutil.ignore_patterns(".git", ".venv*", ".*_cache", ".hypothesis", "build", "dist", "__pycache__")
    shutil.copytree(_ROOT, copy, symlinks=True, ignore=keep_out)
    (copy / "bench" / "results").mkdir(exist_ok=True)
    (copy / "bench" / "results" / "copy_planted_2020-01-01.json").write_text("{}")
    return copy


@pytest.fixture(scope="module")
def sdist(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build("sdist", checkout, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build("wheel", checkout, tmp_path_factory.mktemp("wheel"))


def _contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _modules(package: Path) -> dict[str, bytes]:
    """Every module of the package, through the links, as the paths that a wheel gives them."""
    return {
        (Path(folder) / name).relative_to(package.parent).as_posix(): (Path(folder) / name).read_bytes()
        for folder, _, names in os.walk(package, followlinks=True)
        for name in names
        if name.endswith(".py")
    }


@pytest.mark.parametrize("name", _LINKS)
def test_the_links_are_relative_and_lead_to_the_top(name: str) -> None:
    link = _ROOT / "chameleon_mm" / name
    if not (_ROOT / name).exists():
        pytest.skip("an unpacked sdist holds real files in the place of the links")
    assert link.readlink() == Path("..") / name
    assert (link / "__init__.py").samefile(_ROOT / name / "__init__.py")


def test_the_wheel_holds_one_top_level_name(wheel: Path) -> None:
    top = {name.split("/")[0] for name in _contents(wheel)}
    assert {name for name in top if not name.endswith(".dist-info")} == {"chameleon_mm"}
    assert len(top) == 2


def test_the_wheel_holds_every_module_as_a_real_file(checkout: Path, wheel: Path) -> None:
    contents = _contents(wheel)
    modules = _modules(checkout / "chameleon_mm")
    assert {name: data for name, data in contents.items() if name.endswith(".py")} == modules
    assert all(f"chameleon_mm/{name}/__init__.py" in modules for name in _LINKS)
    assert "chameleon_mm/py.typed" in contents
    with zipfile.ZipFile(wheel) as archive:
        assert not [entry.filename for entry in archive.infolist() if stat.S_ISLNK(entry.external_attr >> 16)]


@pytest.mark.parametrize("name", ["page.html", "page.css", "page.js"])
def test_the_wheel_holds_the_reports_page(checkout: Path, wheel: Path, name: str) -> None:
    path = f"chameleon_mm/report/{name}"
    assert _contents(wheel)[path] == (checkout / path).read_bytes()


def test_neither_archive_holds_figures(sdist: Path, wheel: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = [*archive.getnames(), *_contents(wheel)]
    assert not [name for name in names if "results" in Path(name).parts]


def test_the_wheel_carries_the_license_and_the_command(wheel: Path) -> None:
    contents = _contents(wheel)
    (info,) = {name.split("/")[0] for name in contents if ".dist-info/" in name}
    assert contents[f"{info}/licenses/LICENSE"] == (_ROOT / "LICENSE").read_bytes()
    assert (
        contents[f"{info}/entry_points.txt"].split() == b"[console_scripts] chameleon-mm = chameleon_mm.tools.cli:main".split()
    )
    metadata = contents[f"{info}/METADATA"].decode()
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    assert "\nRequires-Python: >=3.11\n" in metadata


def test_the_sdist_builds_the_same_wheel(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (source,) = (tmp_path / "unpacked").iterdir()
    assert _contents(_build("wheel", source, tmp_path / "wheel")) == _contents(wheel)


def test_each_extra_that_is_named_exists() -> None:
    extras = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    places = [_ROOT, *(_ROOT / name for name in ("chameleon_mm", "bench", "docs", "tests/native_wheel"))]
    files = {
        file
        for place in places
        for kind in ("*.py", "*.md", "*.toml")
        for file in place.glob(kind if place == _ROOT else f"**/{kind}")
    }
    named = {
        name for file in files for name in re.findall(r"(?:chameleon-mm|'\.)\[([^\]]+)\]", file.read_text(encoding="utf-8"))
    }
    written = {"{name}": integrations._MODULES, "{extra}": [library[0] for library in _training_peers._LIBRARIES]}
    assert named > set(written)  # as messages are formed
    assert {name for given in named for name in written.get(given, [given])} <= set(extras) >= {"native", "plan"}


def test_the_version_is_that_of_the_package_everywhere() -> None:
    citation = (_ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {cm.__version__}\n" in citation
    assert f"\n## {cm.__version__} (" in (_ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_wheel_of_helpers_is_for_one_python_one_platform_and_one_release(tmp_path: Path, wheel: Path) -> None:
    native_project(tmp_path / "project", "1.2.3", "cp311-cp311-linux_x86_64")
    (tmp_path / "project" / PACKAGE).mkdir()
    (tmp_path / "project" / PACKAGE / "chameleon_mm_memory.so").write_bytes(b"a library")
    (tmp_path / "project" / PACKAGE / ".chameleon_mm_loop.so.lock").touch()
    built = _build("wheel", tmp_path / "project", tmp_path / "wheel")
    assert built.name == "chameleon_mm_native-1.2.3-cp311-cp311-linux_x86_64.whl"
    contents, info = _contents(built), "chameleon_mm_native-1.2.3.dist-info"
    assert {name for name in contents if not name.startswith(info)} == {f"{PACKAGE}/chameleon_mm_memory.so"}
    assert "Root-Is-Purelib: false\nTag: cp311-cp311-linux_x86_64\n" in contents[f"{info}/WHEEL"].decode()
    assert contents[f"{info}/licenses/LICENSE"] == (_ROOT / "LICENSE").read_bytes()
    ours, theirs = (
        next(data.decode() for name, data in found.items() if name.endswith("/METADATA"))
        for found in (_contents(wheel), contents)
    )
    assert "\nRequires-Dist: chameleon-mm==1.2.3\n" in theirs
    same = re.compile(r"^(?:Author|License-Expression|Requires-Python|Metadata-Version): .*$", re.MULTILINE)
    assert same.findall(ours) == same.findall(theirs) != []


def test_an_address_makes_each_link_of_the_readme_absolute(wheel: Path) -> None:
    hooks = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["metadata"]["hooks"]
    (rule,) = hooks["fancy-pypi-readme"]["substitutions"]
    readme = (_ROOT / "README.md").read_text(encoding="utf-8")
    relative = [link for link in re.findall(r"\]\(([^)]+)\)", readme) if not link.startswith(("https:", "#"))]
    assert len(relative) > 10 and all((_ROOT / link.split("#")[0]).exists() for link in relative)

    absolute = re.sub(rule["pattern"], r"https://address/\1", readme)
    links = [link for link in re.findall(r"\]\(([^)]+)\)", absolute) if not link.startswith("#")]
    assert all(link.startswith("https:") for link in links)
    assert [link for link in links if link.startswith("https://address/")] == [f"https://address/{link}" for link in relative]
    (metadata,) = [data.decode() for name, data in _contents(wheel).items() if name.endswith(".dist-info/METADATA")]
    assert re.sub(rule["pattern"], rule["replacement"], readme).strip() in metadata
