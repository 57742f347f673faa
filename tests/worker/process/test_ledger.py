"""What a worker reports to hold."""

from __future__ import annotations

from dataclasses import replace

from tests.worker.nodes import running_nodes


async def test_pages_of_a_launched_step_are_held_and_not_leaked() -> None:
    """Its sequences left, so nothing owns these pages: the step gives them back when it has run."""
    async with running_nodes() as nodes:
        node = await nodes.decode()
        idle = node.core.thread.ledger
        node.core.thread.ledger = replace(idle, pages_held=3, launched_pages=3)
        assert (node.ledger.blocks_held, node.ledger.blocks_leaked) == (3, 0)
        node.core.thread.ledger = replace(idle, pages_held=3, launched_pages=1)
        assert node.ledger.blocks_leaked == 2
        node.core.thread.ledger = idle
