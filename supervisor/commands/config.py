"""`slipstream config check` and `show`: what a file of settings says, and what a service would run with."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli.options import AsJson
from slipstream.errors import InvalidArgument

if TYPE_CHECKING:
    from libs.common.runtime.settings import Row

config_app = typer.Typer(
    help="Check a file of settings, and show what each service takes from it.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
)
_SECRET = "SLIPSTREAM_CLUSTER_SECRET"
_MASK = "******"

File = Annotated[Path, typer.Argument(help="TOML file, or a directory of *.toml.")]


@config_app.command("check")
def check(
    file: File,
    files: Annotated[
        bool, typer.Option("--files", help="Also check that this machine has the files that it names.")
    ] = False,
) -> None:
    """Check every section, key and value of a file. Exit code 1 for what a service would refuse."""
    from libs.common.runtime.config_file import read_sections
    from supervisor.configuration.cluster_file import sections_values, without_path

    try:
        sections = read_sections(file)
        _, services = sections_values(sections, checks_files=files)
    except ValueError as error:
        raise InvalidArgument(str(file), without_path(file, str(error))) from None
    named = ", ".join(f"[{section}]" for section in sections) or "no section"
    print(f"{file}: {named}; {sum(map(len, services.values()))} settings of services are set")


@config_app.command("show")
def show(
    file: Annotated[
        Path | None, typer.Argument(help="TOML file, or a directory of *.toml; default: none.")
    ] = None,
    tier: Annotated[
        list[str] | None, typer.Option(help="router, prefill, decode, kvstore or drafter; repeatable.")
    ] = None,
    flag: Annotated[
        list[str] | None,
        typer.Option(help="A flag as the service gets it: --flag=--max-batch=8; repeatable."),
    ] = None,
    changed: Annotated[bool, typer.Option("--changed", help="Leave defaults out.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the settings that services would run with, and where each comes from.

    Flags go before variables (SLIPSTREAM_*), these before the file, the file before defaults.
    """
    from supervisor.configuration.cluster_file import SETTINGS

    tiers = list(tier or SETTINGS)
    for name in tiers:
        if name not in set(SETTINGS):
            raise InvalidArgument("--tier", f"must be one of {', '.join(SETTINGS)}, not {name!r}")
    shown = {name: effective_settings(name, file, flag or (), os.environ) for name in tiers}
    if changed:
        shown = {name: [row for row in rows if row["source"] != "default"] for name, rows in shown.items()}
    if as_json:
        print(json.dumps(shown, indent=2))
        return
    from slipstream.cli.tables import cell, figures_table, print_table

    table = figures_table(("tier", "setting", "value", "from"), ())
    for name, rows in shown.items():
        for row in rows:
            table.add_row(name, row["setting"], cell(_text(row["value"])), cell(row["source"]))
    print_table(table)


def effective_settings(
    tier: str, file: Path | None, flags: Sequence[str], environment: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Each setting of the service with its value and source. Raises InvalidArgument."""
    from libs.common.cluster.worker_record import Role
    from libs.common.runtime.loading import find_settings, parse_flags
    from libs.common.runtime.settings import rows
    from supervisor.configuration.cluster_file import SETTINGS

    kind = SETTINGS[Role(tier)]
    given = parse_flags(kind, flags, program=f"slipstream config show: --flag of {tier}")
    if file is not None:
        given["config"] = str(file)
    try:
        found = find_settings(kind, section=tier, flags=given, environment=environment, checks_files=False)
    except ValueError as error:
        raise InvalidArgument("config", str(error)) from None
    listed = []
    for name, row in rows(kind).items():
        if row.described.is_hidden:
            continue
        origin = found.get(name)
        value = _default(row) if origin is None or origin.value is None else origin.value
        source = "default" if origin is None else origin.source
        listed.append({"setting": name, "value": _plain(value), "source": source})
    if environment.get(_SECRET):
        listed.append({"setting": "cluster_secret", "value": _MASK, "source": _SECRET})
    return listed


def _default(row: Row) -> Any:
    """The value where it is one, else its words."""
    is_value = isinstance(row.default, bool | int | float) and not row.described.default_text
    return row.default if is_value else row.default_shown


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
