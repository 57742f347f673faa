"""A stream over HTTP that a thread reads, with the times of its tokens."""

from __future__ import annotations

import http.client
import itertools
import json
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

_TOKENS = 200_000
_FIRST_S = 30.0


class HealthyStream:
    """One long answer. A block of `with` begins after its first token."""

    def __init__(self, endpoint: str, headers: Mapping[str, str]) -> None:
        """`headers` name the caller."""
        host, _, port = endpoint.rpartition(":")
        self.arrivals: list[float] = []  # on the monotonic clock
        self.error = ""
        self._headers = {"Content-Type": "application/json", **headers}
        self._connection = http.client.HTTPConnection(host, int(port), timeout=_FIRST_S)
        self._began = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._read, name="healthy-stream", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._began.wait(_FIRST_S) or self.error:
            raise RuntimeError(f"no token of the stream: {self.error}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing = True
        self._thread.join()

    def _read(self) -> None:
        messages = [{"role": "user", "content": "tell me a long story"}]
        body = {"messages": messages, "max_tokens": _TOKENS, "stream": True, "ignore_eos": True}
        try:
            self._connection.request("POST", "/v1/chat/completions", json.dumps(body), self._headers)
            answer = self._connection.getresponse()
            if answer.status != 200:
                raise http.client.HTTPException(f"status {answer.status}")
            while not self._closing:
                line = answer.readline()
                if not line:
                    raise http.client.HTTPException("the stream ended")
                if line.startswith(b"data: "):
                    self.arrivals.append(time.monotonic())
                    self._began.set()
        except (OSError, http.client.HTTPException) as error:
            self.error = str(error)
            self._began.set()
        finally:
            self._connection.close()


def longest_gap_ms(arrivals: Sequence[float], began_s: float, ended_s: float) -> float:
    """The longest time without a token between these two times."""
    inside = [at for at in arrivals if began_s <= at <= ended_s]
    return max(after - before for before, after in itertools.pairwise([began_s, *inside, ended_s])) * 1e3
