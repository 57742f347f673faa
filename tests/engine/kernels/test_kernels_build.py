"""Compiling the kernels: once per source and machine, and a plain fallback where that is not possible."""

from __future__ import annotations

import logging
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from libs.engine.kernels import build
from libs.engine.model.random_checkpoint import write_random_checkpoint
from libs.engine.model.runner import ModelRunner, RunnerOptions
from slipstream.errors import FailedPrecondition


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty cache directory, and nothing loaded yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    build.load_library.cache_clear()
    yield tmp_path / "cache" / "slipstream" / "kernels"
    build.load_library.cache_clear()


def use_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str | None) -> None:
    """Makes `script` the only compiler; None: there is none."""
    monkeypatch.setattr(build, "_find_compiler", lambda: None)
    if script is not None:
        compiler = tmp_path / "cc"
        compiler.write_text(f"#!/bin/sh\n{script}\n")
        compiler.chmod(0o755)
        monkeypatch.setattr(build, "_find_compiler", lambda: str(compiler))


def test_built_once_and_private(fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = shutil.which("cc") or shutil.which("gcc")
    log = tmp_path / "calls"
    use_compiler(monkeypatch, tmp_path, f'echo "$1" >> {log}; exec {real} "$@"')
    for _ in range(2):
        assert build.load_library() is not None
        build.load_library.cache_clear()
    assert log.read_text().split().count("-O3") == 1
    assert [path.suffix for path in fresh.iterdir()] == [".so"]
    assert stat.S_IMODE(fresh.stat().st_mode) & 0o077 == 0


def test_a_change_of_source_is_another_library(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert build.load_library() is not None
    sources = tmp_path / "csrc"
    shutil.copytree(build.SOURCE_DIR, sources)
    (sources / "context.h").write_text((sources / "context.h").read_text() + "/* changed */\n")
    monkeypatch.setattr(build, "SOURCE_DIR", sources)
    build.load_library.cache_clear()
    assert build.load_library() is not None
    assert len(list(fresh.iterdir())) == 2


@pytest.mark.parametrize("script", [None, "exit 1", 'case "$1" in --version) echo x;; *) exit 1;; esac'])
def test_without_a_working_compiler_torch_does_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, script: str | None
) -> None:
    use_compiler(monkeypatch, tmp_path, script)
    write_random_checkpoint(tmp_path / "model")
    with caplog.at_level(logging.WARNING):
        runners = [ModelRunner.load(tmp_path / "model", RunnerOptions(n_pages=2)) for _ in range(2)]
    assert [runner.kernels for runner in runners] == ["torch", "torch"]
    assert len([record for record in caplog.records if "torch" in record.message]) == 1
    with pytest.raises(FailedPrecondition):
        ModelRunner.load(tmp_path / "model", RunnerOptions(n_pages=2, kernels="native"))


def test_a_cache_that_others_may_write_is_not_trusted(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh.mkdir(parents=True)
    fresh.chmod(0o777)
    assert build.load_library() is not None
    assert list(fresh.iterdir()) == []


def test_an_unusable_cache_directory_is_no_obstacle(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert build.load_library() is not None
    assert os.environ["XDG_CACHE_HOME"] == str(tmp_path / "file")
