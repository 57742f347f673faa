"""The port of the probes: /healthz/live and /healthz/ready, and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

_READ_S = 1.0  # a connection that sends nothing is closed: others wait for it


@contextmanager
def health_port(
    address: tuple[str, int], *, is_alive: Callable[[], bool], is_ready: Callable[[], bool]
) -> Iterator[tuple[str, int]]:
    """Answer probes meanwhile, one after the other; gives the address. Raises OSError for one in use."""
    states = {"/healthz/live": is_alive, "/healthz/ready": is_ready}

    class Probe(BaseHTTPRequestHandler):
        timeout = _READ_S
        server_version, sys_version = "slipstream", ""

        def do_GET(self) -> None:
            state = states.get(self.path)
            status = 404 if state is None else 200 if state() else 503
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            """Probes are not logged."""

    with HTTPServer(address, Probe) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True)
        thread.start()
        try:
            yield address[0], server.server_port
        finally:
            server.shutdown()
            thread.join()
