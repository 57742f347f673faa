"""The configuration file of a cluster: TOML with a section for each service, the same for all of them.

    [common]                 # settings of every service, and those of SHARED_NAMES where a service has them
    [router]                 # settings of routers; they go before [common]
    [prefill] [decode] [kvstore] [drafter]
    [up]                     # flags of `slipstream up`, which services skip

A path to a directory stands for its files *.toml in the order of their names; a later one overrides.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from libs.common.runtime.process_settings import ServiceSettings
from libs.common.runtime.settings import Row, checked_value, rows, typed_value
from libs.common.service_bounds import MAX_CONFIGURATION_BYTES

COMMON, UP = "common", "up"
SERVICE_SECTIONS = ("router", "prefill", "decode", "kvstore", "drafter")
SECTIONS = (COMMON, *SERVICE_SECTIONS, UP)
_ALL_SECTIONS = ", ".join(f"[{each}]" for each in SECTIONS)
# Settings of several services that [common] may hold, beside those of every service.
SHARED_NAMES = ("model", "draft_model", "engine", "threads", "region", "transport")

Sections = Mapping[str, Mapping[str, Any]]


def read_sections(path: Path) -> Sections:
    """The sections of the file, or of all files of a directory. Raises ValueError."""
    merged: dict[str, dict[str, Any]] = {}
    for file in files_of(path):
        for section, values in _sections_of(file):
            merged.setdefault(section, {}).update(values)
    return merged


class PathUnusable(ValueError):
    """A setting of the file names a path that cannot be used on this machine."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(text)
        self.name = name  # of the setting


def file_values(
    kind: type[Any],
    sections: Sections,
    section: str,
    *,
    checks_files: bool = True,
    overridden: Collection[str] = (),
) -> dict[str, tuple[Any, str]]:
    """(value, section) of each setting that the file has for a service. Raises ValueError.

    Without `checks_files` nothing is asked of paths, which may be of another machine. `overridden`: settings
    whose paths nothing uses.
    """
    known = {name: row for name, row in rows(kind).items() if not row.described.is_hidden}
    common = common_names()
    check_names(COMMON, sections.get(COMMON, {}), common, elsewhere={section: known})
    check_names(section, sections.get(section, {}), known)
    found: dict[str, tuple[Any, str]] = {}
    for name in (COMMON, section):
        for key, value in sections.get(name, {}).items():
            if key in known:
                checks = checks_files and key not in overridden
                found[key] = (_value(known[key], name, value, checks_files=checks), name)
    return found


def common_names() -> frozenset[str]:
    """The keys that [common] may have."""
    return frozenset((*rows(ServiceSettings), *SHARED_NAMES))


def check_names(
    section: str,
    names: Collection[str],
    known: Collection[str],
    *,
    elsewhere: Mapping[str, Collection[str]] | None = None,
) -> None:
    """Raises ValueError for the first name that is not known, with the likeliest one that is meant.

    `elsewhere`: names that another section takes, by section.
    """
    for name in names:
        if name in known:
            continue
        for other, theirs in (elsewhere or {}).items():
            if name in theirs:
                raise ValueError(f"[{section}] {name}: not every service has it: put it into [{other}]")
        raise ValueError(f"[{section}] no setting is named {name}{_meant(name, known)}")


def files_of(path: Path) -> list[Path]:
    """The file itself, or all files of a directory. Raises ValueError without any."""
    if not path.is_dir():
        return [path]
    # A ConfigMap's directory has hidden folders beside the names of its keys.
    files = sorted(file for file in path.glob("*.toml") if not file.name.startswith("."))
    if not files:
        raise ValueError(f"{path} has no file *.toml")
    return files


def _sections_of(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        document = tomllib.loads(_text_of(file))
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None
    except RecursionError:
        raise ValueError(f"{file} is nested too deep") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{file} is not TOML: {error}") from None
    for name, values in document.items():
        if name not in SECTIONS and isinstance(values, dict):
            raise ValueError(f"{file}: no section is named [{name}]{_meant_section(name)}")
        if not isinstance(values, dict):
            raise ValueError(f"{file}: {name} stands outside of a section; there are " + _ALL_SECTIONS)
        yield name, values


def _text_of(file: Path) -> str:
    # What is no file, such as a pipe, may have no end, or wait for a writer.
    if file.exists() and not file.is_file():
        raise ValueError(f"{file} is not a file")
    with file.open("rb") as stream:
        data = stream.read(MAX_CONFIGURATION_BYTES + 1)
    if len(data) > MAX_CONFIGURATION_BYTES:
        raise ValueError(f"{file} has more than {MAX_CONFIGURATION_BYTES} bytes")
    return data.decode("utf-8-sig")


def _value(row: Row, section: str, value: Any, *, checks_files: bool) -> Any:
    key = f"[{section}] {row.name}"
    if row.is_list and not isinstance(value, list):
        raise ValueError(f"{key}: must be a list")
    typed = [typed_value(row, key, part) for part in (value if row.is_list else [value])]
    given = typed if row.is_list else typed[0]
    if row.type is not Path:
        return checked_value(row, key, given)
    if not checks_files:
        return tuple(typed) if row.is_list else given
    try:
        return checked_value(row, key, given)
    except ValueError as error:
        raise PathUnusable(row.name, str(error)) from None


def _meant(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name.replace("-", "_"), sorted(known), n=1)
    return f"; is {near[0]} meant?" if near else ""


def _meant_section(name: str) -> str:
    """The section that looks most like the name, or all of them."""
    near = difflib.get_close_matches(name, SECTIONS, n=1, cutoff=0.7)
    return f"; is {near[0]} meant?" if near else f"; there are {_ALL_SECTIONS}"
