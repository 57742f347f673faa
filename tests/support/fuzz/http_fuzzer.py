"""Malformed HTTP messages by a grammar: request lines, headers, framing, codings and JSON of many shapes."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gzip
import json
import random
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.support.fuzz.http_routes import Body, HttpPort, HttpRoute

_METHODS = (
    "POST",
    "POST",
    "POST",
    "POST",
    "GET",
    "PUT",
    "DELETE",
    "OPTIONS",
    "HEAD",
    "CONNECT",
    "PRI",
    "get",
    "P OST",
)
_VERSIONS = (
    "HTTP/1.1",
    "HTTP/1.1",
    "HTTP/1.1",
    "HTTP/1.0",
    "HTTP/2.0",
    "HTTP/9.9",
    "HTTP/1.",
    "http/1.1",
    "",
)
_HEADERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Authorization", ("Bearer x", "Bearer x\x01", "", "Basic " + "A" * 9000)),
    (
        "Content-Type",
        ("application/json", "text/plain", "application/json; charset=utf-7", "multipart/form-data"),
    ),
    ("Accept-Encoding", ("gzip", "*;q=0", "\x7f")),
    ("Expect", ("100-continue", "200-ok", "")),
    ("Connection", ("close", "upgrade", "keep-alive, close, x")),
    ("Upgrade", ("websocket", "h2c", "")),
    ("Cookie", ("a=b", "=", "a" * 5000)),
    ("Range", ("bytes=0-", "x")),
    ("x-request-id", ("r-1", "r" * 129, "\u00e9", "")),
    ("x-session-affinity", ("s", "s" * 257, "\x00", "caf\u00e9")),
    ("x-request-timeout-ms", ("60000", "5000000", "0", "-1", "1e3", "\u0661", "9" * 30)),
    ("x-slipstream-priority", ("bulk", "none")),
    ("x-slipstream-prefill", ("prefill-0",)),
    ("x-slipstream-debug", ("1",)),
    ("x-slipstream-stats", ("1",)),
    ("traceparent", ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "zz")),
    ("Bad Name", ("x",)),
    ("X-Colon:", ("y",)),
    ("X-Long", ("z" * 20_000,)),
    ("", ("empty",)),
)
# In a text of JSON these stand for what json.dumps cannot write.
_DEEP, _NO_UTF8 = "@deep@", "@bytes@"
_DEPTHS = (100, 511, 900, 980, 988, 990, 992, 994, 5000)
_ID = re.compile(
    rb'"(?:id|request_id)": ?"(?:chatcmpl-|cmpl-)?((resp|msg|file|batch|job|)[-_]?[A-Za-z0-9-]{8,})"'
)
_IDS_KEPT = 30
_VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        0,
        -1,
        1.5,
        2**31,
        2**63,
        10**400,
        1e308,
        "",
        "x",
        "\x00",
        "\ud800",
        "é" * 300,
        "q" * 20_000,
    ),
    *(_DEEP, _NO_UTF8, {_NO_UTF8: 1}),
    *([], [[]], {}, {"": None}, [None] * 50, {"type": "text", "text": "x"}, {"role": "user"}, [1, "a", {}]),
)
# Of a message that is not whole nothing comes; the next one begins meanwhile.
_ANSWER_S, _MORE_S = 0.5, 0.05
_PATIENCE_S = 60.0  # for answers that must come
# aiohttp answers with the version of the request.
_STATUS = re.compile(rb"^HTTP/\d\.\d (\d{3}) ")


@dataclass
class HttpFuzzer:
    """Sends to one HTTP server and collects the statuses of its answers."""

    port: int
    serves: HttpPort
    rng: random.Random
    side_by_side: int = 16
    statuses: Counter[int] = field(default_factory=Counter)  # 0: no answer
    defects: list[str] = field(default_factory=list)
    _ids: dict[str, list[str]] = field(default_factory=dict)  # of earlier answers, by prefix

    async def reach_routes(self) -> None:
        """Assert that each route answers a valid message with its status; earlier routes make ids for later.

        A route whose status needs time, such as that of an ended batch, is asked again.
        """
        for route in self.serves.routes:
            body, found = route.bodies[0] if route.bodies else b"", 0
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PATIENCE_S):
                    while (found := await self._send(self._valid(route, body), _PATIENCE_S)) != route.status:
                        await asyncio.sleep(_MORE_S)
            assert found == route.status, f"{route.path}: {found} rather than {route.status}"

    async def run(self, inputs: int) -> None:
        """Send so many messages, each on a separate connection."""
        await self._send_each(self.message, inputs)

    async def use(self, inputs: int) -> None:
        """Send so many valid messages, as ordinary clients do."""
        await self._send_each(self._any_valid, inputs)

    async def _send_each(self, make: Callable[[], bytes], inputs: int) -> None:
        left = iter(range(inputs))

        async def send() -> None:
            for _ in left:
                await self._send(make(), _ANSWER_S)

        async with asyncio.TaskGroup() as senders:
            for _ in range(self.side_by_side):
                senders.create_task(send())

    def check(self) -> None:
        """Assert that bad input was refused as such."""
        assert not self.defects, f"{len(self.defects)} defects:\n" + "\n".join(self.defects[:20])
        assert self.statuses[400] and self.statuses[404], self.statuses

    def message(self) -> bytes:
        """One message: mostly whole, of known parts, each of which is wrong now and then."""
        rng = self.rng
        route = rng.choice(self.serves.routes)
        if rng.random() < 0.15:
            return self._any_valid(route)
        wild = rng.random() < 0.5
        method, path = route.method or ("POST" if route.bodies else "GET"), route.path
        if wild and rng.random() < 0.7:
            method = rng.choice(_METHODS)
        if wild and rng.random() < 0.5:
            path = rng.choice(self.serves.odd_paths)
        version = rng.choice(_VERSIONS) if wild else "HTTP/1.1"
        lines = [self._with_ids(f"{method} {path} {version}".encode(), rng.random() < 0.1)]
        names = rng.sample(_HEADERS, rng.choice((0, 1, 2, 4))) if wild else []
        if rng.random() < 0.95:
            lines.append(b"Host: " + rng.choice((*(b"localhost",) * 8, b"127.0.0.1", b"", b"a b")))
        # Without it a message ends before its body is read.
        if rng.random() < 0.9 and not any(name == "Content-Type" for name, _ in names):
            lines.append(f"Content-Type: {route.content_type}".encode())
        if rng.random() < 0.95:
            lines += [line.encode() for line in self.serves.headers]
        lines += [f"{name}: {rng.choice(values)}".encode("utf-8", "surrogatepass") for name, values in names]
        framing, body = self._framed(self.body(route), is_honest=not wild and rng.random() < 0.7)
        lines += framing
        end = rng.choice((b"\r\n",) * 10 + (b"\n", b"\r"))
        data = end.join([*lines, b"", b""]) + body
        if rng.random() < 0.1:
            data = self._damaged(data)
        return data

    def _any_valid(self, route: HttpRoute | None = None) -> bytes:
        """A message without a defect, to any route or to this one."""
        route = route or self.rng.choice(self.serves.routes)
        return self._valid(route, self.rng.choice(route.bodies) if route.bodies else b"")

    def _valid(self, route: HttpRoute, seed: Body) -> bytes:
        """A message without a defect, of which later ones have ids."""
        body = self._with_ids(seed if isinstance(seed, bytes) else json.dumps(seed).encode(), False)
        method = route.method or ("POST" if route.bodies else "GET")
        lines = [
            *(f"{method} {route.path} HTTP/1.1", "Host: localhost", f"Content-Type: {route.content_type}"),
            *(*self.serves.headers, f"Content-Length: {len(body)}", "", ""),
        ]
        return self._with_ids("\r\n".join(lines).encode(), False) + body

    def body(self, route: HttpRoute) -> bytes:
        """A body: JSON with some members replaced, or its text damaged."""
        rng = self.rng
        seed = rng.choice(route.bodies) if route.bodies else b""
        if isinstance(seed, bytes):
            return self._damaged(seed) if seed and rng.random() < 0.3 else seed
        body = json.loads(json.dumps(seed))
        for _ in range(rng.choice((0, 1, 1, 2))):
            self._replace(body)
        data = self._unwritable(json.dumps(body).encode())
        data = self._with_ids(data, rng.random() < 0.1)
        kind = rng.random()
        if kind < 0.1:
            data = self._damaged(data)
        elif kind < 0.14:
            data = rng.choice(
                (b"[" * 100_000, b'{"a":' * 5000, b"NaN", b"", b"\xff\xfe{}", b'{"a":1e999}', b"{}{}")
            )
        elif kind < 0.17:
            data = data[:-1] + b', "messages": [], "max_tokens": NaN, "seed": -Infinity}'
        return data

    def _unwritable(self, data: bytes) -> bytes:
        """The text of JSON with values that are nested deep, and bytes that are no UTF-8."""
        depth = self.rng.choice(_DEPTHS)
        opened, closed = self.rng.choice(((b"[", b"]"), (b'{"a":', b"}")))
        deep = opened * depth + b"1" + closed * depth
        data = data.replace(b'"%s"' % _DEEP.encode(), deep)
        return data.replace(_NO_UTF8.encode(), self.rng.choice((b"\x91", b"a\xed\xa0\x80", b"\xff\xfe")))

    def _with_ids(self, data: bytes, is_none: bool) -> bytes:
        """Put ids of earlier answers where `@prefix@` stands; `is_none`: of no answer."""

        def id_of(found: re.Match[bytes]) -> bytes:
            known = self._ids.get(found[1].decode())
            return (known and not is_none and self.rng.choice(known).encode()) or found[1] + b"_none0000"

        return re.sub(rb"@(resp|msg|file|batch|job|request)@", id_of, data)

    def _replace(self, body: Any) -> None:
        """Put an odd value at a random place of the tree."""
        rng = self.rng
        places = list(_places(body))
        inside, key = rng.choice(places) if places else (body, "x")
        if isinstance(inside, dict) and rng.random() < 0.1:
            key = rng.choice(("x", _NO_UTF8, "", "type", "model", "stream"))
        inside[key] = copy.deepcopy(rng.choice(_VALUES))

    def _framed(self, body: bytes, *, is_honest: bool) -> tuple[list[bytes], bytes]:
        """The headers of the body's length and coding, and the bytes; they agree mostly, or always."""
        rng = self.rng
        if is_honest:
            return [b"Content-Length: %d" % len(body)], body
        headers: list[bytes] = []
        coding = rng.random()
        if coding < 0.08:
            headers.append(b"Content-Encoding: gzip")
            body = gzip.compress(body) if coding < 0.05 else body
        elif coding < 0.12:
            headers.append(
                b"Content-Encoding: " + rng.choice((b"deflate", b"br", b"zstd", b"x", b"gzip, gzip"))
            )
            body = zlib.compress(body)
        kind = rng.random()
        if kind < 0.7:
            return [*headers, b"Content-Length: %d" % len(body)], body
        if kind < 0.8:
            lie = rng.choice(
                (b"0", b"-1", b"1", b"99999999999999999999", b"0x10", b"+5", b"5, 5", b"", b"9000000")
            )
            return [*headers, b"Content-Length: " + lie], body
        if kind < 0.83:
            return [*headers, b"Content-Length: 5", b"Content-Length: 6"], body
        headers.append(
            b"Transfer-Encoding: " + rng.choice((b"chunked", b"chunked", b"chunked", b"gzip, chunked", b"x"))
        )
        size = rng.choice(
            (b"%x" % len(body), b"%x" % len(body), b"-1", b"fffffffffffffffff", b"zz", b"", b"5;a=b")
        )
        return headers, size + b"\r\n" + body + rng.choice(
            (b"\r\n0\r\n\r\n", b"\r\n0\r\n\r\n", b"0\r\n", b"\r\n0\r\nX: y\r\n\r\n")
        )

    def _damaged(self, data: bytes) -> bytes:
        rng, damaged = self.rng, bytearray(data)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(damaged) + 1)
            kind = rng.randrange(3)
            if kind == 0:
                damaged[at:at] = rng.randbytes(rng.randint(1, 4))
            elif kind == 1:
                del damaged[at : at + rng.randint(1, 30)]
            elif at < len(damaged):
                damaged[at] ^= 1 << rng.randrange(8)
        return bytes(damaged)

    async def _send(self, data: bytes, patience_s: float) -> int:
        """The status of the answer, 0 if none begins in so many seconds."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        answer = b""
        with contextlib.suppress(ConnectionError, TimeoutError):
            writer.write(data)
            async with asyncio.timeout(patience_s) as patience:
                while piece := await reader.read(1 << 16):
                    answer += piece
                    patience.reschedule(asyncio.get_running_loop().time() + _MORE_S)
        writer.transport.abort()
        found = _STATUS.match(answer)
        status = int(found[1]) if found else 0
        self.statuses[status] += 1
        if status == 200:
            self._keep_ids(answer)
        if status >= 500 or (answer and not found):
            self.defects.append(f"{answer[:200]!r} to {data[:400]!r}")
        return status

    def _keep_ids(self, answer: bytes) -> None:
        for found in _ID.finditer(answer[:4096]):
            kept = self._ids.setdefault(found[2].decode() or "request", [])
            if len(kept) == _IDS_KEPT:
                kept.pop(self.rng.randrange(_IDS_KEPT))
            kept.append(found[1].decode())


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each object and list of a tree with each of its keys."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from _places(value[key])
