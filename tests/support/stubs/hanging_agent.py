"""A pool agent that is ready, answers only the probe, and on request reports late reads."""

from __future__ import annotations

import socket
import sys

from services.kvstore.pool.agent.protocol import packed, unpacked


def main() -> None:
    fd = next(text.partition("=")[2] for text in sys.argv if text.startswith("--socket-fd="))
    peer = socket.socket(fileno=int(fd))
    peer.sendall(packed({"ready": "nobody:1"}))
    late = None
    with peer.makefile("rb") as lines:
        for line in lines:
            message = unpacked(line)
            if message["do"] == "find" and message["keys"] == [bytes(16).hex()]:
                peer.sendall(packed({"id": message["id"], "sizes": [0]}))
            elif message["do"] == "get":
                late = message["id"]
                answer = {"outcome": [-1], "late": True, "failovers": 0, "removed": 0}
                peer.sendall(packed({"id": late, **answer}))
            elif message["do"] == "drop":
                peer.sendall(packed({"reads_ended": late}) + packed({"id": message["id"], "dropped": 0}))
            elif message["do"] == "clear":  # an answer to no request
                peer.sendall(packed({"id": 0, "dropped": 0}))
            elif message["do"] == "close":
                return


if __name__ == "__main__":
    main()
