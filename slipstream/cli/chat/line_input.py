"""Lines that the user types: with editing and history in a terminal, plain ones from a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable

from slipstream.cli.chat.commands import COMMANDS

Ask = Callable[[str], str]


def line_reader() -> Ask:
    """A function that shows a prompt and returns a line. It raises EOFError at the end of the input."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return input
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.formatted_text import FormattedText
    from prompt_toolkit.history import InMemoryHistory

    # Words at the start of a line only: "/" within a sentence offers nothing.
    words = WordCompleter([name.split()[0] for name in COMMANDS], sentence=True)
    session: PromptSession[str] = PromptSession(
        history=InMemoryHistory(), completer=words, complete_while_typing=False
    )
    return lambda prompt: session.prompt(FormattedText([("", prompt)]))
