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

A flag overrides the environment, the environment the file. An empty flag takes a value away (`--etcd-ca ''`).
The lists show each flag with its default, or with the kind of its value. Port 0 is any free one to listen on,
and the listening port in an address that others dial.

## The file of a cluster

`slipstream up --config cluster.toml` and the ConfigMap of `deploy/k8s/` have the same form
(`docs/examples/cluster.toml`):

| Section | Keys |
|---|---|
| `[common]` | those of "All services" below, and {shared} for the services that have them |
| `[router]`, `[prefill]`, `[decode]`, `[kvstore]`, `[drafter]` | that service's settings, before `[common]` |
| `[up]` | numbers of processes and the like, for `slipstream up` only |

- A directory stands for its files `*.toml` in the order of their names; a later one overrides single keys.
- An unknown section or key is refused by name. `slipstream config check FILE` checks all sections.
- `slipstream config show FILE --tier decode` prints the values that a service would run with.

`slipstream up` takes any such file, also `deploy/k8s/base/config`:

- It passes no environment variables on.
- It chooses each process's name, addresses, directories and secret (`RUN_DIR/cluster.secret`). Only `http`
  and `listen` of [router] count, for the first router. It refuses `advertise`, `admin_advertise`,
  `admin_http_advertise`, `kv_advertise`, `kv_listen` and `disk`.
- It starts an etcd, unless `--etcd` or `etcd` of [up] names one, with `etcd_*` of [common].
- `--model` also removes the file's `draft_model`, unless `--draft-model` names a head.
"""
_TYPES = {bool: "on", int: "N", float: "X", str: "TEXT", Path: "PATH"}
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
        lines += [f"## {title}", ""]
        lines += [_line(row, is_flag=kind is not UpSettings) for row in _own_rows(kind)]
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
    described, default = row.described, row.default_shown
    is_shown = not described.default_text and default not in ("required", "none")
    name = row.flag if is_flag else row.name
    flag = f"`{name}={default if is_shown else _TYPES[row.type]}`"
    if row.type is bool and is_flag:
        flag = f"`{name}` ({default})"
    meaning = described.help
    if described.choices:
        meaning += f" ({', '.join(described.choices)})"
    if described.default_text or default == "required":
        meaning += f"; {'default: ' + described.default_text if described.default_text else default}"
    return f"- {flag}: {meaning}"


if __name__ == "__main__":
    PAGE.write_text(render())
