"""Which credential a command of operators takes: a flag goes before the environment."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from slipstream.cli.access import OperatorAccess, takes_access
from slipstream.cli.options import name_sources
from slipstream.errors import InvalidArgument
from slipstream.rpc.api_key import ApiKeyCredential
from slipstream.rpc.dial import Credentials
from slipstream.rpc.peer_token import TokenMinter

SECRET = "the secret of a cluster, 32 bytes!"
KEY = "sk-slip-of-the-flag"


class Files:
    """A secret and a key in files of mode 0600, and the environment of an operator who has exported both."""

    def __init__(self, directory: Path) -> None:
        self.secret, self.key = str(directory / "cluster.secret"), str(directory / "ops.key")
        for path, text in ((self.secret, SECRET), (self.key, KEY)):
            Path(path).touch(mode=0o600)
            Path(path).write_text(text)
        self.environment = {"SLIPSTREAM_ROUTER": "127.0.0.1:1", "SLIPSTREAM_API_KEY_FILE": self.key}


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def credential_of(arguments: list[str], environment: dict[str, str]) -> Credentials | None:
    """What the channels of a command with these arguments carry. Raises what it raises."""
    found: list[Credentials | None] = []
    app = typer.Typer()

    @app.command()
    @takes_access
    def ask(*, access: OperatorAccess) -> None:
        found.append(access.dial().tokens)

    name_sources(app)
    result = CliRunner().invoke(app, arguments, env=environment)
    if result.exception is not None:
        raise result.exception
    return found[0]


@pytest.mark.parametrize("more", [{}, {"SLIPSTREAM_API_KEY": "sk-slip-of-the-environment"}])
def test_a_given_secret_file_goes_before_keys_of_the_environment(files: Files, more: dict[str, str]) -> None:
    environment = {**files.environment, **more}
    assert isinstance(credential_of([], environment), ApiKeyCredential)
    assert isinstance(credential_of(["--cluster-secret-file", files.secret], environment), TokenMinter)


def test_a_given_key_goes_before_a_secret_of_the_environment(files: Files) -> None:
    environment = {**files.environment, "SLIPSTREAM_CLUSTER_SECRET_FILE": files.secret}
    assert isinstance(credential_of(["--api-key", KEY], environment), ApiKeyCredential)
    assert isinstance(credential_of(["--api-key-file", files.key], environment), ApiKeyCredential)


@pytest.mark.parametrize("flag", ["--api-key", "--api-key-file"])
def test_two_credentials_of_flags_are_refused(files: Files, flag: str) -> None:
    value = KEY if flag == "--api-key" else files.key
    with pytest.raises(InvalidArgument, match=f"--cluster-secret-file, {flag}: are two credentials"):
        credential_of(["--cluster-secret-file", files.secret, flag, value], files.environment)
