"""Checksums, page-aligned memory, and memory views by address."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.common.checksum import (
    CHECKSUM_BYTES,
    UNKEYED,
    KvChecksum,
    checksum,
    checksum_at,
    memory_at,
)
from libs.common.transport.registered_memory import (
    HUGE_PAGE_BYTES,
    PAGE_BYTES,
    PageAlignedMemory,
    page_rounded,
)
from slipstream.errors import InvalidArgument
from slipstream.rpc.cluster_secret import ClusterSecret


def test_the_checksum_is_xxh3_128_in_its_canonical_form() -> None:
    # Test vector of the empty input, from the xxHash specification.
    assert checksum(b"").hex() == "99aa06d3014798d86001c324468d497f"
    assert len(checksum(b"x")) == CHECKSUM_BYTES


@given(st.binary(min_size=1, max_size=PAGE_BYTES), st.integers(0, 64))
def test_memory_at_an_address_is_the_memory_itself(data: bytes, offset: int) -> None:
    memory = PageAlignedMemory(2 * PAGE_BYTES)
    memory.view(offset, len(data))[:] = data
    assert checksum_at(memory.address + offset, len(data)) == checksum(data)
    assert bytes(memory_at(memory.address + offset, len(data))) == data
    assert memory.buffer[offset : offset + len(data)] == data


@given(st.integers(1, 1 << 40))
def test_page_rounding_gives_the_least_sufficient_multiple(n_bytes: int) -> None:
    rounded = page_rounded(n_bytes)
    assert rounded % PAGE_BYTES == 0
    assert n_bytes <= rounded < n_bytes + PAGE_BYTES


def test_memory_is_aligned_zeroed_and_bounded() -> None:
    memory = PageAlignedMemory(PAGE_BYTES + 1)
    assert memory.address % PAGE_BYTES == 0
    assert memory.n_bytes == 2 * PAGE_BYTES
    assert bytes(memory.view(0, memory.n_bytes)) == bytes(memory.n_bytes)
    for offset, n_bytes in [(-1, 1), (memory.n_bytes, 1), (0, memory.n_bytes + 1)]:
        with pytest.raises(IndexError):
            memory.view(offset, n_bytes)
    with pytest.raises(ValueError):
        PageAlignedMemory(0)


@pytest.mark.parametrize("n_bytes", [1 << 50, 1 << 70])
def test_memory_that_the_kernel_does_not_give_is_named_by_its_setting(n_bytes: int) -> None:
    with pytest.raises(InvalidArgument, match=f"^dram_bytes: {n_bytes} bytes cannot be allocated"):
        PageAlignedMemory(n_bytes, field="dram_bytes")
    with pytest.raises(MemoryError, match=f"^{n_bytes} bytes cannot be allocated"):
        PageAlignedMemory(n_bytes)


def test_large_memory_starts_at_a_huge_page_and_outlives_its_owner() -> None:
    memory = PageAlignedMemory(3 * HUGE_PAGE_BYTES + 1)
    assert memory.address % HUGE_PAGE_BYTES == 0
    assert len(memory.buffer) == memory.n_bytes == 3 * HUGE_PAGE_BYTES + PAGE_BYTES
    buffer = memory.buffer
    memory.view(memory.n_bytes - 1, 1)[:] = b"\x07"
    del memory
    assert buffer[-1] == 7


@given(st.binary(max_size=3000), st.integers(0, 3000))
def test_a_keyed_checksum_is_the_same_whole_in_pieces_and_by_address(data: bytes, cut: int) -> None:
    keyed, other = KvChecksum(b"key"), KvChecksum(b"another")
    found = keyed.of(data)
    assert len(found) == CHECKSUM_BYTES and found not in (checksum(data), other.of(data))
    assert found == KvChecksum(b"key").of(bytearray(data)) == keyed.of(memoryview(data))
    for function in (keyed, UNKEYED):
        stream = function.stream()
        stream.update(data[:cut])
        stream.update(bytearray(data[cut:]))
        assert stream.digest() == function.of(data)
    if data:
        memory = PageAlignedMemory(len(data))
        memory.view(0, len(data))[:] = data
        assert keyed.at(memory.address, len(data)) == found


def test_the_key_is_the_clusters_and_appears_in_no_text() -> None:
    one = KvChecksum.of_cluster(ClusterSecret(b"0123456789abcdef"))
    two = KvChecksum.of_cluster(ClusterSecret(b"0123456789abcdeg"))
    assert KvChecksum.of_cluster(None) is UNKEYED
    assert len({function.of(b"x" * 300) for function in (one, two, UNKEYED)}) == 3
    assert one.of(b"x") == KvChecksum.of_cluster(ClusterSecret(b"0123456789abcdef")).of(b"x")
    assert repr(one) == "KvChecksum(keyed)"


def test_a_seal_binds_fields_to_a_checksum_under_the_key() -> None:
    seals = {
        function.seal(fields, function.of(data))
        for function in (KvChecksum(b"key"), KvChecksum(b"another"), UNKEYED)
        for fields in (b"one", b"two")
        for data in (b"a", b"b")
    }
    assert len(seals) == 12 and all(len(seal) == CHECKSUM_BYTES for seal in seals)
