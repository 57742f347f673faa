"""Settings of a process: a dataclass whose fields are flags, environment variables and keys of a file.

    class Settings:
        max_batch: int = setting("sequences in one engine step", default=64)

is `--max-batch`, SLIPSTREAM_MAX_BATCH and `max_batch` in a section of the TOML file that `--config` names
(loading.py, config_file.py). Secrets are files: a setting holds the path.
"""

from __future__ import annotations

import dataclasses
import math
import os
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slipstream.rpc.hosts import address_of, is_wildcard

ENVIRONMENT_PREFIX = "SLIPSTREAM_"
_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path"}


@dataclasses.dataclass(frozen=True, slots=True)
class Described:
    """The description of a field, beside its type. `check` raises ValueError for a value that cannot work."""

    help: str
    default_text: str
    choices: tuple[str, ...]
    least: float
    most: float  # a finite bound only where one is named
    check: Callable[[Any], object] | None
    is_hidden: bool
    is_secret: bool


def setting(
    help: str,
    *,
    default: Any = dataclasses.MISSING,
    default_text: str = "",
    choices: tuple[str, ...] = (),
    least: float = 0,
    most: float = math.inf,
    check: Callable[[Any], object] | None = None,
    is_hidden: bool = False,
    is_secret: bool = False,
) -> Any:
    """A field of a settings class; required without a default.

    `default_text` states what None stands for; `least` and `most` bound a number. `is_secret`: it names a
    file that only the process should read.
    """
    described = Described(help, default_text, choices, least, most, check, is_hidden, is_secret)
    return dataclasses.field(default=default, kw_only=True, metadata={"setting": described})


def check_readable(path: Path) -> None:
    """A `check` of settings that name a file or a directory. Raises ValueError."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))  # a pipe without a writer would block
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None


def check_address(text: str) -> None:
    """A `check` of settings that hold one HOST:PORT to listen on. Raises ValueError."""
    address_of(text)


def check_advertised(text: str) -> None:
    """A `check` of settings that hold the HOST:PORT that others dial, or nothing. Raises ValueError."""
    if not text:
        return
    host, _ = address_of(text)
    try:
        if "/" in host:  # of a URL
            raise UnicodeError
        host.encode("idna")
    except UnicodeError:
        raise ValueError(f"must be HOST:PORT, not {text!r}: no name has such a part between dots") from None
    if is_wildcard(text):
        raise ValueError(f"must be HOST:PORT that others can dial, not {text!r}: it is no single machine")


def check_peers(text: str) -> None:
    """A `check` of settings that hold HOST:PORT[,HOST:PORT..] to dial. Raises ValueError."""
    for endpoint in parse_endpoints(text):
        if not address_of(endpoint)[1]:
            raise ValueError(f"must be HOST:PORT, not {endpoint!r}: nothing listens on port 0")


def parse_endpoints(text: str) -> list[str]:
    """HOST:PORT[,HOST:PORT..]. Raises ValueError."""
    endpoints = list(filter(None, text.split(",")))
    for endpoint in endpoints:
        check_address(endpoint)
    return endpoints


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


def rows(kind: type[Any]) -> Mapping[str, Row]:
    """The settings of a class by name, in the order of its fields."""
    if kind not in _rows_of:  # a process asks nine times
        _rows_of[kind] = types.MappingProxyType(_read_rows(kind))
    return _rows_of[kind]


_rows_of: dict[type[Any], Mapping[str, Row]] = {}


def _read_rows(kind: type[Any]) -> dict[str, Row]:
    hints = typing.get_type_hints(kind)
    found = {}
    for field in dataclasses.fields(kind):
        if "setting" not in field.metadata:
            continue
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


def parsed_text(row: Row, source: str, text: str) -> Any:
    """A variable's text in the type of the setting. Raises ValueError."""
    if row.type is bool:
        if text.lower() not in ("true", "false", "1", "0"):
            raise ValueError(f"{source}: must be true or false, not {text!r}")
        return text.lower() in ("true", "1")
    try:
        return row.type(text)
    except ValueError:
        raise ValueError(f"{source}: must be {_KINDS[row.type]}, not {text!r}") from None


def typed_value(row: Row, source: str, value: Any) -> Any:
    """A value of the file in the type of the setting. Raises ValueError."""
    accepted = {float: (int, float), Path: (str,)}.get(row.type, (row.type,))
    if not isinstance(value, accepted) or (isinstance(value, bool) and row.type is not bool):
        raise ValueError(f"{source}: must be {_KINDS[row.type]}, not {value!r}")
    try:
        return row.type(value)
    except OverflowError:  # a whole number that no float can hold
        raise ValueError(
            f"{source}: must be {_KINDS[row.type]}, not one of {len(str(value))} digits"
        ) from None


def checked_value(row: Row, source: str, value: Any) -> Any:
    """The value, lists as tuples. Raises ValueError."""
    if row.described.choices and value not in row.described.choices:
        raise ValueError(f"{source}: must be one of {', '.join(row.described.choices)}, not {value!r}")
    if row.type in (int, float) and not row.described.least <= value < math.inf:
        raise ValueError(
            f"{source}: must be {_KINDS[row.type]} of at least {row.described.least}, not {value}"
        )
    if row.type in (int, float) and value > row.described.most:
        raise ValueError(f"{source}: must be at most {row.described.most:,}, not {value:,}")
    if row.described.check is not None:
        try:
            row.described.check(value)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None
    return tuple(value) if row.is_list else value
