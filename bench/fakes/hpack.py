"""Headers as HTTP/2 packs them (HPACK, RFC 7541): all forms are read, those written are literals."""

from __future__ import annotations

from collections import deque

Header = tuple[bytes, bytes]

# Appendix A: the names of the static table and the values that some have.
_STATIC_LINES = """
:authority :method=GET :method=POST :path=/ :path=/index.html :scheme=http :scheme=https :status=200
:status=204 :status=206 :status=304 :status=400 :status=404 :status=500 accept-charset
accept-encoding=gzip,~deflate accept-language accept-ranges accept access-control-allow-origin age allow
authorization cache-control content-disposition content-encoding content-language content-length
content-location content-range content-type cookie date etag expect expires from host if-match
if-modified-since if-none-match if-range if-unmodified-since last-modified link location max-forwards
proxy-authenticate proxy-authorization range referer refresh retry-after server set-cookie
strict-transport-security transfer-encoding user-agent vary via www-authenticate
"""
_STATIC: list[Header] = [
    (name.encode(), value.replace("~", " ").encode())
    for name, _, value in (line.partition("=") for line in _STATIC_LINES.split())
]
# Appendix B: bits of each symbol's code, 0 to 256. The codes are canonical, so their lengths are enough.
_CODE_BITS = [
    *(13, 23, 28, 28, 28, 28, 28, 28, 28, 24, 30, 28, 28, 30, 28, 28, 28, 28, 28, 28, 28, 28, 30),
    *(28, 28, 28, 28, 28, 28, 28, 28, 28, 6, 10, 10, 12, 13, 6, 8, 11, 10, 10, 8, 11, 8, 6, 6, 6),
    *(5, 5, 5, 6, 6, 6, 6, 6, 6, 6, 7, 8, 15, 6, 12, 10, 13, 6, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7),
    *(7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 8, 7, 8, 13, 19, 13, 14, 6, 15, 5, 6, 5, 6, 5, 6, 6, 6, 5, 7),
    *(7, 6, 6, 6, 5, 6, 7, 6, 5, 5, 6, 7, 7, 7, 7, 7, 15, 11, 14, 13, 28, 20, 22, 20, 20, 22, 22, 22),
    *(23, 22, 23, 23, 23, 23, 23, 24, 23, 24, 24, 22, 23, 24, 23, 23, 23, 23, 21, 22, 23, 22, 23, 23),
    *(24, 22, 21, 20, 22, 22, 23, 23, 21, 23, 22, 22, 24, 21, 22, 23, 23, 21, 21, 22, 21, 23, 22, 23),
    *(23, 20, 22, 22, 22, 23, 22, 22, 23, 26, 26, 20, 19, 22, 23, 22, 25, 26, 26, 26, 27, 27, 26, 24),
    *(25, 19, 21, 26, 27, 27, 26, 27, 24, 21, 21, 26, 26, 28, 27, 27, 27, 20, 24, 20, 21, 22, 21, 21),
    *(23, 22, 22, 25, 25, 24, 24, 26, 23, 26, 27, 26, 26, 27, 27, 27, 27, 27, 28, 27, 27, 27, 27, 27),
    *(26, 30),
]
_ENTRY_BYTES = 32  # what an entry counts beyond its text
_END = 256


def _codes() -> dict[tuple[int, int], int]:
    """(bits, code) -> symbol."""
    codes, code, bits = {}, 0, 0
    for symbol in sorted(range(len(_CODE_BITS)), key=lambda symbol: (_CODE_BITS[symbol], symbol)):
        code <<= _CODE_BITS[symbol] - bits
        bits = _CODE_BITS[symbol]
        codes[bits, code] = symbol
        code += 1
    return codes


_SYMBOLS = _codes()


def huffman(data: bytes) -> bytes:
    """The text of a coded string; what fills its last byte is dropped. Raises ValueError."""
    out, code, bits = bytearray(), 0, 0
    for byte in data:
        for shift in range(7, -1, -1):
            code, bits = code << 1 | byte >> shift & 1, bits + 1
            symbol = _SYMBOLS.get((bits, code))
            if symbol == _END or bits > 30:
                raise ValueError("no such code")
            if symbol is not None:
                out.append(symbol)
                code = bits = 0
    return bytes(out)


class HeaderReader:
    """Of one connection; blocks have to be given in the order they came."""

    def __init__(self) -> None:
        self._entries: deque[Header] = deque()  # the youngest first
        self._most_bytes = self._limit_bytes = 4096
        self._known: dict[bytes, bytes] = {}  # coded strings seen before: the same ones come again and again

    def read(self, block: bytes) -> list[Header]:
        """The headers of a block. Raises ValueError or IndexError when it is none."""
        at, headers = 0, []
        while at < len(block):
            first = block[at]
            if first & 0x80:
                index, at = _integer(block, at, 7)
                headers.append(self._entry(index))
            elif first & 0xE0 == 0x20:
                self._most_bytes, at = _integer(block, at, 5)
                if self._most_bytes > self._limit_bytes:
                    raise ValueError("a table larger than allowed")
                self._evict()
            else:
                keep = bool(first & 0x40)
                index, at = _integer(block, at, 6 if keep else 4)
                name, at = (self._entry(index)[0], at) if index else self._string(block, at)
                value, at = self._string(block, at)
                headers.append((name, value))
                if keep:
                    self._entries.appendleft((name, value))
                    self._evict()
        return headers

    def _entry(self, index: int) -> Header:
        if not index:
            raise ValueError("no header has index 0")
        return _STATIC[index - 1] if index <= len(_STATIC) else self._entries[index - len(_STATIC) - 1]

    def _string(self, block: bytes, at: int) -> tuple[bytes, int]:
        coded = bool(block[at] & 0x80)
        length, at = _integer(block, at, 7)
        text = block[at : at + length]
        if len(text) < length:
            raise ValueError("a string without its end")
        if coded:
            if len(self._known) > 1024:
                self._known.clear()
            if text not in self._known:
                self._known[text] = huffman(text)
            text = self._known[text]
        return text, at + length

    def _evict(self) -> None:
        size = sum(len(name) + len(value) + _ENTRY_BYTES for name, value in self._entries)
        while size > self._most_bytes:
            name, value = self._entries.pop()
            size -= len(name) + len(value) + _ENTRY_BYTES


def literal(name: bytes, value: bytes) -> bytes:
    """A header that is not indexed (6.2.2)."""
    return b"\x00" + _length(name) + name + _length(value) + value


def _length(text: bytes) -> bytes:
    """Of a string that is not coded: a number with a prefix of seven bits (5.1)."""
    value = len(text)
    if value < 127:
        return bytes([value])
    value, out = value - 127, [127]
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _integer(block: bytes, at: int, prefix_bits: int) -> tuple[int, int]:
    """A number and where it ends (section 5.1)."""
    most = (1 << prefix_bits) - 1
    value, at = block[at] & most, at + 1
    if value < most:
        return value, at
    shift = 0
    while True:
        byte, at = block[at], at + 1
        value += (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at
