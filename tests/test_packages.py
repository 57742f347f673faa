"""The contents of the two wheels, and the SDK's wheel without the server's."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from services.router.console.static_files import STATIC
from slipstream import __version__

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("slipstream", "libs", "services", "supervisor", "server", "pyproject.toml", "README.md", "LICENSE")
TOP_LEVEL = {"slipstream": {"slipstream"}, "slipstream_server": {"libs", "services", "supervisor"}}


def run(*command: str | Path, cwd: Path = ROOT, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=cwd, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Build both wheels from a copy of the sources without network."""
    work = tmp_path_factory.mktemp("packages")
    ignored = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
    for name in SOURCES:
        source, target = ROOT / name, work / "tree" / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=ignored)
        else:
            shutil.copyfile(source, target)
    # The build copies current libraries. It compiles outdated ones without optimisation, which is quick.
    real = runpy.run_path(str(ROOT / "server" / "native_build.py"))["_compiler"]()
    compiler = work / "cc"
    compiler.write_text(f'#!/bin/sh\nexec "{real}" "$@" -O0\n')
    compiler.chmod(0o755)
    options = ("--no-deps", "--no-build-isolation", "--disable-pip-version-check", "-w", work / "dist")
    environment = {**os.environ, "CC": str(compiler)}
    run(sys.executable, "-m", "pip", "wheel", *options, ".", "./server", cwd=work / "tree", env=environment)
    built = {path.name.split("-")[0]: path for path in (work / "dist").iterdir()}
    assert set(built) == set(TOP_LEVEL)
    return built


def files_of(wheel: Path) -> list[str]:
    return [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]


@pytest.mark.parametrize("name", TOP_LEVEL)
def test_a_wheel_holds_its_own_packages_and_no_others(wheels: dict[str, Path], name: str) -> None:
    assert wheels[name].name.startswith(f"{name}-{__version__}-")
    files = files_of(wheels[name])
    assert {file.split("/")[0] for file in files} == TOP_LEVEL[name]
    assert not [file for file in files if re.search(r"(^|/)(tests|bench|models|__pycache__)/", file)]
    modules = {file for file in files if file.endswith(".py")}
    sources = {str(p.relative_to(ROOT)) for top in TOP_LEVEL[name] for p in (ROOT / top).rglob("*.py")}
    assert modules == sources


def test_the_sdk_is_typed_and_pure_python(wheels: dict[str, Path]) -> None:
    assert wheels["slipstream"].name.endswith("-py3-none-any.whl")
    files = files_of(wheels["slipstream"])
    assert "slipstream/py.typed" in files
    assert any(file.endswith(".pyi") for file in files)


def test_the_server_wheel_has_compiled_libraries(wheels: dict[str, Path]) -> None:
    assert re.search(r"-py3-none-(linux|macosx|manylinux)", wheels["slipstream_server"].name)
    files = set(files_of(wheels["slipstream_server"]))
    native = runpy.run_path(str(ROOT / "server" / "native_build.py"))["libraries"]()
    assert {str(library.path) for library in native} == {file for file in files if file.endswith(".so")}
    sources = {str(p.relative_to(ROOT)) for library in native for p in library.source_dir.iterdir()}
    assert sources <= files


def test_the_server_wheel_has_the_page_of_the_console(wheels: dict[str, Path]) -> None:
    page = {str(p.relative_to(ROOT)) for p in STATIC.rglob("*") if p.is_file()}
    assert page and page <= set(files_of(wheels["slipstream_server"]))


def test_the_server_requires_the_sdk_of_its_version(wheels: dict[str, Path]) -> None:
    archive = zipfile.ZipFile(wheels["slipstream_server"])
    (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = archive.read(name).decode()
    assert f"Requires-Dist: slipstream=={__version__}\n" in metadata
    assert any(name.endswith("/licenses/LICENSE") for name in archive.namelist())


def test_the_sdk_works_alone_in_a_fresh_environment(wheels: dict[str, Path], tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    bin_dir = tmp_path / "venv" / "bin"
    install = (
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--disable-pip-version-check",
        wheels["slipstream"],
    )
    run(sys.executable, "-m", "pip", "--python", bin_dir / "python", *install)
    # Its dependencies of this environment, without the two packages of the project.
    dependencies = tmp_path / "dependencies"
    dependencies.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith(("slipstream", "__editable__")):
            (dependencies / path.name).symlink_to(path)
    environment = {"PYTHONPATH": str(dependencies), "PATH": "/usr/bin:/bin"}
    assert run(bin_dir / "slipstream", "--version", cwd=tmp_path, env=environment) == (
        f"slipstream {__version__}\n"
    )
    probe = (
        "import sys, slipstream\n"
        "from slipstream import AsyncClient, Client\n"
        "Client('127.0.0.1:1').close()\n"
        "assert not {'libs', 'services', 'supervisor'} & set(sys.modules)\n"
        "print(slipstream.__file__)\n"
    )
    shown = run(bin_dir / "python", "-c", probe, cwd=tmp_path, env=environment)
    assert shown.startswith(str(tmp_path / "venv"))
    refused = subprocess.run(
        [bin_dir / "slipstream", "up"], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "pip install slipstream-server" in refused.stderr
