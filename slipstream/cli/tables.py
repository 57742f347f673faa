"""Tables of names and figures that are whole on any terminal, and in a pipe."""

from __future__ import annotations

from collections.abc import Iterable

from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape, render
from rich.measure import Measurement
from rich.table import Table

from slipstream.cli.chat.harmless_text import harmless_line

_MIN_NAME_WIDTH = 16


def figures_table(names: Iterable[str], figures: Iterable[str]) -> Table:
    """No rows yet. The words of a heading stand above each other, and figures set the width."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in names:
        table.add_column(heading, no_wrap=True, vertical="bottom")
    for heading in figures:
        table.add_column(heading.replace(" ", "\n"), justify="right", no_wrap=True)
    return table


def cell(text: str) -> str:
    """A cell with text of others: one line that neither a terminal nor rich obeys."""
    return escape(harmless_line(text))


def print_table(table: Table, *, console: Console | None = None, shorten_first: bool = False) -> None:
    """Print it with nothing left out; a terminal that is too narrow breaks the lines.

    `shorten_first`: on a terminal, cut the names of the first column where the lines would be too long.
    """
    console = console or Console()
    excess = _width(table, console) - console.width
    if shorten_first and console.is_terminal and excess > 0:
        first = table.columns[0]
        natural = max(cell_len(render(str(cell)).plain) for cell in first.cells)
        first.max_width = max(natural - excess, _MIN_NAME_WIDTH)
    console.width = max(_width(table, console), console.width)
    console.print(table)


def _width(table: Table, console: Console) -> int:
    return Measurement.get(console, console.options.update(max_width=10_000), table).maximum
