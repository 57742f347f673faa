"""What a process says when a package of its extra is not installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from libs.common.runtime.extras import missing_package

ROOT = Path(__file__).resolve().parents[3]
MODEL = str(ROOT / "models" / "slipstream-mini")


@pytest.mark.parametrize(("role", "package"), [("router", "aiohttp"), ("decode", "torch")])
def test_a_missing_package_is_one_line_with_the_extra_to_install(
    tmp_path: Path, role: str, package: str
) -> None:
    run = f"runpy.run_module('services.{role}', run_name='__main__')"
    hidden = f"import sys, runpy; sys.modules[{package!r}] = None; {run}"
    arguments = ("--instance", f"{role}-0", "--model", MODEL, "--run-dir", str(tmp_path))
    ended = subprocess.run(
        [sys.executable, "-c", hidden, *arguments],
        cwd=ROOT,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    assert (
        f"'{package}' is not installed: pip install 'slipstream-server[{role}]'"
        in ended.stderr.splitlines()[-1]
    )


def test_a_missing_module_of_the_repository_is_an_error_of_the_program() -> None:
    with pytest.raises(ModuleNotFoundError):
        missing_package(ModuleNotFoundError("no", name="libs.engine.core.build"), "decode")
