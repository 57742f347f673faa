"""Tables of the command line truncate nothing on narrow terminals."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from slipstream.cli.tables import figures_table, print_table


@pytest.mark.parametrize("columns", [20, 80, 200])
def test_names_and_figures_are_not_truncated(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    table = figures_table(("worker", "state"), ("prefill tokens", "blocks held"))
    table.add_row("pool-master-0", "ready, pool unavailable", "123456", "7")
    print_table(table)
    first, second, row = capsys.readouterr().out.splitlines()
    assert first.split() == ["prefill", "blocks"]
    assert second.split() == ["worker", "state", "tokens", "held"]
    assert row.split() == ["pool-master-0", "ready,", "pool", "unavailable", "123456", "7"]


@pytest.mark.parametrize(
    ("columns", "is_terminal", "width"), [(60, True, 60), (60, False, 282), (300, True, 282)]
)
def test_a_long_first_name_is_cut_at_the_width_of_the_terminal(
    columns: int, is_terminal: bool, width: int
) -> None:
    shown = io.StringIO()
    table = figures_table(("session", "tenant"), ("blocks",))
    table.add_row("s" * 256, "acme", "123456")
    table.add_row("short", "a-long-tenant-name", "7")
    console = Console(file=shown, width=columns, force_terminal=is_terminal, color_system=None)
    print_table(table, console=console, shorten_first=True)
    lines = [line.rstrip() for line in shown.getvalue().splitlines()]
    assert max(map(len, lines)) <= width
    session, tenant, blocks = lines[1].split()
    assert (tenant, blocks) == ("acme", "123456")
    assert session == ("s" * 256 if width > 256 else "s" * (len(session) - 1) + "…")
    assert lines[2].split() == ["short", "a-long-tenant-name", "7"]
