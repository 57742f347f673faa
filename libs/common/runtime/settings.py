"""Settings of a process: a dataclass whose fields are flags, environment variables and keys of a file.

    class Settings:
        max_batch: int = setting("sequences in one engine step", default=64)

is `--max-batch`, SLIPSTREAM_MAX_BATCH and `max_batch` in the TOML file that `--config` names. A flag goes
before the environment, the environment before the file, the file before the default. Secrets are files:
a setting holds the path.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import tomllib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

ENVIRONMENT_PREFIX = "SLIPSTREAM_"
SettingsT = TypeVar("SettingsT")
_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path"}


@dataclasses.dataclass(frozen=True, slots=True)
class Described:
    """What a field is beside its type. `check` raises ValueError for a value that cannot work."""

    help: str
    default_text: str
    choices: tuple[str, ...]
    least: float
    check: Callable[[Any], object] | None
    is_hidden: bool


def setting(
    help: str,
    *,
    default: Any = dataclasses.MISSING,
    default_text: str = "",
    choices: tuple[str, ...] = (),
    least: float = 0,
    check: Callable[[Any], object] | None = None,
    is_hidden: bool = False,
) -> Any:
    """A field of a settings class; required without a default.

    `default_text` states what None stands for, `least` the lowest value of a number.
    """
    described = Described(help, default_text, choices, least, check, is_hidden)
    return dataclasses.field(default=default, kw_only=True, metadata={"setting": described})


def check_readable(path: Path) -> None:
    """A `check` of settings that name a file or a directory. Raises ValueError."""
    try:
        os.close(os.open(path, os.O_RDONLY))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None


def check_address(text: str) -> None:
    """A `check` of settings that hold one HOST:PORT. Raises ValueError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"must be HOST:PORT, not {text!r}")


def parse_endpoints(text: str) -> list[str]:
    """HOST:PORT[,HOST:PORT..]. Raises ValueError."""
    endpoints = list(filter(None, text.split(",")))
    for endpoint in endpoints:
        check_address(endpoint)
    return endpoints


def load_settings(
    kind: type[SettingsT],
    *,
    program: str,
    description: str,
    arguments: Sequence[str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> SettingsT:
    """The settings of this process. Ends it with status 2 and one line for a value that cannot be used."""
    parser = _parser(kind, program, description)
    flags = vars(parser.parse_args(arguments))
    environment = os.environ if environment is None else environment
    variable = f"{ENVIRONMENT_PREFIX}CONFIG"
    source = "--config" if "config" in flags else variable
    config = flags.pop("config", None) or environment.get(variable)
    values: dict[str, Any] = {}
    try:
        if config:
            values.update(_from_file(kind, Path(config), source))
        values.update(_from_environment(kind, environment))
        known = rows(kind)
        values.update({name: _checked(known[name], known[name].flag, flags[name]) for name in flags})
    except ValueError as error:
        parser.error(str(error))
    _require_all(kind, values, parser.error)
    return kind(**values)


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One setting: its names, its type, its default."""

    name: str
    type: type  # of one value: bool, int, float, str or Path
    is_list: bool
    default: Any  # dataclasses.MISSING: required
    described: Described

    @property
    def flag(self) -> str:
        """The flag of the command line."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def variable(self) -> str:
        """The environment variable."""
        return f"{ENVIRONMENT_PREFIX}{self.name.upper()}"

    @property
    def default_shown(self) -> str:
        """The default in words."""
        if self.default is dataclasses.MISSING:
            return "required"
        if self.described.default_text:
            return self.described.default_text
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        return str(self.default) if self.default not in (None, "", ()) else "none"


def rows(kind: type[Any]) -> dict[str, Row]:
    """The settings of a class by name, in the order of its fields."""
    hints = typing.get_type_hints(kind)
    found = {}
    for field in dataclasses.fields(kind):
        one, is_list = _one_type(hints[field.name])
        found[field.name] = Row(field.name, one, is_list, field.default, field.metadata["setting"])
    return found


def _one_type(hint: Any) -> tuple[type, bool]:
    """`Path | None` is a path, `tuple[Path, ...]` a list of paths."""
    if isinstance(hint, types.UnionType):
        (hint,) = [part for part in hint.__args__ if part is not type(None)]
    if typing.get_origin(hint) is tuple:
        return typing.get_args(hint)[0], True
    return hint, False


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line, and not the usage too."""

    def error(self, message: str) -> NoReturn:
        """End the process with status 2."""
        self.exit(2, f"{self.prog}: {message}; see --help\n")


def _parser(kind: type[Any], program: str, description: str) -> argparse.ArgumentParser:
    parser = OneLineParser(prog=program, description=description, allow_abbrev=False)
    shared: dict[str, Any] = {"default": argparse.SUPPRESS}
    parser.add_argument("--config", help="TOML file with settings; env SLIPSTREAM_CONFIG", **shared)
    for row in rows(kind).values():
        text = f"{row.described.help} (default: {row.default_shown}; env {row.variable})".replace("%", "%%")
        how: dict[str, Any] = {**shared, "help": argparse.SUPPRESS if row.described.is_hidden else text}
        if row.type is bool:
            how["action"] = argparse.BooleanOptionalAction
        else:
            how.update(type=row.type, choices=row.described.choices or None)
            if row.is_list:
                how["action"] = "append"
        parser.add_argument(row.flag, **how)
    return parser


def _from_environment(kind: type[Any], environment: Mapping[str, str]) -> dict[str, Any]:
    found = {}
    for row in rows(kind).values():
        text = environment.get(row.variable)
        if not text or row.described.is_hidden:
            continue
        parts = text.split(",") if row.is_list else [text]
        parsed = [_parsed(row, row.variable, part) for part in parts]
        found[row.name] = _checked(row, row.variable, parsed if row.is_list else parsed[0])
    return found


def _parsed(row: Row, source: str, text: str) -> Any:
    if row.type is bool:
        if text.lower() not in ("true", "false", "1", "0"):
            raise ValueError(f"{source}: must be true or false, not {text!r}")
        return text.lower() in ("true", "1")
    try:
        return row.type(text)
    except ValueError:
        raise ValueError(f"{source}: must be {_KINDS[row.type]}, not {text!r}") from None


def _from_file(kind: type[Any], path: Path, source: str) -> dict[str, Any]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{source}: {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{source}: {path} is not TOML: {error}") from None
    known = {name: row for name, row in rows(kind).items() if not row.described.is_hidden}
    if unknown := sorted(set(document) - set(known)):
        raise ValueError(f"{source}: {path}: no setting is named {', '.join(unknown)}")
    found = {}
    for name, value in document.items():
        row, key = known[name], f"{source}: {path}: {name}"
        if row.is_list and not isinstance(value, list):
            raise ValueError(f"{key}: must be a list")
        typed = [_typed(row, key, part) for part in (value if row.is_list else [value])]
        found[name] = _checked(row, key, typed if row.is_list else typed[0])
    return found


def _typed(row: Row, source: str, value: Any) -> Any:
    """A value of the file in the type of the setting."""
    accepted = {float: (int, float), Path: (str,)}.get(row.type, (row.type,))
    if not isinstance(value, accepted) or (isinstance(value, bool) and row.type is not bool):
        raise ValueError(f"{source}: must be {_KINDS[row.type]}, not {value!r}")
    try:
        return row.type(value)
    except OverflowError:  # a whole number that no float can hold
        raise ValueError(
            f"{source}: must be {_KINDS[row.type]}, not one of {len(str(value))} digits"
        ) from None


def _checked(row: Row, source: str, value: Any) -> Any:
    """The value, lists as tuples. Raises ValueError."""
    if row.described.choices and value not in row.described.choices:
        raise ValueError(f"{source}: must be one of {', '.join(row.described.choices)}, not {value!r}")
    if row.type in (int, float) and not row.described.least <= value < math.inf:
        raise ValueError(
            f"{source}: must be {_KINDS[row.type]} of at least {row.described.least}, not {value}"
        )
    if row.described.check is not None:
        try:
            row.described.check(value)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None
    return tuple(value) if row.is_list else value


def _require_all(kind: type[Any], values: Mapping[str, Any], refuse: Callable[[str], NoReturn]) -> None:
    for name, row in rows(kind).items():
        if row.default is dataclasses.MISSING and name not in values:
            refuse(f"{row.flag} is required (or {row.variable}, or {name} in the file of --config)")
