"""Which files of secrets are said to be exposed, and the commands that mend them."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from libs.common.runtime.loading import load_settings
from libs.common.runtime.settings import rows
from services.router.settings import RouterSettings
from slipstream.cli.app import app
from slipstream.credentials.secret_files import exposure, exposure_of

FILE = Path("/etc/slipstream/the secret")
NAME = "'/etc/slipstream/the secret'"
OURS, FSGROUP = 65532, 65532


def found(mode: int, uid: int, gid: int) -> os.stat_result:
    """What stat says of a file with this mode and owner."""
    return os.stat_result((stat.S_IFREG | mode, 0, 0, 1, uid, gid, 0, 0, 0, 0))


@pytest.mark.parametrize(
    ("mode", "uid", "gid", "mend"),
    [
        (0o600, OURS, 100, ""),
        (0o400, OURS, 100, ""),
        (0o440, 0, FSGROUP, ""),  # a Secret of Kubernetes with fsGroup
        (0o640, 0, FSGROUP, ""),
        (0o640, 0, 999, f"chgrp 65532 {NAME} && chmod 0640 {NAME}"),  # of a group that is not ours
        (0o644, 0, FSGROUP, f"chmod 0640 {NAME}"),
        (0o644, 0, 0, f"chgrp 65532 {NAME} && chmod 0640 {NAME}"),  # a Secret without defaultMode and fsGroup
        (0o660, 0, FSGROUP, f"chmod 0640 {NAME}"),  # whose group may change it
        (0o644, OURS, 100, f"chmod 0600 {NAME}"),
        (0o640, OURS, FSGROUP, f"chmod 0600 {NAME}"),  # we can read our own file without the group
        (0o602, OURS, 100, f"chmod 0600 {NAME}"),
        (0o640, 1000, FSGROUP, f"chown 65532 {NAME} && chmod 0600 {NAME}"),
    ],
)
def test_who_else_may_read(mode: int, uid: int, gid: int, mend: str) -> None:
    said = exposure_of(FILE, found(mode, uid, gid), user=OURS, groups={FSGROUP})
    assert said.endswith(mend) and bool(said) is bool(mend)
    if mend:
        assert said.startswith(f"{FILE} has mode {mode:04o}, and ")


def test_the_command_mends_it(tmp_path: Path) -> None:
    secret = tmp_path / "s"
    secret.write_text("x")
    secret.chmod(0o644)
    assert "every user of this machine may read it" in exposure(secret)
    assert os.system(exposure(secret).rpartition(": ")[2]) == 0
    assert exposure(secret) == "" and stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert exposure(tmp_path / "none") == ""
    tmp_path.chmod(0o755)
    assert exposure(tmp_path) == ""  # the code that reads the file refuses a folder


def test_a_service_says_it_of_every_file_of_a_secret(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    secrets = {name for name, row in rows(RouterSettings).items() if row.described.is_secret}
    assert secrets == {"cluster_secret_file", "tls_key", "etcd_key", "etcd_password_file", "api_keys"}
    flags, environment = ["--instance", "r", "--model", "."], {}
    for name in sorted(secrets):
        file = tmp_path / name
        file.write_text("0123456789abcdef")
        file.chmod(0o644)
        if name == "api_keys":
            environment["SLIPSTREAM_API_KEYS"] = str(file)
        else:
            flags += [f"--{name.replace('_', '-')}", str(file)]
    given = load_settings(
        RouterSettings,
        section="router",
        program="p",
        description="",
        arguments=flags,
        environment=environment,
    )
    with caplog.at_level(logging.WARNING):
        given.warn_of_exposed_secrets()
    said = {record.message.partition(": ")[0] for record in caplog.records}
    assert said == {
        *("--cluster-secret-file", "--tls-key", "--etcd-key", "--etcd-password-file"),
        "SLIPSTREAM_API_KEYS",
    }
    assert "0123456789abcdef" not in caplog.text
    for name in secrets:
        (tmp_path / name).chmod(0o600)
    caplog.clear()
    given.warn_of_exposed_secrets()
    assert not caplog.records


@pytest.mark.parametrize(
    ("url", "is_secret"),
    [
        ("postgresql://user:hidden@host/name", True),
        ("postgresql://user@host/name?password=hidden", True),
        ("postgresql://user@host/name", False),
        ("sqlite:/a:b@c", False),
    ],
)
@pytest.mark.parametrize("is_folder", [False, True])
def test_a_router_says_it_of_a_file_with_the_password_of_its_database(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, url: str, is_secret: bool, is_folder: bool
) -> None:
    file = tmp_path / "slipstream.toml"
    file.write_text(f'[router]\ndatabase = "{url}"\n')
    config = str(tmp_path if is_folder else file)

    def said(*flags: str) -> list[str]:
        caplog.clear()
        arguments = ["--instance", "r", "--model", ".", "--config", config, *flags]
        load_settings(
            RouterSettings, section="router", program="p", description="", arguments=arguments, environment={}
        ).warn_of_exposed_secrets()
        return [record.message for record in caplog.records]

    file.chmod(0o644)
    warnings = said()
    assert len(warnings) == int(is_secret) and "hidden" not in caplog.text
    if is_secret:
        assert warnings[0].startswith(f"[router] database has a password: {file} has mode 0644")
    assert not said("--database", "sqlite:/a")
    file.chmod(0o600)
    assert not said()


def test_a_command_says_it_on_stderr(tmp_path: Path) -> None:
    for flag, text in (("--api-key-file", "sk-slip-a"), ("--cluster-secret-file", "0123456789abcdef")):
        file = tmp_path / flag
        file.write_text(text)
        for mode in (0o644, 0o600):
            file.chmod(mode)
            shown = CliRunner().invoke(app, ["status", "--router", "127.0.0.1:1", flag, str(file)])
            assert (f"slipstream: {flag}: {file} has mode 0644" in shown.stderr) is (mode == 0o644)
            assert text not in shown.stderr


def test_a_command_names_the_variable_that_gave_the_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("sk-slip-a")
    file.chmod(0o644)
    command, environment = ["status", "--router", "127.0.0.1:1"], {"SLIPSTREAM_API_KEY_FILE": str(file)}
    shown = CliRunner().invoke(app, command, env=environment)
    assert f"slipstream: SLIPSTREAM_API_KEY_FILE: {file} has mode 0644" in shown.stderr
