from __future__ import annotations

import pytest

from supervisor.start_problems import StartProblems, without_origin

TEXT = "{0} | 2026-01-01T00:00:00.{1}Z ERROR decode/{0} libs.x: {0} cannot start: model {2} is no model"
JSON = '{0} | {{"time":"2026-01-01T00:00:00.{1}Z","level":"error","instance":"{0}","message":"{0}: no {2}"}}'


@pytest.mark.parametrize("form", [TEXT, JSON])
def test_what_several_processes_log_is_said_once_until_the_start(form: str) -> None:
    said: list[str] = []
    problems = StartProblems(said.append)
    first, second, other = (
        form.format("decode-0", "001", "a"),
        form.format("decode-1", "250", "a"),
        form.format("decode-1", "250", "b"),
    )
    for line in (first, second, other, "lines are missing in logs: No space left"):
        problems(line)
    assert said == [first, other, "lines are missing in logs: No space left"]
    problems.started()
    problems(second)
    problems(second)
    assert said[3:] == [second, second]


def test_only_the_names_of_the_process_itself_are_no_part_of_the_meaning() -> None:
    line = TEXT.format("decode-1", "001", "decode-11")
    assert without_origin(line) == "ERROR  libs.x:  cannot start: model decode-11 is no model"
