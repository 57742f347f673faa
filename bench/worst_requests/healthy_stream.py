"""A stream over HTTP that another process reads, with the times of its tokens.

    python -m bench.worst_requests.healthy_stream HOST:PORT HEADERS     # until standard input ends

The sender of the worst requests holds its interpreter's lock, which would delay a reading thread.
"""

from __future__ import annotations

import http.client
import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

_TOKENS = 200_000
_FIRST_S = 30.0


class HealthyStream:
    """One long answer. A block of `with` begins after its first token; after it the times are there."""

    def __init__(self, endpoint: str, headers: Mapping[str, str]) -> None:
        """`headers` name the caller."""
        self.arrivals: Sequence[float] = ()  # on the monotonic clock, which all processes share
        self.error = ""
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "bench.worst_requests.healthy_stream",
                endpoint,
                json.dumps(dict(headers)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            self._process.wait()
            raise RuntimeError("no token of the stream")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        said, _ = self._process.communicate()
        found = json.loads(said)
        self.arrivals, self.error = found["arrivals"], found["error"]


def longest_gap_ms(arrivals: Sequence[float], began_s: float, ended_s: float) -> float:
    """The longest time without a token between these two times."""
    inside = [at for at in arrivals if began_s <= at <= ended_s]
    return max(after - before for before, after in itertools.pairwise([began_s, *inside, ended_s])) * 1e3


def read_stream(endpoint: str, headers: Mapping[str, str], closing: threading.Event) -> dict[str, Any]:
    """The times of the tokens until `closing`, and the error that ended them. The first one is announced."""
    host, _, port = endpoint.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=_FIRST_S)
    messages = [{"role": "user", "content": "tell me a long story"}]
    body = {"messages": messages, "max_tokens": _TOKENS, "stream": True, "ignore_eos": True}
    arrivals: list[float] = []
    try:
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json", **headers}
        )
        answer = connection.getresponse()
        if answer.status != 200:
            raise http.client.HTTPException(f"status {answer.status}")
        while not closing.is_set():
            line = answer.readline()
            if not line:
                raise http.client.HTTPException("the stream ended")
            if line.startswith(b"data: "):
                arrivals.append(time.monotonic())
                if len(arrivals) == 1:
                    print("began", flush=True)
    except (OSError, http.client.HTTPException) as error:
        return {"arrivals": arrivals, "error": str(error)}
    finally:
        connection.close()
    return {"arrivals": arrivals, "error": ""}


def main() -> None:
    """Read until standard input ends, and print the times."""
    closing = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        closing.set()

    threading.Thread(target=wait, daemon=True).start()
    print(json.dumps(read_stream(sys.argv[1], json.loads(sys.argv[2]), closing)))


if __name__ == "__main__":
    main()
