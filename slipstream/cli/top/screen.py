"""The fleet view as lines of a terminal of any size. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from slipstream.cli.chat.harmless_text import harmless_line
from slipstream.cli.top.rows import FleetRows, ProcessRow, TierRow, sorted_rows

MIN_NAME, MAX_NAME = 12, 48
# Heading and width of the columns right of name and state.
_COLUMNS = (("run", 5), ("wait", 5), ("KV", 4), ("in/s", 7), ("out/s", 7), ("step", 6), ("busy", 4))
_STATE_WIDTH = 8
_FIGURES_WIDTH = _STATE_WIDTH + sum(width + 1 for _, width in _COLUMNS)
_STYLES = {"silent": "bold red", "draining": "yellow"}
KEYS = "q quit  p pause  s sort  arrows choose  d drain  u undrain"


@dataclass(frozen=True, slots=True)
class DrainQuestion:
    """The question to the user before a process is drained or takes work again."""

    row: ProcessRow
    drains: bool  # False: undrains

    @property
    def words(self) -> str:
        """The question, on one line."""
        verb = "Drain" if self.drains else "Undrain"
        runs = f", which runs {self.row.running:.0f}" if self.drains and self.row.running is not None else ""
        return f"{verb} {self.row.instance}{runs}? y yes, any other key no"


@dataclass(frozen=True, slots=True)
class ScreenState:
    """The choices of the user, and the state of the view. `trouble`: why no router answers, "" = one does."""

    endpoint: str
    time_text: str
    sort: str = "tier"
    is_paused: bool = False
    trouble: str = ""
    offset: int = 0  # the first process that is shown
    chosen: str = ""  # the key of a process
    question: DrainQuestion | None = None
    note: str = ""  # what came of the last answer, until a key is pressed


def screen_lines(view: FleetRows | None, state: ScreenState, *, width: int, height: int | None) -> list[Text]:
    """The lines of a screen; with `height` None all of them, without keys."""
    lines = _heading(view, state)
    if view is not None:
        rows = sorted_rows(view.processes, state.sort)
        name_width = _name_width([row.instance for row in rows], width)
        lines += [Text(), _titles("tier", "ready", name_width)]
        lines += [_tier_line(tier, name_width) for tier in view.tiers]
        lines += [Text(), _titles("process", "state", name_width)]
        shown = rows if height is None else rows[state.offset : state.offset + _room(lines, height)]
        lines += [_process_line(row, name_width, chosen=row.key == state.chosen) for row in shown]
        if height is not None:
            where = f"  {state.offset + 1}-{state.offset + len(shown)} of {len(rows)}"
            lines = _with_footer(lines, state, where if len(shown) < len(rows) else "", height)
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines


def last_offset(view: FleetRows | None, *, height: int) -> int:
    """The greatest useful `offset`."""
    return 0 if view is None else max(0, len(view.processes) - shown_processes(view, height=height))


def shown_processes(view: FleetRows | None, *, height: int) -> int:
    """How many processes a screen shows."""
    return 1 if view is None else max(1, height - len(view.tiers) - 7)


def _room(lines: Sequence[Text], height: int) -> int:
    return max(1, height - len(lines) - 1)


def _with_footer(lines: list[Text], state: ScreenState, where: str, height: int) -> list[Text]:
    """The keys, or what the user is asked or has to know."""
    footer = Text(f"{KEYS}{where}", style="dim")
    if state.question is not None:
        footer = Text(state.question.words, style="bold yellow")
    elif state.note:
        footer = Text(harmless_line(state.note), style="bold")
    padding = [Text()] * max(0, height - len(lines) - 1)
    return [*lines, *padding, footer][-max(height, 1) :]


def _heading(view: FleetRows | None, state: ScreenState) -> list[Text]:
    paused = f"  by {state.sort}" + ("  paused" if state.is_paused else "")
    if view is None:
        title = Text(f"slipstream top  {state.endpoint}  {state.time_text}{paused}", style="bold")
        return [
            title,
            Text(harmless_line(state.trouble) or "asks a router", style="bold red" if state.trouble else ""),
        ]
    title = Text(f"{view.model}  {view.router} at {state.endpoint}  {state.time_text}{paused}", style="bold")
    if state.trouble:
        return [title, Text(f"no answer, asks again: {harmless_line(state.trouble)}", style="bold red")]
    missing = Text("" if view.has_decode else "no decode worker is ready; ", style="bold red")
    return [title, missing.append(Text(_requests(view), style="not bold default"))]


def _requests(view: FleetRows) -> str:
    """The requests of all routers together."""
    total = next((tier.total for tier in view.tiers if tier.tier == "router"), None)
    if total is None or total.running is None:
        return "no router reports its requests"
    jobs = ""
    if total.jobs_waiting or total.jobs_running:
        jobs = f"; jobs {_count(total.jobs_running)} running, {_count(total.jobs_waiting)} queued"
    return (
        f"requests {total.running} running, {total.waiting} queued, {total.requests_per_s or 0:.1f}/s; "
        f"tokens {_count(total.prompt_tokens_per_s)}/s in, {_count(total.generated_tokens_per_s)}/s out{jobs}"
    )


def _name_width(names: Sequence[str], width: int) -> int:
    longest = max(map(len, names), default=MIN_NAME)
    return max(MIN_NAME, min(longest, MAX_NAME, width - _FIGURES_WIDTH - 1))


def _titles(name: str, state: str, name_width: int) -> Text:
    cells = [f"{name:<{name_width}.{name_width}}", f"{state:<{_STATE_WIDTH}}"]
    cells += [f"{title:>{width}}" for title, width in _COLUMNS]
    return Text(" ".join(cells), style="bold underline")


def _tier_line(tier: TierRow, name_width: int) -> Text:
    return _line(tier.tier, f"{tier.ready}/{tier.processes}", tier.total, name_width)


def _process_line(row: ProcessRow, name_width: int, *, chosen: bool) -> Text:
    line = _line(row.instance, row.state, row, name_width)
    if style := _STYLES.get(row.state):
        line.stylize(style)
    if chosen:
        line.stylize("reverse")
    return line


def _line(name: str, state: str, row: ProcessRow, name_width: int) -> Text:
    figures = (
        _count(row.running),
        _count(row.waiting),
        _percent(row.kv_share),
        _count(row.prompt_tokens_per_s),
        _count(row.generated_tokens_per_s),
        "-" if row.step_ms is None else f"{row.step_ms:.{0 if row.step_ms >= 100 else 1}f}",
        _percent(row.busy_share),
    )
    short = name if len(name) <= name_width else f"{name[: name_width - 1]}…"
    cells = [f"{short:<{name_width}}", f"{state:<{_STATE_WIDTH}.{_STATE_WIDTH}}"]
    cells += [f"{text:>{width}}" for text, (_, width) in zip(figures, _COLUMNS, strict=True)]
    return Text(" ".join(cells))


def _count(value: float | None) -> str:
    """The count in at most five characters: 999, 12.3k, 4.5M."""
    if value is None:
        return "-"
    if value < 1_000:
        return f"{value:.0f}"
    if value < 99_950:
        return f"{value / 1e3:.1f}k"
    return f"{value / 1e6:.1f}M"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share * 100:.0f}%"
