"""Names and errors that others choose, in every command that prints them: no terminal obeys them."""

from __future__ import annotations

import io
import json
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import slipstream
import supervisor
from slipstream.cli import app as command_line
from slipstream.cli import usage
from slipstream.cli.jobs.progress import print_document, print_jobs
from slipstream.cli.status import _table, print_troubles, status_dict
from slipstream.cli.tables import cell, figures_table, print_table
from slipstream.cli.top.screen import ScreenState, screen_lines
from slipstream.errors import Unavailable
from slipstream.jobs.messages import SubmittedJob
from slipstream.metering.usage import UsageRecord
from slipstream.v1 import worker_pb2
from supervisor.commands import status

# It reverses what follows, begins a sequence as one character and as two, and is markup for rich.
EVIL = "a\u202eb\x9bc\x1b[31md[bold]e\nf"
SHOWN = "a\ufffdb\ufffdc\u241b[31md[bold]e f"


def test_a_cell_obeys_nothing() -> None:
    table = figures_table(("name",), ())
    table.add_row(cell(EVIL))
    out = io.StringIO()
    print_table(table, console=Console(file=out, width=80, force_terminal=True, color_system=None))
    assert out.getvalue().splitlines()[1].rstrip() == SHOWN


def test_status_shows_sessions_and_troubles(capsys: pytest.CaptureFixture[str]) -> None:
    row = dict.fromkeys(("session", "tenant", "prefill", "decode", "kvstore"), EVIL)
    status._print_sessions([{**row, "block_count": 1, "epoch": 2}])
    print_troubles({"decode-0": EVIL})
    check(capsys.readouterr().out, count=6)


def test_status_shows_what_processes_call_themselves(capsys: pytest.CaptureFixture[str]) -> None:
    said = worker_pb2.GetStatusResponse(instance=EVIL, load=worker_pb2.LoadReport())
    print_table(_table([EVIL], [status_dict(said)]))
    check(capsys.readouterr().out, count=2)


def test_jobs_shows_references(capsys: pytest.CaptureFixture[str]) -> None:
    print_jobs([job()])
    check(capsys.readouterr().out, count=2)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_an_answer_is_harmless_on_a_terminal_and_whole_in_a_pipe(
    is_terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal)
    print_document({"answer": {"text": EVIL}})
    out = capsys.readouterr().out
    assert is_terminal == ("\u202e" not in out) == ("\x9b" not in out)
    if not is_terminal:
        assert json.loads(out)["answer"]["text"] == EVIL


def test_usage_shows_names(capsys: pytest.CaptureFixture[str]) -> None:
    usage._show([UsageRecord("", EVIL, EVIL, "", "", 1, 2, 3, 4, Decimal(0), "")], ["tenant", "key"])
    check(capsys.readouterr().out, count=2)


def test_top_shows_troubles() -> None:
    state = ScreenState("router:1", "now", trouble=EVIL, note=EVIL)
    lines = [line.plain for line in screen_lines(None, state, width=200, height=20)]
    check("\n".join(lines), count=1)


def test_an_error_of_a_server_obeys_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**_: Any) -> None:
        raise Unavailable(EVIL)

    monkeypatch.setattr(command_line, "app", fail)
    with pytest.raises(SystemExit):
        command_line.run()
    assert capsys.readouterr().err == f"slipstream: {SHOWN[:-2]}\nf\n"


def test_every_table_takes_its_texts_through_cell() -> None:
    """`escape` of rich.markup alone leaves what a terminal obeys."""
    found = [
        path.name
        for package in (slipstream, supervisor)
        for path in sorted(Path(str(package.__file__)).parent.rglob("*.py"))
        if re.search(r"from rich\.markup import .*\bescape\b", path.read_text(encoding="utf-8"))
    ]
    assert found == ["tables.py"]


def job() -> SubmittedJob:
    return SubmittedJob("job-1", "failed", "/v1", EVIL, EVIL, 1, 400, "", 0, 1.0, 1.0, 2.0, 3.0)


def check(out: str, *, count: int) -> None:
    """Each text is shown, and none of its control characters is left."""
    assert out.count(SHOWN) == count, out
    assert not set(out) & set("\u202e\x9b\x1b")
