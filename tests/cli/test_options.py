"""The names under which errors show the values of flags and of variables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from slipstream.cli.app import app
from slipstream.cli.options import SourceCommand
from slipstream.errors import InvalidArgument

PEMS = Path(__file__).parents[1] / "support" / "tls"
ROUTER = ("--router", "127.0.0.1:1")


def message_of(arguments: tuple[str, ...], environment: dict[str, str]) -> str:
    """The refusal of a command."""
    failed = CliRunner().invoke(app, list(arguments), env=environment).exception
    assert isinstance(failed, InvalidArgument), failed
    return failed.message


@pytest.mark.parametrize(
    ("command", "flag", "variable", "value"),
    [
        *(
            (command, flag, variable, value)
            for command in ("status", "chat", "usage")
            for flag, variable, value in (
                ("--api-key-file", "SLIPSTREAM_API_KEY_FILE", "/none"),
                ("--router", "SLIPSTREAM_ROUTER", "nohost"),
            )
        ),
        ("status", "--cluster-secret-file", "SLIPSTREAM_CLUSTER_SECRET_FILE", "/none"),
    ],
)
def test_a_value_is_named_by_where_it_comes_from(command: str, flag: str, variable: str, value: str) -> None:
    router = () if flag == "--router" else ROUTER
    assert message_of((command, *router), {variable: value}).startswith(f"{variable}: ")
    # A flag goes before the variable, and is named although the variable has the same value.
    assert message_of((command, *router, flag, value), {variable: value}).startswith(f"{flag}: ")


def test_each_of_several_values_has_its_own_source() -> None:
    environment = {"SLIPSTREAM_TLS_CA": str(PEMS / "ca.pem"), "SLIPSTREAM_TLS_KEY": str(PEMS / "client.key")}
    message = message_of(("status", *ROUTER, "--tls-certificate", str(PEMS / "peer.pem")), environment)
    assert message.startswith("--tls-certificate, SLIPSTREAM_TLS_KEY: ") and "is not the key of" in message


def test_a_secret_of_the_environment_is_named_so() -> None:
    message = message_of(("status", *ROUTER), {"SLIPSTREAM_CLUSTER_SECRET": "short"})
    assert message.startswith("SLIPSTREAM_CLUSTER_SECRET: ") and "file" not in message


def test_every_command_names_sources() -> None:
    def leaves(command: Any) -> Iterator[Any]:
        below = getattr(command, "commands", None)
        if below is None:
            yield command
            return
        for each in below.values():
            yield from leaves(each)

    found = list(leaves(typer.main.get_command(app)))
    assert len(found) > 15 and all(isinstance(each, SourceCommand) for each in found)


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        *(
            (name, "--timeout-s")
            for name in ("drain x", "undrain x", "restart x", "restart --rolling", "down")
        ),
        ("top", "--interval-s"),
    ],
)
@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "1e+10"])
def test_a_time_out_of_its_range_is_refused_by_name(command: str, flag: str, value: str) -> None:
    refused = CliRunner().invoke(app, [*command.split(), flag, value])
    assert refused.exit_code == 2, refused.output
    assert flag in refused.output and f" seconds, not {value}" in refused.output


@pytest.mark.parametrize(
    ("command", "value"),
    [
        ("chat --temperature", "nan"),
        ("chat --temperature", "inf"),
        ("jobs submit x --expires-s", "inf"),
        ("jobs submit x --retention-s", "inf"),
    ],
)
def test_a_number_that_is_not_finite_is_refused_by_name(command: str, value: str) -> None:
    refused = CliRunner().invoke(app, [*command.split(), value])
    assert refused.exit_code == 2, refused.output
    assert command.split()[-1] in refused.output
    assert f"must be a finite number, not {value}" in refused.output
