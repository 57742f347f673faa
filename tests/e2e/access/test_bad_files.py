"""Services that start with a secret that others may read, and with a key of another certificate."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from supervisor.configuration.cluster_options import DEFAULT_MODEL
from tests.support.processes.launching import run_service
from tests.support.tls.authority import Authority

ROOT = Path(__file__).parents[3]
DEADLINE_S = 240


@pytest.mark.parametrize(
    ("service", "flags"),
    [
        ("router", ("--model", str(DEFAULT_MODEL), "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0")),
        ("decode", ("--engine", "fake")),
        ("kvstore", ("--disk-bytes", "0")),
    ],
)
def test_a_service_says_what_is_wrong_with_its_files(
    tmp_path: Path, service: str, flags: tuple[str, ...]
) -> None:
    authority = Authority(tmp_path / "pki")
    files, other = authority.issue("one"), authority.issue("other")
    secret = tmp_path / "cluster.secret"
    secret.write_text("0123456789abcdef")
    secret.chmod(0o644)
    ended = subprocess.run(
        [
            *(sys.executable, "-m", f"services.{service}", "--instance", f"{service}-0", *flags),
            *("--run-dir", str(tmp_path / "run"), "--cluster-secret-file", str(secret)),
            *("--tls-ca", str(files.ca), "--tls-certificate", str(files.certificate)),
        ],
        cwd=ROOT,
        env={"SLIPSTREAM_TLS_KEY": str(other.key), "PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    lines = ended.stderr.splitlines()
    exposed = [line for line in lines if f"--cluster-secret-file: {secret} has mode 0644" in line]
    assert len(exposed) == 1 and exposed[0].endswith(f"chmod 0600 {secret}"), ended.stderr
    assert f"--tls-certificate, SLIPSTREAM_TLS_KEY: {other.key} is not the key of" in lines[-1], ended.stderr
    assert ended.returncode != 0 and "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("service", "flags", "words"),
    [
        ("drafter", (), "drafter-0 cannot start: --model, --draft-model: required with --engine torch"),
        ("decode", (), "decode-0 cannot start: --model: required with --engine torch"),
        ("kvstore", ("--tls-ca", __file__), "--tls-ca, --tls-certificate, --tls-key: go together"),
        ("router", (), "--model is required"),
        ("router", ("--model", str(DEFAULT_MODEL), "--tls-client-ca", __file__), "--tls-client-ca: needs"),
    ],
)
def test_refused_settings_end_a_json_log_with_json(
    tmp_path: Path, service: str, flags: tuple[str, ...], words: str
) -> None:
    command = [sys.executable, "-m", f"services.{service}", "--instance", f"{service}-0", *flags]
    code, written = run_service(
        [*command, "--run-dir", str(tmp_path / "run"), "--listen", "127.0.0.1:0"],
        {"SLIPSTREAM_LOG_FORMAT": "json"},
        timeout_s=DEADLINE_S,
    )
    records = [json.loads(line) for line in written.splitlines()]
    assert words in records[-1]["message"] and code != 0
    assert (records[-1]["level"], records[-1]["instance"]) == ("error", f"{service}-0")
