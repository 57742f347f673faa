"""A worker whose KV is read through a proxy: python -m tests.support.network.proxied_kv ROLE ANNOUNCED FILE

The service is real, except that ANNOUNCED replaces the first parts of the session id that peers see. The
service writes the real session id to FILE, and the proxy forwards there. A test can hold the engine
(engine_gate.py).
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from libs.common.transport import open as transports
from libs.common.transport.base import KvTransport
from tests.support.clusters import engine_gate


def main() -> int:
    """Serve."""
    role, announced, session_file = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    sys.argv = [f"services.{role}", *sys.argv[4:]]
    really_open = transports.open_transport

    def open_announced(
        text: str = "auto", host: str = "127.0.0.1", *, bind: str = "", advertise: str = ""
    ) -> KvTransport:
        transport = really_open(text, host, bind=bind, advertise=advertise)
        own = transport.session_id.split("/")
        replaced = announced.split("/")
        session_file.write_text(transport.session_id)
        transport.session_id = "/".join([*replaced, *own[len(replaced) :]])  # type: ignore[misc]
        return transport

    for module in list(sys.modules.values()):  # a fork server has imported its users
        if vars(module).get("open_transport") is really_open:
            vars(module)["open_transport"] = open_announced
    if role in ("prefill", "decode"):
        instance, run_dir = (sys.argv[sys.argv.index(flag) + 1] for flag in ("--instance", "--run-dir"))
        engine_gate.install(Path(run_dir), instance)
    return int(importlib.import_module(f"services.{role}.__main__").main())


if __name__ == "__main__":
    sys.exit(main())
