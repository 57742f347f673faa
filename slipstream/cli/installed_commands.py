"""Commands of packages that are installed beside the SDK. One that does not load leaves the others alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from typing import Any

import typer

from slipstream.cli.chat.harmless_text import harmless_line

# Settings of a command that only says why it does nothing.
ANY_ARGUMENTS = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
_USAGE_ERROR = 2


class BrokenCommand:
    """A command whose package does not load."""

    def __init__(self, point: EntryPoint, why: str) -> None:
        package = f" of {point.dist.name} {point.dist.version}" if point.dist is not None else ""
        self.line = harmless_line(f"slipstream {point.name}{package} does not load ({point.value}): {why}")

    def explain(self) -> None:
        """Does not load: call it for the reason."""
        print(self.line, file=sys.stderr)
        raise typer.Exit(_USAGE_ERROR)


def load_command(point: EntryPoint) -> typer.Typer | Callable[..., Any] | BrokenCommand:
    """The command of an entry point, or one that says what is wrong with it."""
    try:
        command = point.load()
    except (Exception, SystemExit) as error:
        return BrokenCommand(point, f"{type(error).__name__}: {error}")
    if not callable(command):
        return BrokenCommand(point, f"a {type(command).__name__} is no command")
    return command  # type: ignore[no-any-return]
