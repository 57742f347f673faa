"""Errors name a value by where it comes from: its flag, or the variable of the environment that gave it."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand

from slipstream.errors import InvalidArgument


class SourceCommand(TyperCommand):
    """A command whose errors name the variable, and not the flag, of a value that a variable gave."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Raises what it raises, with the fields of InvalidArgument by their sources."""
        try:
            return super().invoke(ctx)
        except InvalidArgument as error:
            field = _by_source(ctx, error.field)
            if field == error.field:
                raise
            raise type(error)(field, error.reason) from None


def name_sources(app: typer.Typer) -> None:
    """Let all commands of the app, and of the apps below it, be of this class."""
    for command in app.registered_commands:
        command.cls = SourceCommand
    for group in app.registered_groups:
        if group.typer_instance is not None:
            name_sources(group.typer_instance)


def _by_source(ctx: Any, field: str) -> str:
    """The field, which is a flag or a list of flags, with the variables of those that variables gave."""
    variables = {
        flag: parameter.envvar
        for parameter in ctx.command.params
        if getattr(ctx.get_parameter_source(parameter.name), "name", "") == "ENVIRONMENT"
        for flag in parameter.opts
    }
    return ", ".join(variables.get(flag, flag) for flag in field.split(", "))
