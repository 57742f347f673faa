"""Tables of the command line truncate nothing on narrow terminals."""

from __future__ import annotations

import pytest

from slipstream.cli.tables import figures_table, print_table


@pytest.mark.parametrize("columns", [20, 80, 200])
def test_names_and_figures_are_not_truncated(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    table = figures_table(("worker", "state"), ("prefill tokens", "blocks held"))
    table.add_row("pool-master-0", "ready, pool away", "123456", "7")
    print_table(table)
    first, second, row = capsys.readouterr().out.splitlines()
    assert first.split() == ["prefill", "blocks"]
    assert second.split() == ["worker", "state", "tokens", "held"]
    assert row.split() == ["pool-master-0", "ready,", "pool", "away", "123456", "7"]
