"""Write docs/configuration.md from the settings classes of the services.

python scripts/gen_configuration.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from libs.common.runtime.config_file import SHARED_NAMES
from libs.common.runtime.process_settings import ServiceSettings, TierSettings
from libs.common.runtime.settings import Row, rows
from libs.worker.process.settings import EngineSettings, WorkerSettings
from services.decode.settings import DecodeSettings
from services.kvstore.settings import NodeSettings
from services.router.settings import RouterSettings
from supervisor.configuration.cluster_file import UpSettings

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
_HEAD = """# Configuration

Made from the settings classes by `python scripts/gen_configuration.py`; do not edit.

Each service runs as `python -m services.NAME`. Each setting has a flag, an environment variable and a key of
the TOML file that `--config` (or SLIPSTREAM_CONFIG) names:

| Flag | Environment | File |
|---|---|---|
| `--max-batch 32` | `SLIPSTREAM_MAX_BATCH=32` | `max_batch = 32` |
| `--http-tls`, `--no-http-tls` | `SLIPSTREAM_HTTP_TLS=true` | `http_tls = true` |
| `--disk /a --disk /b` | `SLIPSTREAM_DISK=/a,/b` | `disk = ["/a", "/b"]` |

A flag overrides the environment, the environment the file, the file the default. Nothing is asked of a path
that is overridden, and an empty flag takes one away (`--etcd-ca ''`). A service ignores unknown variables.
Secrets are in files, and settings have their paths.

## The file of a cluster

One file serves a whole cluster: `slipstream up --config cluster.toml` and the ConfigMap of `deploy/k8s/`
have the same form. A service reads the sections [common] and its own, which goes first.

| Section | Keys |
|---|---|
| `[common]` | those of "All services" below, and {shared} for the services that have them |
| `[router]`, `[prefill]`, `[decode]`, `[kvstore]`, `[drafter]` | the settings of that service |
| `[up]` | numbers of processes and the like, for `slipstream up` only |

- `docs/examples/cluster.toml` is an example. A directory stands for its files `*.toml` in the order of their
  names; a later one overrides single keys. A relative path is one from the directory of the process.
- A section or key that does not exist is refused by name, with the likeliest one that is meant. A service
  checks [common] and its own section; `slipstream config check FILE` checks all.
- `slipstream config show FILE --tier decode` prints the values that a service would run with, and where each
  comes from: a flag, a variable, a section or the default.

`slipstream up` takes the same file, also one made for another place, such as `deploy/k8s/base/config`:

- Its flags go before the file. It passes no variables on.
- It gives each process its name, addresses, directories and secret (`RUN_DIR/cluster.secret`), whatever the
  file says of them. Only `http` and `listen` of [router] count: they are the first router's. It refuses
  `advertise`, `admin_advertise`, `admin_http_advertise`, `kv_advertise`, `kv_listen` and `disk`, which
  processes of one machine cannot share.
- `up` starts an etcd, unless `--etcd` or `etcd` of [up] names one. `etcd` of [common] and of the tiers
  is that of services which are started elsewhere: `up` does not dial it, and says so. `etcd_*` go with a
  named etcd.
- `--model` takes the place of the file's `draft_model` too, which is made for the file's model, unless
  `--draft-model` names a head.
- Any other path in it that this machine lacks is refused with the flag that names another (`--model`).
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
_UP: tuple[str, type[Any]] = ("[up]", UpSettings)


def render() -> str:
    """The page."""
    lines = [_HEAD.format(shared=", ".join(f"`{name}`" for name in SHARED_NAMES))]
    for title, kind in (*_SECTIONS, _UP):
        what = "Key" if kind is UpSettings else "Flag"
        lines += [f"## {title}", "", f"| {what} | Type | Default | Meaning |", "|---|---|---|---|"]
        lines += [_line(row, is_flag=what == "Flag") for row in _own_rows(kind)]
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


def _line(row: Row, *, is_flag: bool) -> str:
    one = _TYPES[row.type]
    kind = ", ".join(row.described.choices) or (f"{one}, repeated" if row.is_list else one)
    default = row.default_shown if row.default_shown in ("required", "none") else f"`{row.default_shown}`"
    if row.described.default_text:
        default = row.described.default_text
    name = row.flag if is_flag else row.name
    return f"| `{name}` | {kind} | {default} | {row.described.help} |"


if __name__ == "__main__":
    PAGE.write_text(render())
