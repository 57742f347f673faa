"""The pool tier with a real master and real agents: damaged values, lost copies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

from libs.common.checksum import checksum
from libs.common.transport.mooncake import engine_environment
from services.kvstore.pool.value import name_of, pack_header
from slipstream.errors import NotFound
from tests.kvstore.pool.pool_rig import BLOCK_BYTES, SEGMENT_BYTES, Member, key, payload
from tests.support.processes.etcd_process import EtcdProcess
from tests.support.processes.pool_process import PoolMaster
from tests.support.processes.process_checks import alive, all_gone

# One pool for all tests of the module.
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(1200)]

# Puts the files of a directory under their names, as another client of the pool might.
STRANGER = """
import os, pathlib, sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", sys.argv[1]) == 0
for path in pathlib.Path(sys.argv[2]).iterdir():
    assert store.put(path.name, path.read_bytes()) == 0
os._exit(0)
"""
# Prints the endpoints of each value's replicas, in the order in which readers try them.
REPLICAS = """
import json, os, sys
from services.kvstore.pool.agent.client_guard import connect
store = connect(host="127.0.0.1", master=sys.argv[1], segment_bytes=0, replicas=1)
found = store.replicas(sys.argv[2:])
print(json.dumps([[copy.endpoint for copy in found.get(name, ())] for name in sys.argv[2:]]), flush=True)
os._exit(0)
"""
# Closes a client while other threads call it, then calls it.
CLOSED = """
import os, sys, threading
from slipstream.errors import FailedPrecondition
from services.kvstore.pool.agent.client_guard import connect
store = connect(host="127.0.0.1", master=sys.argv[1], segment_bytes=16 << 20, replicas=1)
refused = []
def call():
    try:
        while True:
            store.exist(["x"] * 100)
    except FailedPrecondition:
        refused.append(True)
threads = [threading.Thread(target=call) for _ in range(4)]
for thread in threads:
    thread.start()
assert store.close(wait_s=20)
for thread in threads:
    thread.join(20)
assert len(refused) == 4
for use in (lambda: store.exist(["x"]), lambda: store.replicas(["x"]), lambda: store.remove(["x"])):
    try:
        use()
    except FailedPrecondition:
        refused.append(True)
assert store.close(wait_s=1) and len(refused) == 7
os._exit(0)
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def members(master: PoolMaster) -> AsyncIterator[list[Member]]:
    """Two members with segments, and a third one that puts two copies of each block."""
    made = [
        Member(master.address, segment_bytes=SEGMENT_BYTES),
        Member(master.address, segment_bytes=SEGMENT_BYTES),
        Member(master.address, replicas=2),
    ]
    for each in made:
        await each.until(unavailable=False)
    agents = [each.agent for each in made]
    yield made
    for each in made:
        await each.at_rest()
    agents += [each.agent for each in made]
    await asyncio.gather(*(each.close() for each in made))
    await all_gone(agents)


async def test_damaged_values_are_misses_and_are_removed(
    members: list[Member], master: PoolMaster, tmp_path: Path
) -> None:
    user = members[2]
    right = pack_header(key(1), BLOCK_BYTES, checksum(payload(1))) + payload(1)
    flipped = bytearray(right)
    flipped[BLOCK_BYTES // 2] ^= 1
    of_another = pack_header(key(9), BLOCK_BYTES, checksum(payload(9))) + payload(9)
    other_bytes = pack_header(key(3), BLOCK_BYTES, checksum(payload(3))) + payload(4)
    values = {
        0: bytes(flipped),
        1: right,
        2: of_another,
        3: other_bytes,
        4: right[:-1],
        5: b"short",
        6: right,
    }
    for number, value in values.items():
        (tmp_path / name_of(key(number))).write_bytes(value)
    environment = {**os.environ, **engine_environment("127.0.0.1")}
    stranger = [sys.executable, "-c", STRANGER, master.address, str(tmp_path)]
    await asyncio.to_thread(subprocess.run, stranger, env=environment, check=True, timeout=60)
    wrong = {0, 2, 3, 4, 6}
    assert await user.find(list(values)) == wrong | {1}  # "short" is shorter than a header
    assert await user.pool.verify(key(1))
    with pytest.raises(NotFound):
        await user.pool.verify(key(8))
    for number in (0, 5):
        assert not await user.pool.verify(key(number))
    wrong.remove(0)
    assert await user.find([0, 5]) == set()
    assert await user.fetch(list(values)) == {1}
    assert user.pool.metrics()["slipstream_kvstore_pool_corrupt_blocks_total"] == len(wrong) + 2
    await user.at_rest()
    async with asyncio.timeout(200):  # on a busy machine the pool may be unavailable for a moment
        while await user.find([1, *wrong]) != {1}:
            await asyncio.sleep(0.02)
        await user.put([0, 2])  # the damaged values are removed
        while await user.fetch([0, 1, 2]) != {0, 1, 2}:
            await asyncio.sleep(0.05)


async def replicas(master: PoolMaster, numbers: Sequence[int]) -> list[list[str]]:
    """Return the endpoints of each block's replicas in the order of reads."""
    command = [sys.executable, "-c", REPLICAS, master.address, *(name_of(key(number)) for number in numbers)]
    environment = {**os.environ, **engine_environment("127.0.0.1")}
    listed = await asyncio.to_thread(
        subprocess.run, command, env=environment, check=True, timeout=60, stdout=subprocess.PIPE
    )
    return [list(map(str, endpoints)) for endpoints in json.loads(listed.stdout)]


def listens_at(pid: int, endpoint: str) -> bool:
    """Return whether the process listens at HOST:PORT."""
    port = int(endpoint.rsplit(":", 1)[1])
    own = {os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir() if each.is_symlink()}
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if int(fields[1].rsplit(":", 1)[1], 16) == port and fields[3] == "0A":
            return f"socket:[{fields[9]}]" in own
    return False


async def put_on_two_nodes(user: Member, master: PoolMaster, numbers: Sequence[int]) -> list[list[str]]:
    """Put the blocks until each has two replicas: a node that the master missed for 5 s gets none."""
    while True:
        await user.put(numbers)
        endpoints = await replicas(master, numbers)
        single = [number for number, found in zip(numbers, endpoints, strict=True) if len(found) < 2]
        if not single:
            return endpoints
        await user.pool.drop([key(number) for number in single])


async def test_a_copy_on_a_node_that_stops_or_dies_is_read_elsewhere(
    members: list[Member], master: PoolMaster
) -> None:
    *holders, user = members
    numbers = list(range(20, 32))

    def failovers() -> float:
        return user.pool.metrics()["slipstream_kvstore_pool_failovers_total"]

    async with asyncio.timeout(200):
        while not failovers():  # the master may remove a stopped node before a slow machine reads from it
            endpoints = await put_on_two_nodes(user, master, numbers)
            stopped = next(each for each in holders if listens_at(each.agent, endpoints[0][0]))
            os.kill(stopped.agent, signal.SIGSTOP)
            try:
                while await user.fetch(numbers) != set(numbers):
                    await asyncio.sleep(0)  # the next fetch skips the reader that is stuck
            finally:
                os.kill(stopped.agent, signal.SIGCONT)
            await stopped.until(unavailable=False)
    killed = next(each for each in holders if each is not stopped)
    gone = killed.agent
    os.kill(gone, signal.SIGKILL)
    await killed.until(unavailable=True)
    await user.fetch(numbers)  # right bytes or a miss: the master may have removed the stopped node's copies
    await killed.until(unavailable=False)
    assert not alive(gone)
    await stopped.until(unavailable=False)
    fresh = list(range(40, 48))
    async with asyncio.timeout(200):  # both members are back, so every block finds a place
        while (there := await user.fetch(fresh)) != set(fresh):
            await user.put(sorted(set(fresh) - there))


async def test_blocks_without_a_living_node_are_misses_and_can_be_put_again(
    members: list[Member], master: PoolMaster
) -> None:
    first = members[0]
    single = Member(master.address)
    await single.until(unavailable=False)
    numbers = list(range(60, 84))
    await single.put(numbers)
    assert await single.fetch(numbers) == set(numbers)
    os.kill(first.agent, signal.SIGKILL)
    await first.until(unavailable=True)
    survivors = await single.fetch(numbers)
    assert survivors < set(numbers)  # 24 blocks, one of two places each
    await first.until(unavailable=False)
    async with asyncio.timeout(200):
        while (there := await single.fetch(numbers)) != set(numbers):
            await single.put(sorted(set(numbers) - there))
    await single.at_rest()
    await single.close()


async def test_the_client_is_never_called_after_it_was_closed(master: PoolMaster) -> None:
    command = [sys.executable, "-c", CLOSED, master.address]
    environment = {**os.environ, **engine_environment("127.0.0.1")}
    await asyncio.to_thread(subprocess.run, command, env=environment, check=True, timeout=60)


@pytest.mark.soak
async def test_a_newly_elected_master_has_the_earlier_puts(tmp_path: Path) -> None:
    with EtcdProcess(tmp_path / "etcd") as etcd:
        master = PoolMaster(tmp_path, etcd=etcd.endpoint)
        master.start()
        holder = Member(master.address, segment_bytes=SEGMENT_BYTES)
        user = Member(master.address)
        numbers = list(range(50))
        try:
            for each in (holder, user):
                await each.until(unavailable=False)
            await user.put(numbers)
            master.kill()
            await user.until(unavailable=True)
            assert await user.fetch(numbers) == set()
            master.start()
            await user.until(unavailable=False)
            async with asyncio.timeout(200):
                while await user.fetch(numbers) != set(numbers):
                    await asyncio.sleep(0.2)
            await user.at_rest()
        finally:
            await asyncio.gather(holder.close(), user.close())
            master.kill()
