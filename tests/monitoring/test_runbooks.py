"""Each alert has a runbook, whose commands, flags and metrics exist."""

from __future__ import annotations

import re
import shlex

import pytest
import typer.main

from slipstream.cli.app import build_app
from tests.monitoring.rules import MONITORING, ROOT, alerts, load_yaml, unknown_names

PAGE = (ROOT / "docs" / "runbooks.md").read_text()
PARTS = ["Users", "Look", "Do"]


def sections() -> dict[str, str]:
    """The text below each heading by heading."""
    _, *found = re.split(r"^## (\w+)\n", PAGE, flags=re.MULTILINE)
    return dict(zip(found[::2], found[1::2], strict=True))


def check_command(line: str) -> None:
    """Raises AssertionError unless a command of `slipstream` and its flags exist."""
    _, *words = shlex.split(line)
    command = typer.main.get_command(build_app())
    while words and (subcommands := getattr(command, "commands", {})):
        name = words.pop(0)
        assert name in subcommands, line
        command = subcommands[name]
    flags = {flag for parameter in command.params for flag in parameter.opts}
    for word in words:
        assert not word.startswith("-") or word in flags, f"{line}: {word}"


def test_each_alert_has_a_section_and_links_to_it() -> None:
    names = [rule["alert"] for rule in alerts()]
    assert list(sections()) == names
    for rule in alerts():
        assert rule["annotations"]["runbook"] == f"docs/runbooks.md#{rule['alert'].lower()}"


@pytest.mark.parametrize("name", sections())
def test_a_section_has_every_part_and_a_command(name: str) -> None:
    text = sections()[name]
    found = re.findall(r"^\*\*(\w+)\.\*\* \S", text, flags=re.MULTILINE)
    assert found in (PARTS, [*PARTS, "Cause"])
    looks, _ = text.split("\n**Do.**")
    (commands,) = re.findall(r"```\n(.+?)```", looks, flags=re.DOTALL)
    assert all(line.startswith(("slipstream ", "kubectl ")) for line in commands.splitlines())


def test_commands_of_slipstream_exist() -> None:
    lines = re.findall(r"^slipstream .+$", PAGE, flags=re.MULTILINE)
    lines += re.findall(r"\$\((slipstream [^)]+)\)", PAGE) + re.findall(r"`(slipstream [^`]+)`", PAGE)
    assert len(lines) > 10
    for line in lines:
        check_command(line)
    for wrong in ("slipstream explode", "slipstream kv stat --colour", "slipstream status --now"):
        with pytest.raises(AssertionError):
            check_command(wrong)


@pytest.mark.parametrize("name", ["SlipstreamCorruptBlocks", "SlipstreamMemoryLost", "SlipstreamKvFull"])
def test_panels_that_say_which_of_several_things_happened_show_each(name: str) -> None:
    _, look = sections()[name].split("**Look.**")
    named = set(re.findall(r'"([^"]+)"', look.split("**Do.**")[0]))
    rows = [row for page in load_yaml(MONITORING / "panels.yaml").values() for row in page["rows"].values()]
    panels = [panel for row in rows for panel in row if panel["title"] in named]
    shown = {f"slipstream_{metric}" for panel in panels for metric in panel["metrics"]}
    (expression,) = [rule["expr"] for rule in alerts() if rule["alert"] == name]
    read = {re.sub(r"_(bucket|count)$", "", metric) for metric in re.findall(r"slipstream_\w+", expression)}
    assert read and read <= shown


def test_metrics_of_the_page_exist() -> None:
    assert not list(unknown_names(PAGE.replace('"', "")))
