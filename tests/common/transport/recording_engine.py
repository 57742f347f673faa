"""A Mooncake engine that records its calls and copies bytes within this process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.common.transport.peers import ROOT

ENGINE = """
import ctypes, json, os

class TransferEngine:
    def initialize(self, host, metadata, protocol, devices):
        seen = {k: v for k, v in os.environ.items() if k.startswith("MC_")}
        print(json.dumps({"at_import": AT_IMPORT, "seen": seen, "asked": [metadata, protocol, devices]}))
        return 0
    def get_rpc_port(self):
        return 16000
    def register_memory(self, address, n_bytes, location="*"):
        print(json.dumps({"registered": [address, n_bytes, location]}))
        return -9 if n_bytes == 666 else 0
    def batch_transfer_async_read(self, peer, to, source, sizes):
        for one in zip(to, source, sizes):
            ctypes.memmove(*one)
        return 1
    def transfer_check_status(self, number):
        return 1

AT_IMPORT = {k: v for k, v in os.environ.items() if k.startswith("MC_")}
"""
OPEN = """
import asyncio, sys
from pathlib import Path
from libs.common.transport import mooncake, rdma
from libs.common.transport.open import open_transport

assert "mooncake.engine" not in sys.modules
rdma.SYS_DEVICES, rdma.CHARACTER_DEVICES = Path(sys.argv[1]) / "sys", Path(sys.argv[1]) / "dev"
transport = open_transport(sys.argv[2], "127.0.0.1")
print(transport.kind)
"""
CLOSE = """
asyncio.run(transport.close())
"""


def make_device(root: Path, name: str, *, state: str = "4: ACTIVE", verbs: str = "uverbs0") -> None:
    """Create the kernel's files of one RDMA device under `root`/sys and `root`/dev."""
    port = root / "sys" / name / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text(f"{state}\n")
    if verbs:
        (root / "sys" / name / "device" / "infiniband_verbs" / verbs).mkdir(parents=True)
        (root / "dev").mkdir(exist_ok=True)
        (root / "dev" / verbs).touch()


def run_with_recording_engine(
    tmp_path: Path, spec: str, *, then: str = "", environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Open the transport in a process with the recording engine and the devices under `tmp_path`.

    The process then runs the code `then` with `transport`.
    """
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").touch()
    (tmp_path / "mooncake" / "engine.py").write_text(ENGINE)
    return subprocess.run(
        [sys.executable, "-c", OPEN + then + CLOSE, str(tmp_path), spec],
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": "/usr/bin:/bin", **(environment or {})},
        capture_output=True,
        text=True,
        timeout=100,
    )


def recorded_calls(done: subprocess.CompletedProcess[str]) -> list[dict[str, object]]:
    """Return the engine's recorded calls in order."""
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
