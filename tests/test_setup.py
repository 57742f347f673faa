"""The build of torch that set-up installs, with a fake pip, uv and nvidia-smi that log their calls."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
# Answers of the fake pip: $1 is the build that the index offers (cpu, plain or cuda).
PYTHON = """#!/bin/sh
case "$*" in *m.requires*) [ {index} = cuda ]; exit ;; esac
shift 2
echo "$*" >> {log}
case "$*" in
  *"show torch"*) exit 1 ;;
  *-e*) cp "$PIP_CONSTRAINT" {pins} ;;
  *"+cpu"*) [ {index} = cpu ] ;;
  *--dry-run*) if [ {index} = cuda ]; then echo "Would install nvidia-cublas-13 torch-2.13.0"; fi ;;
  *--target*) mkdir -p {venv}/.uv/bin && cp {uv} {venv}/.uv/bin/uv ;;
esac
"""


def torch_call(tmp_path: Path, index: str, *, gpu: bool = False, uv_works: bool = True, url: str = "") -> str:
    """Return the last command that installs torch, or all commands of uv."""
    venv, log, tools = tmp_path / "venv", tmp_path / "log", tmp_path / "tools"
    (venv / "bin").mkdir(parents=True)
    tools.mkdir()
    scripts = {
        venv / "bin" / "python": PYTHON.format(
            log=log, index=index, venv=venv, uv=tmp_path / "uv", pins=tmp_path / "pins"
        ),
        tmp_path / "uv": f'#!/bin/sh\necho "uv $*" >> {log}\nexit {0 if uv_works else 1}\n',
        tools / "nvidia-smi": f"#!/bin/sh\nexit {0 if gpu else 9}\n",
        tools / "apt-get": "#!/bin/sh\nexit 1\n",
        tools / "sudo": "#!/bin/sh\nexit 1\n",
        tools / "python3": "#!/bin/sh\nexit 0\n",
    }
    for path, text in scripts.items():
        path.write_text(text)
        path.chmod(0o755)
    environment = {"PATH": f"{tools}:{os.environ['PATH']}", "VENV": str(venv), "TORCH_INDEX_URL": url}
    subprocess.run(["sh", "scripts/setup.sh", "local"], cwd=ROOT, env=environment, check=True, timeout=60)
    assert not (venv / ".uv").exists()
    assert (venv / ".local").exists()
    calls = [line for line in log.read_text().splitlines() if "torch==" in line and "--dry-run" not in line]
    return calls[-1].removeprefix("--disable-pip-version-check ")


@pytest.mark.parametrize(
    ("index", "wanted"),
    [
        ("cpu", "install -qq --no-compile torch==2.13.0+cpu"),
        ("plain", "install -qq --no-compile torch==2.13.0"),
    ],
)
def test_an_index_with_a_cpu_build_is_used(tmp_path: Path, index: str, wanted: str) -> None:
    assert torch_call(tmp_path, index) == wanted


def test_uv_fetches_the_cpu_build_if_the_index_has_only_cuda(tmp_path: Path) -> None:
    call = torch_call(tmp_path, "cuda")
    assert call.startswith("uv pip install")
    assert call.endswith("--no-deps --torch-backend cpu torch==2.13.0")


def test_the_cuda_build_is_installed_without_uv_and_a_cpu_build(tmp_path: Path) -> None:
    assert torch_call(tmp_path, "cuda", uv_works=False) == "install -qq --no-compile torch==2.13.0"


def test_a_machine_with_a_gpu_gets_the_cuda_build(tmp_path: Path) -> None:
    assert torch_call(tmp_path, "cuda", gpu=True) == "install -qq --no-compile torch==2.13.0"


def test_a_named_index_has_precedence(tmp_path: Path) -> None:
    assert torch_call(tmp_path, "cpu", gpu=True, url="file:///wheels") == (
        "install -qq --no-compile torch==2.13.0 --index-url file:///wheels"
    )


def test_triton_is_pinned_unless_torch_names_its_own(tmp_path: Path) -> None:
    """With both pins pip would find no version."""
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    (triton,) = (pin for pin in pins if pin.startswith("triton=="))
    found = {}
    for index in ("cpu", "cuda"):
        (tmp_path / index).mkdir()
        torch_call(tmp_path / index, index, uv_works=False)
        found[index] = (tmp_path / index / "pins").read_text().splitlines()
    assert found == {"cpu": pins, "cuda": [pin for pin in pins if pin != triton]}


def test_set_up_for_tests_brings_the_interpreter_of_gpu_programs() -> None:
    """With a version that the extra for devices allows."""
    extras = tomllib.loads((ROOT / "server" / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    (pin,) = re.findall(r"^triton==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    (for_tests,) = (Requirement(text) for text in extras["dev"] if text.startswith("triton"))
    (for_devices,) = map(Requirement, extras["gpu"])
    assert pin in for_tests.specifier and pin in for_devices.specifier
    assert "3.6.0" not in for_devices.specifier and "3.6.0" not in for_tests.specifier
    machine = {"sys_platform": "linux", "platform_machine": "x86_64"}
    assert for_tests.marker is not None and for_tests.marker.evaluate(machine)
    assert not for_tests.marker.evaluate(machine | {"platform_machine": "aarch64"})
