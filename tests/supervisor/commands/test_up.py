"""The flags of `slipstream up`."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from slipstream.cli.app import app
from slipstream.errors import InvalidArgument
from slipstream.rpc.tls import TlsFiles
from supervisor.plan import ClusterConfig

PEMS = Path(__file__).parents[2] / "support" / "tls"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[ClusterConfig]:
    """The configurations of clusters that would have been started."""
    found: list[ClusterConfig] = []

    async def note(config: ClusterConfig) -> int:
        found.append(config)
        return 0

    monkeypatch.setattr("supervisor.commands.up.run_cluster", note)
    return found


def test_keys_certificates_and_etcd_access_are_flags(tmp_path: Path, started: list[ClusterConfig]) -> None:
    files = [tmp_path / name for name in ("etcd-ca", "password", "keys", "prompt", "prices")]
    for file in files:
        file.touch()
    etcd_ca, password, keys, prompt, prices = files
    ca, pem, key = (PEMS / name for name in ("ca.pem", "peer.pem", "peer.key"))
    arguments = ["up", "--tls-ca", ca, "--tls-certificate", pem, "--tls-key", key]
    arguments += ["--etcd", "e:1", "--etcd-ca", etcd_ca, "--etcd-certificate", pem, "--etcd-key", key]
    arguments += ["--etcd-user", "u", "--etcd-password-file", password, "--api-keys", keys]
    arguments += ["--shared-prefix", prompt, "--served-model-name", "helper", "--disk-bytes", "0"]
    arguments += ["--prices", prices]
    # The shell's variables of a client's certificate do not become the services'.
    done = CliRunner().invoke(app, [str(part) for part in arguments], env={"SLIPSTREAM_TLS_CA": "/other"})
    assert done.exit_code == 0, done.output
    (config,) = started
    assert config.tls == TlsFiles(ca, pem, key)
    assert (config.etcd_ca, config.etcd_certificate, config.etcd_key) == (etcd_ca, pem, key)
    assert (config.etcd_user, config.etcd_password_file) == ("u", password)
    assert (config.api_keys, config.shared_prefix, config.prices) == (keys, prompt, prices)
    assert (config.served_model_name, config.disk_bytes) == ("helper", 0)


def test_a_shells_certificates_are_not_the_services(started: list[ClusterConfig]) -> None:
    names = {f"SLIPSTREAM_TLS_{name}": "/dev/null" for name in ("CA", "CERTIFICATE", "KEY")}
    assert CliRunner().invoke(app, ["up"], env=names).exit_code == 0
    assert started[0].tls is None


def test_two_of_three_certificates_are_refused(tmp_path: Path, started: list[ClusterConfig]) -> None:
    done = CliRunner().invoke(app, ["up", "--tls-ca", str(tmp_path)])
    assert isinstance(done.exception, InvalidArgument)
    assert not started
