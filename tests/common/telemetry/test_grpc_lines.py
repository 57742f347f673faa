"""Lines that gRPC itself would write among those of a service: none, unless the environment asks for them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# A client of a server that ends the connection as etcd does where pings come too often: gRPC logs it as an
# error. The frames are SETTINGS and GOAWAY with ENHANCE_YOUR_CALM.
CLIENT = """
import socket, struct, threading
import {module}
import grpc

listener = socket.create_server(("127.0.0.1", 0))

def serve():
    client, _ = listener.accept()
    listener.close()
    client.sendall(bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
    client.recv(1024)
    calm = struct.pack(">II", 0, 0xB) + b"too_many_pings"
    client.sendall(bytes([0, 0, len(calm), 7, 0, 0, 0, 0, 0]) + calm)
    client.shutdown(socket.SHUT_WR)
    while client.recv(1024):
        pass
    print("the client left")

address = "127.0.0.1:%d" % listener.getsockname()[1]
serving = threading.Thread(target=serve, daemon=True)
serving.start()
with grpc.insecure_channel(address) as channel:
    try:
        channel.unary_unary("/a/b")(b"", timeout=20)
    except grpc.RpcError:
        pass
serving.join(20)
"""


def lines_of(module: str, verbosity: str | None) -> tuple[str, str]:
    """What the client prints, and what stands beside it on stderr."""
    environment = {name: text for name, text in os.environ.items() if name != "GRPC_VERBOSITY"}
    if verbosity is not None:
        environment["GRPC_VERBOSITY"] = verbosity
    code = CLIENT.format(module=module)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100, check=True
    )
    return done.stdout, done.stderr


@pytest.mark.parametrize("verbosity", [None, "ERROR"])
@pytest.mark.parametrize("module", ["services", "slipstream, services"])
def test_a_service_has_no_lines_of_grpc(module: str, verbosity: str | None) -> None:
    said, beside = lines_of(module, verbosity)
    assert said == "the client left\n", "the premise: it heard the server's last frame"
    assert beside == ""


def test_the_environment_brings_them_back() -> None:
    assert "too_many_pings" in lines_of("services", "INFO")[1]
