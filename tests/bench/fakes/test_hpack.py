"""Headers are read as RFC 7541's examples say."""

from __future__ import annotations

import pytest

from bench.fakes.hpack import HeaderReader, huffman

GET = [(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/"), (b":authority", b"www.example.com")]
# Appendix C.3 (literals) and C.4 (Huffman codes), each three requests of one connection.
EXAMPLES = {
    "literal": (
        "828684410f7777772e6578616d706c652e636f6d",
        "828684be58086e6f2d6361636865",
        "828785bf400a637573746f6d2d6b65790c637573746f6d2d76616c7565",
    ),
    "huffman": (
        "828684418cf1e3c2e5f23a6ba0ab90f4ff",
        "828684be5886a8eb10649cbf",
        "828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf",
    ),
}


@pytest.mark.parametrize("form", EXAMPLES)
def test_the_examples_of_the_standard(form: str) -> None:
    reader = HeaderReader()
    first, second, third = (reader.read(bytes.fromhex(block)) for block in EXAMPLES[form])
    assert first == GET
    assert second == [*GET, (b"cache-control", b"no-cache")]
    assert third[1:] == [
        (b":scheme", b"https"),
        (b":path", b"/index.html"),
        (b":authority", b"www.example.com"),
        (b"custom-key", b"custom-value"),
    ]


def test_a_table_made_small_forgets_its_oldest() -> None:
    reader = HeaderReader()
    assert reader.read(b"\x40\x01a\x01b\x40\x01c\x01d") == [(b"a", b"b"), (b"c", b"d")]
    assert reader.read(b"\x3f\x03\xbe") == [(b"c", b"d")]  # room for one entry: 34 bytes
    with pytest.raises(IndexError):
        reader.read(b"\xbf")


@pytest.mark.parametrize("block", [b"\x80", b"\x00\x05ab", b"\x3f\xff\x7f", b"\xff"])
def test_what_is_no_block_is_refused(block: bytes) -> None:
    with pytest.raises((ValueError, IndexError)):
        HeaderReader().read(block)


def test_the_end_symbol_is_no_text() -> None:
    with pytest.raises(ValueError, match="code"):
        huffman(b"\xff\xff\xff\xff")
