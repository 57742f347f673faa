from __future__ import annotations

import asyncio
import errno
import json
import os
import sys
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from supervisor.logs import ProcessLogs


async def copy(book: ProcessLogs, instance: str, *chunks: bytes) -> None:
    stream = asyncio.StreamReader()
    copying = asyncio.create_task(book.copy(instance, stream))
    for chunk in chunks:
        stream.feed_data(chunk)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    stream.feed_eof()
    await copying


async def test_lines_are_whole_however_they_arrive(tmp_path: Path) -> None:
    book = ProcessLogs(tmp_path, on_problem=print)
    await copy(book, "a-0", b"fi", b"rst\nsecond\nth", b"ird")
    await copy(book, "b-0", b"\xff\n", b"x" * 200_000)
    await copy(book, "c-0")
    book.close()
    assert (tmp_path / "a-0.log").read_bytes() == b"first\nsecond\nthird\n"
    combined = (tmp_path / "cluster.log").read_bytes().split(b"\n")
    assert combined[:4] == [
        b"a-0        | first",
        b"a-0        | second",
        b"a-0        | third",
        b"b-0        | \xff",
    ]
    assert (tmp_path / "b-0.log").read_bytes().replace(b"\n", b"") == b"\xff" + b"x" * 200_000
    assert book.tail("a-0") == "first\nsecond\nthird"
    assert book.tail("c-0") == ""


async def test_errors_go_to_the_terminal_and_the_rest_does_not(tmp_path: Path) -> None:
    problems: list[str] = []
    book = ProcessLogs(tmp_path, on_problem=problems.append)
    await copy(
        book,
        "a-0",
        b"2026-01-01T00:00:00.000Z INFO decode/a-0 libs.x: ERROR is only a word here\n"
        b"2026-01-01T00:00:00.000Z ERROR decode/a-0 libs.x: it broke\n"
        b'{"level":"warn","msg":"slow"}\n{"level":"fatal","msg":"no disk"}\n',
    )
    assert book.ends_with_problem("a-0")
    await copy(book, "a-0", b"and why\n")
    assert not book.ends_with_problem("a-0")
    assert not book.ends_with_problem("never-wrote")
    book.close()
    assert problems == [
        "a-0 | 2026-01-01T00:00:00.000Z ERROR decode/a-0 libs.x: it broke",
        'a-0 | {"level":"fatal","msg":"no disk"}',
    ]


@pytest.mark.parametrize("form", ["text", "json"])
async def test_errors_of_a_process_are_found_in_each_form_of_its_lines(tmp_path: Path, form: str) -> None:
    code = (
        "import logging, sys; from libs.common.telemetry.logs import configure_logging\n"
        "configure_logging('decode', 'decode-0', form=sys.argv[1])\n"
        "log = logging.getLogger('x')\n"
        """log.warning('"level":"error" is only a text'); log.error('it broke')\n"""
        "raise ValueError('a-secret')\n"
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code, form), stderr=asyncio.subprocess.PIPE
    )
    problems: list[str] = []
    book = ProcessLogs(tmp_path, on_problem=problems.append)
    assert process.stderr is not None
    await book.copy("decode-0", process.stderr)
    await process.wait()
    book.close()
    assert len(problems) == 2
    assert "it broke" in problems[0] and "the process ends by an exception" in problems[1]
    text = (tmp_path / "decode-0.log").read_text()
    assert "is only a text" in text and "ValueError" in text and "a-secret" not in text


async def test_each_line_of_a_json_log_is_an_object_that_names_its_process(tmp_path: Path) -> None:
    book = ProcessLogs(tmp_path, on_problem=lambda line: None, is_json=True)
    await copy(book, "decode-0", b'{"level":"info","instance":"decode-0"}\nnot {JSON}\n')
    await copy(book, "etcd", b'{"level":"info","msg":"ready"}\n')
    book.close()
    lines = [json.loads(line) for line in (tmp_path / "cluster.log").read_text().splitlines()]
    assert [line["instance"] for line in lines] == ["decode-0", "decode-0", "etcd"]
    assert (lines[1]["message"], lines[2]["msg"]) == ("not {JSON}", "ready")
    assert (tmp_path / "etcd.log").read_text() == '{"level":"info","msg":"ready"}\n'


async def test_the_logs_of_the_run_before_are_kept(tmp_path: Path) -> None:
    for text in (b"one", b"two"):
        book = ProcessLogs(tmp_path, on_problem=print)
        await copy(book, "a-0", text)
        book.close()
    assert (tmp_path / "a-0.log").read_bytes() == b"two\n"
    assert (tmp_path / "a-0.log.1").read_bytes() == b"one\n"


class Slow(FileIO):
    """Takes a few bytes at a time, as files may."""

    def write(self, data: Any) -> int:
        return super().write(bytes(data[:3]))


async def test_lines_are_whole_where_a_part_is_written_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "open", lambda path, mode, buffering: Slow(path, mode))
    book = ProcessLogs(tmp_path, on_problem=print)
    await copy(book, "a-0", b"the first\nand another\n")
    book.close()
    monkeypatch.undo()
    assert (tmp_path / "a-0.log").read_bytes() == b"the first\nand another\n"
    assert (tmp_path / "cluster.log").read_bytes() == b"a-0        | the first\na-0        | and another\n"


async def test_a_full_disk_costs_lines_and_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems: list[str] = []
    book = ProcessLogs(tmp_path, on_problem=problems.append)
    monkeypatch.setattr(book, "path", lambda name: Path("/dev/full") if name == "a-0" else tmp_path / name)
    monkeypatch.setattr(Path, "replace", lambda *names: None)  # /dev/full stays what it is
    await copy(book, "a-0", b"one\ntwo\n", b"2026-01-01T00:00:00.000Z ERROR decode/a-0 libs.x: it broke\n")
    full = os.strerror(errno.ENOSPC)
    assert problems == [
        f"lines are missing in {tmp_path}: {full}",
        "a-0 | 2026-01-01T00:00:00.000Z ERROR decode/a-0 libs.x: it broke",
    ]
    assert book.tail("a-0").startswith("one\ntwo\n2026")
    await copy(book, "b-0", b"kept\n")
    assert (tmp_path / "b-0").read_bytes() == b"kept\n"
    await copy(book, "a-0", b"three\n")
    assert problems[2:] == [
        f"lines are missing in {tmp_path}: {full}"
    ]  # again, after a time without the problem
    book.close()


async def test_a_file_that_reaches_its_size_is_rotated_between_lines(tmp_path: Path) -> None:
    book = ProcessLogs(tmp_path, on_problem=print, max_bytes=100, n_files=3)
    for number in range(40):
        await copy(book, "a-0", b"line %02d\n" % number)
    book.close()
    kept = [(tmp_path / name).read_bytes() for name in ("a-0.log.2", "a-0.log.1", "a-0.log")]
    assert [len(text) for text in kept] == [96, 96, 32]
    assert b"".join(kept) == b"".join(b"line %02d\n" % number for number in range(12, 40))
    # The file of all processes, whose lines are longer, is bounded in the same way.
    sizes = {entry.name: entry.stat().st_size for entry in os.scandir(tmp_path)}
    assert {"cluster.log", "cluster.log.1", "cluster.log.2"} < set(sizes)
    assert len(sizes) == 6 and max(sizes.values()) <= 100


async def test_one_file_of_each_log_keeps_the_newest_lines(tmp_path: Path) -> None:
    book = ProcessLogs(tmp_path, on_problem=print, max_bytes=20, n_files=1)
    await copy(book, "a-0", b"the first\n")
    await copy(book, "a-0", b"the second\n")
    book.close()
    assert (tmp_path / "a-0.log").read_bytes() == b"the second\n"
    assert sorted(os.listdir(tmp_path)) == ["a-0.log", "cluster.log"]


async def test_a_rotation_that_fails_loses_no_older_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems: list[str] = []
    book = ProcessLogs(tmp_path, on_problem=problems.append, max_bytes=20, n_files=3)
    await copy(book, "a-0", b"the first line\n")
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def refuse(path: Path, mode: str, buffering: int) -> FileIO:
        raise full

    monkeypatch.setattr(Path, "open", refuse)
    for number in range(5):
        await copy(book, "a-0", b"%d is written?\n" % number)
    monkeypatch.undo()
    book.close()
    assert problems[0] == f"lines are missing in {tmp_path}: {full.strerror}"
    assert (tmp_path / "a-0.log.1").read_bytes().startswith(b"the first line\n")
