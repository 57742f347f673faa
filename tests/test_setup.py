"""The build of torch that set-up installs, with a fake pip, uv and nvidia-smi that log their calls."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Answers of the fake pip: $1 is the build that the index offers (cpu, plain or cuda).
PYTHON = """#!/bin/sh
shift 2
echo "$*" >> {log}
case "$*" in
  *"show torch"*) exit 1 ;;
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
        venv / "bin" / "python": PYTHON.format(log=log, index=index, venv=venv, uv=tmp_path / "uv"),
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
    [("cpu", "install -q torch==2.13.0+cpu"), ("plain", "install -q torch==2.13.0")],
)
def test_an_index_with_a_cpu_build_is_used(tmp_path: Path, index: str, wanted: str) -> None:
    assert torch_call(tmp_path, index) == wanted


def test_uv_fetches_the_cpu_build_if_the_index_has_only_cuda(tmp_path: Path) -> None:
    call = torch_call(tmp_path, "cuda")
    assert call.startswith("uv pip install")
    assert call.endswith("--no-deps --torch-backend cpu torch==2.13.0")


def test_the_cuda_build_is_installed_without_uv_and_a_cpu_build(tmp_path: Path) -> None:
    assert torch_call(tmp_path, "cuda", uv_works=False) == "install -q torch==2.13.0"


def test_a_machine_with_a_gpu_gets_the_cuda_build(tmp_path: Path) -> None:
    assert torch_call(tmp_path, "cuda", gpu=True) == "install -q torch==2.13.0"


def test_a_named_index_has_precedence(tmp_path: Path) -> None:
    assert torch_call(tmp_path, "cpu", gpu=True, url="file:///wheels") == (
        "install -q torch==2.13.0 --index-url file:///wheels"
    )
