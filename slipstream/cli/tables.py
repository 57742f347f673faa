"""Tables of names and figures that are whole on any terminal, and in a pipe."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table


def figures_table(names: Iterable[str], figures: Iterable[str]) -> Table:
    """No rows yet. The words of a heading stand above each other, and figures set the width."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in names:
        table.add_column(heading, no_wrap=True, vertical="bottom")
    for heading in figures:
        table.add_column(heading.replace(" ", "\n"), justify="right", no_wrap=True)
    return table


def print_table(table: Table) -> None:
    """Print it with nothing left out; a terminal that is too narrow breaks the lines."""
    console = Console()
    needed = Measurement.get(console, console.options.update(max_width=10_000), table).maximum
    Console(width=max(needed, console.width)).print(table)
