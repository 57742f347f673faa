"""`slipstream kv` against a real kvstore process."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from libs.common.transport.registered_memory import PageAlignedMemory
from libs.common.transport.socket import SocketTransport
from slipstream.cli.kv.nodes import Nodes
from slipstream.cli.kv.show import show_tiers
from slipstream.errors import Unavailable
from slipstream.rpc.dial import PLAIN_DIAL
from tests.kvstore.node import BLOCK_BYTES, Client, KvstoreProcess, key, payload
from tests.support.processes.command_forks import CommandForks

ON_DISK = "slipstream_kvstore_blocks_nvme"


async def kv(commands: CommandForks, *arguments: str, exit_code: int | None = 0) -> str:
    """Run the command and return its standard output."""
    done = await commands.run("kv", *arguments)
    assert exit_code in (None, done.exit_code), done.errors
    return done.output if not done.exit_code or done.output else done.errors


async def kv_json(commands: CommandForks, *arguments: str, exit_code: int = 0) -> Any:
    """Return the command's JSON for the one node; retry a listing that the node does not answer in time."""
    is_reading = arguments[0] in ("ls", "stat")
    for _ in range(5):
        (node,) = json.loads(
            await kv(commands, *arguments, "--json", exit_code=None if is_reading else exit_code)
        )
        if not is_reading or not node["error"]:
            break
    return node


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[tuple[KvstoreProcess, Client]]:
    """A node with blocks 0 to 5 in memory and on disk."""
    process = KvstoreProcess(tmp_path, "socket", arguments=["--scrub-bytes-per-s", "0"])
    process.start()
    transport = SocketTransport()
    memory = PageAlignedMemory(16 * BLOCK_BYTES)
    transport.register(memory.buffer)
    client = Client(process.endpoint, transport, memory)
    await client.put(list(range(6)))
    await client.wait_status(lambda s: s.counters[ON_DISK] == 6)
    yield process, client
    await client.close()
    await transport.close()
    if process.process.poll() is None:
        process.kill()


async def test_ls_and_stat_report_held_blocks(
    commands: CommandForks, store: tuple[KvstoreProcess, Client]
) -> None:
    process, client = store
    node = ["--node", process.endpoint]
    await client.fetch([0, 1])
    listed = await kv_json(commands, "ls", *node)
    assert listed["held"] == 6
    assert {block["hash"] for block in listed["blocks"]} == {key(n).hex() for n in range(6)}
    assert all(block["tiers"] == ["dram", "nvme"] for block in listed["blocks"])
    some = await kv_json(commands, "ls", *node, "--prefix", key(3).hex()[:2])
    assert [block["hash"] for block in some["blocks"]] == [key(3).hex()]
    assert len((await kv_json(commands, "ls", *node, "--limit", "2"))["blocks"]) == 2
    answer = await kv_json(commands, "stat", *node)
    dram = answer["tiers"]["dram"]
    assert (dram["blocks"], dram["hits"], dram["pins"]) == (6, 2, 1)
    assert dram["hit_bytes"] == 2 * BLOCK_BYTES
    assert dram["mean_pin_ms"] > 0
    assert answer["tiers"]["nvme"]["bytes"] == 6 * BLOCK_BYTES
    for tier in answer["tiers"].values():
        wrong = (
            "corrupt_blocks",
            "quarantined_bytes",
            "rewanted_blocks",
            "unreachable_blocks",
            "unreachable_dropped",
        )
        assert [tier[name] for name in wrong] == [0] * len(wrong)
    assert set(answer["held"].values()) == {0}
    for words in (await kv(commands, "ls", *node), await kv(commands, "stat", *node)):
        assert process.endpoint in words


async def test_verify_finds_and_drops_damaged_disk_blocks(
    commands: CommandForks, store: tuple[KvstoreProcess, Client], tmp_path: Path
) -> None:
    process, client = store
    node = ["--node", process.endpoint]
    assert (await kv_json(commands, "verify", *node))["verified"] == 12
    rotten = payload(4)[:64]
    for segment in (tmp_path / "data").glob("segment-*"):
        found = segment.read_bytes().find(rotten)
        if found >= 0:
            with segment.open("r+b") as file:
                file.seek(found + 7)
                file.write(b"\x00" if rotten[7] else b"\x01")
    assert (await kv_json(commands, "verify", *node, key(3).hex()))["corrupt"] == []
    answer = await kv_json(commands, "verify", *node, exit_code=1)
    assert (answer["corrupt"], answer["verified"]) == ([key(4).hex()], 12)
    listed = await kv_json(commands, "ls", *node, "--prefix", key(4).hex())
    assert listed["blocks"][0]["tiers"] == ["dram"]
    assert (await kv_json(commands, "verify", *node))["verified"] == 11
    status = await client.status()
    assert status.counters["slipstream_kvstore_corrupt_blocks_total"] == 1
    tiers = (await kv_json(commands, "stat", *node))["tiers"]
    assert [tiers[name]["corrupt_blocks"] for name in ("dram", "nvme")] == [0, 1]
    assert status.ledger.blocks_leaked == 0


async def test_dropped_blocks_do_not_return_after_a_restart(
    commands: CommandForks,
    store: tuple[KvstoreProcess, Client],
) -> None:
    process, client = store
    node = ["--node", process.endpoint]
    pinned = await client.pin([0, 1])
    assert await kv_json(commands, "drop", *node, key(0).hex(), key(99).hex()) == {
        "node": process.endpoint,
        "blocks": 1,
        "copies": 2,
        "pool_kept": False,
        "error": "",
    }
    await client.read(pinned, [0, 1])  # a running read continues
    await client.release(pinned.lease_id)
    assert await client.lookup([0]) == []
    assert (await kv_json(commands, "drop", *node, "--all"))["blocks"] == 5
    assert (await client.wait_status(lambda s: s.counters[ON_DISK] == 0)).ledger.blocks_leaked == 0
    assert process.terminate() == 0
    process.start()
    assert (await kv_json(commands, "ls", "--node", process.endpoint))["held"] == 0


async def test_invalid_commands_give_one_error_line(commands: CommandForks, tmp_path: Path) -> None:
    for arguments, words in [
        (["drop", "--node", "127.0.0.1:1"], "name block hashes, or say --all"),
        (["drop", "--node", "127.0.0.1:1", "--all", key(1).hex()], "name block hashes, or say --all"),
        (["verify", "--node", "127.0.0.1:1", "xyz"], "is not the hash of a block"),
        (["ls", "--run-dir", str(tmp_path)], "no cluster"),
        (["ls", "--node", "127.0.0.1:1", "--prefix", "xyz"], "--prefix: must be hex digits"),
    ]:
        answer = await kv(commands, *arguments, exit_code=1)
        assert words in answer, answer
        assert "Traceback" not in answer
    silent = await kv_json(commands, "verify", "--node", "127.0.0.1:1", exit_code=1)
    assert silent["error"]


@pytest.mark.parametrize("verb", ["ls", "stat"])
async def test_a_node_that_does_not_answer_is_named_and_fails_the_command(
    commands: CommandForks, store: tuple[KvstoreProcess, Client], verb: str
) -> None:
    nodes = ("--node", store[0].endpoint, "--node", "127.0.0.1:1")
    shown = await kv(commands, verb, *nodes, exit_code=1)
    assert store[0].endpoint in shown  # the other node is listed all the same
    said = await kv(commands, verb, *nodes[2:], "--json", exit_code=1)
    assert json.loads(said)[0]["error"]
    with pytest.raises(Unavailable, match=r"no answer from 127\.0\.0\.1:1"):
        await show_tiers(Nodes({"127.0.0.1:1": "127.0.0.1:1"}, PLAIN_DIAL), as_json=True)
