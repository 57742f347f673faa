"""What tenants fill of a disk: sums that follow whose each block is."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.kvstore.disk.quota import PUBLIC, UNKNOWN_TENANT, DiskQuota

SIZES = np.array([1, 10, 100, 1_000, 10_000], np.int64)


def test_who_wants_a_block_first_has_it_and_the_second_makes_it_public() -> None:
    quota = DiskQuota(150)
    one, other = quota.number_of(b"one"), quota.number_of(b"other")
    found = np.array([UNKNOWN_TENANT, UNKNOWN_TENANT, PUBLIC], np.uint16)
    owners = quota.want(one, found, SIZES[:3])
    assert owners.tolist() == [one, one, PUBLIC]
    assert (quota.used_bytes(b"one"), quota.used_bytes(b"other")) == (11, 0)
    assert quota.has_room(one, 139) and not quota.has_room(one, 140)
    owners = quota.want(other, owners, SIZES[:3])
    assert owners.tolist() == [PUBLIC] * 3
    assert (quota.used_bytes(b"one"), quota.used_bytes(b"other")) == (0, 0)


@given(st.lists(st.tuples(st.sampled_from([b"one", b"two", b"three"]), st.sets(st.integers(0, 4)))))
def test_the_sums_are_those_of_the_blocks(wants: list[tuple[bytes, set[int]]]) -> None:
    quota = DiskQuota(1 << 30)
    owners = np.full(len(SIZES), UNKNOWN_TENANT, np.uint16)
    for tenant, blocks in wants:
        chosen = sorted(blocks)
        owners[chosen] = quota.want(quota.number_of(tenant), owners[chosen], SIZES[chosen])
        quota.check(owners, SIZES)
