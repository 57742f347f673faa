"""Write docs/configuration.md from the settings classes of the services.

python scripts/gen_configuration.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from libs.common.runtime.process_settings import ServiceSettings, TierSettings
from libs.common.runtime.settings import Row, rows
from libs.worker.process.settings import EngineSettings, WorkerSettings
from services.decode.settings import DecodeSettings
from services.kvstore.settings import NodeSettings
from services.router.settings import RouterSettings

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
_HEAD = """# Configuration

Made from the settings classes by `python scripts/gen_configuration.py`; do not edit.

Each service runs as `python -m services.NAME`. Each setting has a flag, an environment variable and a key of
the TOML file that `--config` (or SLIPSTREAM_CONFIG) names:

| Flag | Environment | File |
|---|---|---|
| `--max-batch 32` | `SLIPSTREAM_MAX_BATCH=32` | `max_batch = 32` |
| `--allow-pinning`, `--no-allow-pinning` | `SLIPSTREAM_ALLOW_PINNING=true` | `allow_pinning = true` |
| `--disk /a --disk /b` | `SLIPSTREAM_DISK=/a,/b` | `disk = ["/a", "/b"]` |

A flag overrides the environment, the environment the file, the file the default. A service refuses to start
with an unknown key of its file, and names it, so each role has its own file. It ignores unknown variables.
Secrets are in files, and settings have their paths.

`slipstream up` passes neither variables nor a file to its services (`deploy/local/README.md`).
"""
_TYPES = {bool: "switch", int: "whole number", float: "number", str: "text", Path: "path"}
_SECTIONS: tuple[tuple[str, type[Any]], ...] = (
    ("All services", ServiceSettings),
    ("prefill, decode, drafter, kvstore", TierSettings),
    ("prefill, decode, drafter", WorkerSettings),
    ("prefill, decode", EngineSettings),
    ("decode", DecodeSettings),
    ("router", RouterSettings),
    ("kvstore", NodeSettings),
)


def render() -> str:
    """The page."""
    lines = [_HEAD]
    for title, kind in _SECTIONS:
        lines += [f"## {title}", "", "| Flag | Type | Default | Meaning |", "|---|---|---|---|"]
        lines += [_line(row) for row in _own_rows(kind)]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _own_rows(kind: type[Any]) -> Iterator[Row]:
    """The settings that the class adds to those of its base classes, or changes."""
    inherited = {
        name: row for base in kind.__bases__ if base is not object for name, row in rows(base).items()
    }
    for name, row in rows(kind).items():
        if inherited.get(name) != row and not row.described.is_hidden:
            yield row


def _line(row: Row) -> str:
    one = _TYPES[row.type]
    kind = ", ".join(row.described.choices) or (f"{one}, repeated" if row.is_list else one)
    default = row.default_shown if row.default_shown in ("required", "none") else f"`{row.default_shown}`"
    if row.described.default_text:
        default = row.described.default_text
    return f"| `{row.flag}` | {kind} | {default} | {row.described.help} |"


if __name__ == "__main__":
    PAGE.write_text(render())
