"""Consistency check of a disk's table, for tests and debugging."""

from __future__ import annotations

from services.kvstore.disk.table.table import DiskTable


def check_table(table: DiskTable) -> None:
    """Raise AssertionError unless every slot is free, reserved or a block, and counted once."""
    published = table.rows()
    assert len(published) == table.n_blocks
    assert table.n_bytes == int(table._columns.n_bytes[published].sum())
    assert (table._index.find_many(table.keys()) == published).all()
    free = sorted(row for rows in table._free.values() for row in rows)
    assert len(free) == len(set(free))
    for number, slab in enumerate(table.slabs):
        mine = set(table._rows_of(number).tolist())
        assert slab.published == len(mine.intersection(published.tolist()))
        n_free = len(mine.intersection(free))
        assert not n_free if slab.retired else n_free + slab.taken == slab.n_slots
        assert slab.taken >= slab.published >= 0
    assert table._held_gone <= set(table._holds)
    table.use.check()
