"""`slipstream route`: where a request would run in a fleet, and why. Both are read from JSON files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from libs.common.fleet_bounds import MAX_ROUTE_FILE_BYTES
from services.router.placement.decision_json import explanation
from services.router.placement.fleet_json import fleet_from_json, request_from_json
from services.router.placement.policy import place
from slipstream.cli.chat.harmless_text import harmless
from slipstream.cli.tables import cell
from slipstream.credentials.bounded_file import read_bounded
from slipstream.errors import InvalidArgument

_TERMS = (
    "queue_ms",
    "prefill_ms",
    "load_ms",
    "transfer_ms",
    "decode_queue_ms",
    "step_ms",
    "others_ms",
    "region_ms",
    "total_ms",
)


def show_route(fleet_path: Path, request_path: Path, *, as_json: bool) -> None:
    """Print candidates, terms and the choice.

    Raises InvalidArgument, and Unavailable when no worker can run the request.
    """
    decision = place(
        request_from_json(_read(request_path, "request")), fleet_from_json(_read(fleet_path, "fleet"))
    )
    shown = explanation(decision)
    if as_json:
        print(json.dumps(shown, indent=2))
        return
    console = Console(width=200, highlight=False)
    console.print(_table(shown))
    console.print(harmless(_choice(shown)), markup=False)


def _table(shown: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("", "part", "worker", "held", "loads", "computes"):
        justify: Literal["left", "right"] = "left" if heading in ("", "part", "worker") else "right"
        table.add_column(heading, justify=justify, no_wrap=True)
    for term in _TERMS:
        table.add_column(term.removesuffix("_ms").replace("_", " ") + " ms", justify="right")
    table.add_column("refused", min_width=30)
    chosen = {("prefill", shown["prefill"]), ("decode" if shown["prefill"] else "local", shown["decode"])}
    for row in shown["candidates"]:
        loads = f"{row['loaded_tokens']} from {row['source']}" if row["source"] else ""
        table.add_row(
            "*" if (row["part"], row["instance"]) in chosen else "",
            row["part"],
            cell(row["instance"]),
            str(row["held_tokens"] or ""),
            cell(loads),
            str(row["uncached_tokens"] or ""),
            *(f"{row['cost'][term]:.1f}" if row["cost"][term] else "" for term in _TERMS),
            cell(row["refused"]),
        )
    return table


def _choice(shown: dict[str, Any]) -> str:
    terms = [f"{name.removesuffix('_ms')} {value:.1f}" for name, value in shown["cost"].items() if value]
    where = f"prefill {shown['prefill']}, decode {shown['decode']}" if shown["prefill"] else shown["decode"]
    reasons = shown["reason"].replace("; ", "\n")
    return (
        f"\n{where}; KV from {shown['source']}, {shown['cached_tokens']} tokens cached, "
        f"{shown['uncached_tokens']} to compute{'; cold' if shown['cold'] else ''}\n"
        f"{reasons}\nmilliseconds: {', '.join(terms)}"
    )


def _read(path: Path, name: str) -> Any:
    try:
        return json.loads(read_bounded(path, max_bytes=MAX_ROUTE_FILE_BYTES).decode("utf-8-sig"))
    except OSError as error:
        raise InvalidArgument(name, f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(name, f"{path} is not JSON: {error}") from None
