"""The examples of the SDK say in one line why they cannot run. Elsewhere they run on a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes.command_forks import CommandForks

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "python").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
async def test_a_wrong_address_is_named_in_one_line(commands: CommandForks, example: Path) -> None:
    done = await commands.run_file(example, "no-port")
    assert (done.exit_code, done.output) == (1, "")
    assert done.errors == f"{example}: endpoint: must be HOST:PORT, not 'no-port'\n"
