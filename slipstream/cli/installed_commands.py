"""Commands of packages that are installed beside the SDK. One that does not load leaves the others alone."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterator
from importlib.metadata import Distribution, EntryPoint, distributions, entry_points
from typing import Any

import typer
import typer.main

from slipstream.cli.chat.harmless_text import harmless_line

# Packages that are installed beside the SDK add commands by entry points of this group, or replace them.
COMMAND_GROUP = "slipstream.commands"
# Settings of a command that only says why it does nothing.
ANY_ARGUMENTS = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
_USAGE_ERROR = 2


class BrokenCommand:
    """A command whose package does not load."""

    def __init__(self, point: EntryPoint, why: str) -> None:
        of = f"slipstream {point.name} of {_package(point.dist)}"
        self.line = harmless_line(f"{of} does not load ({point.value}): {why}")

    def explain(self) -> None:
        """Does not load: call it for the reason."""
        print(self.line, file=sys.stderr)
        raise typer.Exit(_USAGE_ERROR)


InstalledCommand = typer.Typer | Callable[..., Any] | BrokenCommand


def find_commands(groups: Collection[str]) -> dict[str, InstalledCommand]:
    """The commands of all packages by name, the first of each. stderr gets a line for each one left out.

    `groups`: names of groups of commands, which no package replaces.
    """
    found: dict[str, InstalledCommand] = {}
    for point in _points():
        if point.name in groups or point.name in found:
            owner = "slipstream" if point.name in groups else "another package"
            _warn(f"the command {point.name} of {_package(point.dist)} is left out: {owner} has one")
        else:
            found[point.name] = load_command(point)
    return found


def load_command(point: EntryPoint) -> InstalledCommand:
    """The command of an entry point, or one that says what is wrong with it."""
    try:
        command = point.load()
        if not isinstance(command, typer.Typer) and not inspect.isroutine(command):
            return BrokenCommand(point, f"a {type(command).__name__} is no function and no typer.Typer")
        _check_parameters(command)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return BrokenCommand(point, _words(error))
    return command


def add_command(app: typer.Typer, name: str, command: InstalledCommand) -> None:
    """Let the app have the command."""
    if isinstance(command, typer.Typer):
        app.add_typer(command, name=name)
    elif isinstance(command, BrokenCommand):
        app.command(name, context_settings=ANY_ARGUMENTS)(command.explain)
    else:
        app.command(name)(command)


def _check_parameters(command: typer.Typer | Callable[..., Any]) -> None:
    """Raises what Typer raises for parameters of which it makes no flags. In the app it would end all."""
    alone = typer.Typer()
    add_command(alone, "alone", command)
    typer.main.get_command(alone)


def _points() -> Iterator[EntryPoint]:
    """The entry points of the group. stderr gets a line for each package whose ones cannot be read."""
    try:
        yield from entry_points(group=COMMAND_GROUP)
        return
    except Exception:  # without the name of its package
        pass
    seen: set[str] = set()
    for package in distributions():
        name = _metadata(package, "Name")
        if name and name in seen:  # the first of the path is the one that is imported
            continue
        seen.add(name)
        try:
            yield from package.entry_points.select(group=COMMAND_GROUP)
        except Exception as error:
            _warn(f"the entry points of {_package(package)} cannot be read: {_words(error)}")


def _package(package: Distribution | None) -> str:
    """Name and version of a package, or its directory where it has no metadata."""
    if package is None:
        return "an unknown package"
    if name := _metadata(package, "Name"):
        return f"{name} {_metadata(package, 'Version')}".strip()
    return f"a package without metadata in {package.locate_file('')}"


def _metadata(package: Distribution, field: str) -> str:
    try:
        return package.metadata[field] or ""
    except Exception:  # without the file, as some versions of Python have it
        return ""


def _words(error: BaseException) -> str:
    try:
        text = str(error)
    except BaseException:  # it may raise itself
        text = "(its text cannot be read)"
    return f"{type(error).__name__}: {text}"


def _warn(line: str) -> None:
    print(harmless_line(f"slipstream: {line}"), file=sys.stderr)
