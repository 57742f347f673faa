"""The settings of a process from its flags, its environment and the configuration file.

A flag goes before the environment, the environment before the file, the file before the default. An empty
flag of a path is none, whatever the others say.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from libs.common.runtime.config_file import COMMON, file_values, read_sections
from libs.common.runtime.settings import ENVIRONMENT_PREFIX, Row, checked_value, parsed_text, rows
from slipstream.logs.lines import LineFormat

CONFIG_VARIABLE = f"{ENVIRONMENT_PREFIX}CONFIG"
# The field of settings that takes where each of them comes from, where a class has it.
SOURCES = "sources"
SettingsT = TypeVar("SettingsT")


@dataclasses.dataclass(frozen=True, slots=True)
class SettingOrigin:
    """A value and where it comes from: a flag, a variable, a section of the file, or "default"."""

    value: Any
    source: str

    def named(self, name: str) -> str:
        """The setting of this name as its source has it."""
        return f"{self.source} {name}" if self.source.startswith("[") else self.source


def load_settings(
    kind: type[SettingsT],
    *,
    section: str,
    program: str,
    description: str,
    arguments: Sequence[str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> SettingsT:
    """The settings of this process, a service with that section of the file.

    Ends the process with status 2 and one line for a value that cannot be used. The line is JSON where the
    log's lines are to be, but not for a command line that cannot be parsed.
    """
    parser = _parser(kind, program, description)
    flags = vars(parser.parse_args(arguments))
    environment = os.environ if environment is None else environment
    try:
        found = find_settings(kind, section=section, flags=flags, environment=environment)
        _check_complete(kind, section, found)
    except ValueError as error:
        lines = _lines(section, flags, environment)
        if lines.is_json:
            line = lines.line("ERROR", __name__, str(error), at_s=time.time(), fields={})
            parser.exit(2, f"{line}\n")
        parser.error(str(error))
    values = {name: origin.value for name, origin in found.items()}
    if any(field.name == SOURCES for field in dataclasses.fields(kind)):  # type: ignore[arg-type]
        values[SOURCES] = {name: origin.named(name) for name, origin in found.items()}
        if config := _config(flags, environment):
            values[SOURCES]["config"] = config
    return kind(**values)


def _check_complete(kind: type[Any], section: str, found: Collection[str]) -> None:
    for name, row in rows(kind).items():
        if row.default is dataclasses.MISSING and name not in found:
            raise ValueError(
                f"{row.flag} is required (or {row.variable}, or {name} in [{section}] of the file "
                "of --config)"
            )


def _lines(section: str, flags: Mapping[str, Any], environment: Mapping[str, str]) -> LineFormat:
    """The form of a line about settings that cannot be used, as far as they say one."""

    def stated(name: str) -> str:
        return str(flags.get(name) or environment.get(f"{ENVIRONMENT_PREFIX}{name.upper()}") or "")

    form, config = stated("log_format"), _config(flags, environment)
    if not form and config:
        with contextlib.suppress(ValueError):
            sections = read_sections(Path(config))
            both = {**sections.get(COMMON, {}), **sections.get(section, {})}
            form = str(both.get("log_format", ""))
    return LineFormat(section, stated("instance"), form == "json")


def parse_flags(kind: type[Any], arguments: Sequence[str], *, program: str) -> dict[str, Any]:
    """The flags of a service by name. Ends the process for one that it refuses."""
    return vars(_parser(kind, program, "").parse_args(arguments))


def find_settings(
    kind: type[Any],
    *,
    section: str,
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    checks_files: bool = True,
) -> dict[str, SettingOrigin]:
    """Stated settings by name, without defaults. `flags`: values by name, and the file as "config". Raises
    ValueError."""
    source = "--config" if "config" in flags else CONFIG_VARIABLE
    config = _config(flags, environment)
    known = rows(kind)
    stated = _from_environment(known, environment)
    for name, value in flags.items():
        if name != "config":
            flag = known[name].flag
            checked = None if value is None else checked_value(known[name], flag, value)
            stated[name] = SettingOrigin(checked, flag)
    if not config:
        return stated
    values = _from_file(
        kind, Path(config), section, source, checks_files=checks_files, overridden=frozenset(stated)
    )
    return {**values, **stated}


def _config(flags: Mapping[str, Any], environment: Mapping[str, str]) -> str | None:
    return flags.get("config") or environment.get(CONFIG_VARIABLE)


def _from_file(
    kind: type[Any],
    path: Path,
    section: str,
    source: str,
    *,
    checks_files: bool,
    overridden: Collection[str],
) -> dict[str, SettingOrigin]:
    try:
        sections = read_sections(path)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
    try:
        values = file_values(kind, sections, section, checks_files=checks_files, overridden=overridden)
    except ValueError as error:
        raise ValueError(f"{source}: {path}: {error}") from None
    return {name: SettingOrigin(value, f"[{where}]") for name, (value, where) in values.items()}


def _from_environment(known: Mapping[str, Row], environment: Mapping[str, str]) -> dict[str, SettingOrigin]:
    found = {}
    for row in known.values():
        text = environment.get(row.variable)
        if not text or row.described.is_hidden:
            continue
        parts = text.split(",") if row.is_list else [text]
        parsed = [parsed_text(row, row.variable, part) for part in parts]
        value = checked_value(row, row.variable, parsed if row.is_list else parsed[0])
        found[row.name] = SettingOrigin(value, row.variable)
    return found


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line, and not the usage too."""

    def error(self, message: str) -> NoReturn:
        """End the process with status 2."""
        self.exit(2, f"{self.prog}: {message}; see --help\n")


def _path_or_none(text: str) -> Path | None:
    """An empty flag takes away what a variable or the file states."""
    return Path(text) if text else None


def _parser(kind: type[Any], program: str, description: str) -> argparse.ArgumentParser:
    parser = OneLineParser(prog=program, description=description, allow_abbrev=False)
    shared: dict[str, Any] = {"default": argparse.SUPPRESS}
    help_text = f"TOML file, or directory of *.toml, with settings; env {CONFIG_VARIABLE}"
    parser.add_argument("--config", help=help_text, **shared)
    for row in rows(kind).values():
        text = f"{row.described.help} (default: {row.default_shown}; env {row.variable})".replace("%", "%%")
        how: dict[str, Any] = {**shared, "help": argparse.SUPPRESS if row.described.is_hidden else text}
        if row.type is bool:
            how["action"] = argparse.BooleanOptionalAction
        else:
            may_be_none = row.type is Path and row.default is None
            kind_of_value = _path_or_none if may_be_none else row.type
            how.update(type=kind_of_value, choices=row.described.choices or None)
            if row.is_list:
                how["action"] = "append"
        parser.add_argument(row.flag, **how)
    return parser
