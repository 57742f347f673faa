"""Quotas of tenants on a disk: the sums follow the tenant of each block."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.kvstore.disk.table.quota import PUBLIC, UNKNOWN_TENANT, DiskQuota

SIZES = np.array([1, 10, 100, 1_000, 10_000], np.int64)


def test_a_block_belongs_to_its_first_tenant_until_a_second_one_uses_it() -> None:
    quota = DiskQuota(150)
    one, other = quota.number_of(b"one"), quota.number_of(b"other")
    found = np.array([UNKNOWN_TENANT, UNKNOWN_TENANT, PUBLIC], np.uint16)
    tenants = quota.want(one, found, SIZES[:3])
    assert tenants.tolist() == [one, one, PUBLIC]
    assert (quota.used_bytes(one), quota.used_bytes(other)) == (11, 0)
    assert quota.has_room(one, 139) and not quota.has_room(one, 140)
    tenants = quota.want(other, tenants, SIZES[:3])
    assert tenants.tolist() == [PUBLIC] * 3
    assert (quota.used_bytes(one), quota.used_bytes(other)) == (0, 0)


@given(st.lists(st.tuples(st.sampled_from([b"one", b"two", b"three"]), st.sets(st.integers(0, 4)))))
def test_the_quota_sums_equal_those_of_the_blocks(wants: list[tuple[bytes, set[int]]]) -> None:
    quota = DiskQuota(1 << 30)
    tenants = np.full(len(SIZES), UNKNOWN_TENANT, np.uint16)
    for tenant, blocks in wants:
        chosen = sorted(blocks)
        tenants[chosen] = quota.want(quota.number_of(tenant), tenants[chosen], SIZES[chosen])
        quota.check(tenants, SIZES)
