"""Stored responses: found by their tenant alone, for their life time, within their tenant's bounds."""

from __future__ import annotations

import asyncio
import json
import random
import tracemalloc
from typing import Any

import msgspec
import pytest

from libs.common import api_bounds
from libs.database.database import Database
from libs.database.transaction import SqlTransaction
from services.router.api.responses.request import ResponseDraft, decode_response
from services.router.api.responses.stored.items import items_to_store, page_of
from services.router.api.responses.stored.store import ResponseStore, StoredResponse
from slipstream import bounds
from slipstream.errors import InvalidArgument, NotFound


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def response(key: str, text: str = "Hello.", *, earlier: Any = ()) -> StoredResponse:
    part = {"type": "output_text", "text": text, "annotations": []}
    output = [{"id": f"msg_{key}_0", "type": "message", "role": "assistant", "content": [part]}]
    items = items_to_store([{"role": "user", "content": f"hi {key}"}], key)
    return StoredResponse({"id": f"resp_{key}", "output": output}, items, earlier)


def draft(**body: Any) -> ResponseDraft:
    return decode_response(json.dumps({"input": "hi", **body}).encode())


async def test_only_its_tenant_finds_and_deletes_a_response(database: Database) -> None:
    store = ResponseStore(database, wall_clock_s=Clock())
    saved = response("k", "caf\u00e9", earlier=[])
    await store.save("alice", saved)
    assert json.loads(await store.find_body("alice", "resp_k")) == saved.body
    assert await store.find_items("alice", "resp_k") == saved.items
    for refused in (
        store.find_body("bob", "resp_k"),
        store.delete("bob", "resp_k"),
        store.find_body("alice", "resp_x"),
    ):
        with pytest.raises(NotFound):
            await refused
    with pytest.raises(NotFound):
        await store.earlier_items("bob", draft(previous_response_id="resp_k"))
    await store.delete("alice", "resp_k")
    with pytest.raises(NotFound):
        await store.find_body("alice", "resp_k")


async def test_a_conversation_goes_on_without_its_earlier_responses(database: Database) -> None:
    store = ResponseStore(database, wall_clock_s=Clock())
    await store.save("alice", response("a"))
    first = await store.earlier_items("alice", draft(previous_response_id="resp_a"))
    assert [item["id"] for item in first.items] == ["msg_a_i0", "msg_a_0"]
    await store.save("alice", response("b", earlier=first.items))
    await store.delete("alice", "resp_a")
    second = await store.earlier_items("alice", draft(previous_response_id="resp_b"))
    assert [item["id"] for item in second.items] == ["msg_a_i0", "msg_a_0", "msg_b_i0", "msg_b_0"]


async def test_items_are_found_by_their_ids(database: Database) -> None:
    store = ResponseStore(database, wall_clock_s=Clock())
    await store.save("alice", response("a"))
    references = [{"type": "item_reference", "id": "msg_a_0"}, {"id": "msg_a_i0"}]
    found = await store.earlier_items("alice", draft(input=references))
    assert found.by_id["msg_a_0"]["role"] == "assistant"
    assert found.by_id["msg_a_i0"]["content"] == [{"type": "input_text", "text": "hi a"}]
    for unknown in ("msg_a_7", "msg_b_0", "x"):
        with pytest.raises(NotFound, match=unknown):
            await store.earlier_items("alice", draft(input=[{"id": unknown}]))


async def test_a_response_is_gone_after_its_life_time(database: Database) -> None:
    clock = Clock()
    store = ResponseStore(database, wall_clock_s=clock, ttl_s=60, chance=lambda: 0.0)
    await store.save("alice", response("a"))
    clock.now_s += 59
    await store.find_body("alice", "resp_a")
    clock.now_s += 1
    with pytest.raises(NotFound):
        await store.find_body("alice", "resp_a")
    with pytest.raises(NotFound):
        await store.delete("alice", "resp_a")
    await store.save("bob", response("b"))
    left = await database.read(
        lambda tx: tx.execute("SELECT id FROM stored_responses WHERE tenant = 'alice'")
    )
    assert left == []


@pytest.mark.parametrize("limits", [{"max_responses": 3}, {"max_bytes": 1000}])
async def test_a_tenants_oldest_responses_make_room(database: Database, limits: dict[str, Any]) -> None:
    clock = Clock()
    store = ResponseStore(database, wall_clock_s=clock, chance=lambda: 0.0, **limits)
    await store.save("bob", response("bob"))
    for index in range(32):
        clock.now_s += 1
        await store.save("alice", response(f"a{index}"))
    sql = "SELECT id, n_bytes FROM stored_responses WHERE tenant = 'alice' ORDER BY created_unix_s"
    left = await database.read(lambda tx: tx.execute(sql))
    assert [row[0] for row in left] == [f"resp_a{index}" for index in range(32 - len(left), 32)]
    if "max_responses" in limits:
        assert len(left) == 3
    else:
        assert sum(row[1] for row in left) <= 1000
    await store.find_body("bob", "resp_bob")


async def test_a_tenant_that_saves_in_turns_with_another_is_bounded(database: Database) -> None:
    clock, number = Clock(), random.Random(5)
    store = ResponseStore(database, wall_clock_s=clock, max_responses=3, chance=number.random)
    for index in range(200):
        clock.now_s += 1
        await store.save("bob" if index % 16 == 0 else "alice", response(f"{index}"))
    sql = "SELECT COUNT(*) FROM stored_responses WHERE tenant = 'alice'"
    [(left,)] = await database.read(lambda tx: tx.execute(sql))
    assert left < 100


def test_pages_of_input_items() -> None:
    items = items_to_store([{"role": "user", "content": str(index)} for index in range(5)], "k")
    first = page_of(items, after=None, order="desc", limit=2)
    assert [item["id"] for item in first["data"]] == ["msg_k_i4", "msg_k_i3"]
    assert (first["first_id"], first["last_id"], first["has_more"]) == ("msg_k_i4", "msg_k_i3", True)
    rest = page_of(items, after="msg_k_i3", order="desc", limit=3)
    assert [item["id"] for item in rest["data"]] == ["msg_k_i2", "msg_k_i1", "msg_k_i0"]
    assert rest["has_more"] is False
    for wrong in ({"limit": 0}, {"limit": 101}, {"order": "up"}):
        with pytest.raises(InvalidArgument):
            page_of(items, **{"after": None, "order": "asc", "limit": 20, **wrong})  # type: ignore[arg-type]
    with pytest.raises(NotFound):
        page_of(items, after="msg_k_i9", order="asc", limit=20)


def _large(key: str, item: dict[str, Any]) -> StoredResponse:
    """A response whose input has an item that no prompt has: reasoning that leads to nothing."""
    item = {"type": "reasoning", **item}
    return StoredResponse({"id": f"resp_{key}", "output": []}, items_to_store([item], key))


async def test_a_long_item_is_not_multiplied_by_references(database: Database) -> None:
    store = ResponseStore(database, wall_clock_s=Clock())
    text = "a" * (bounds.MAX_BODY_BYTES // 2)
    await store.save("alice", _large("k", {"content": [{"type": "reasoning_text", "text": text}]}))
    reference = {"type": "item_reference", "id": "rs_k_i0"}
    found = await store.earlier_items("alice", draft(input=[reference]))
    assert found.n_bytes > len(text)  # so that it is read off the event loop
    with pytest.raises(InvalidArgument, match="input: must have at most 8388608 bytes"):
        await store.earlier_items("alice", draft(input=[reference] * 2))


@pytest.mark.parametrize("junk", ["a" * (bounds.MAX_BODY_BYTES // 2), [{}] * 50_000])
async def test_a_conversation_costs_at_most_what_a_body_may(database: Database, junk: Any) -> None:
    store = ResponseStore(database, wall_clock_s=Clock())
    await store.save("alice", _large("a", {"junk": junk}))
    first = await store.earlier_items("alice", draft(previous_response_id="resp_a"))
    again = _large("b", {"junk": junk})
    await store.save("alice", StoredResponse(again.body, again.items, first.items))
    last = _large("c", {"junk": junk})
    await store.save("alice", StoredResponse(last.body, last.items, [*first.items, *again.items]))
    with pytest.raises(InvalidArgument, match="previous_response_id: must have at most"):
        await store.earlier_items("alice", draft(previous_response_id="resp_c"))


async def test_an_id_of_another_type_names_nothing(database: Database) -> None:
    store = ResponseStore(database, wall_clock_s=Clock())
    await store.save("alice", _large("k", {"id": ["rs_k_i0"]}))
    with pytest.raises(NotFound):
        await store.earlier_items("alice", draft(input=[{"id": "rs_k_i0"}]))


async def test_a_tenant_that_saves_thousands_delays_another_one_by_a_few(database: Database) -> None:
    store, saved = ResponseStore(database, wall_clock_s=Clock(), max_responses=50), list[str]()

    async def save(index: int) -> None:
        await store.save("alice", response(f"a{index}"))
        saved.append(f"a{index}")

    await store.save("bob", response("first"))
    many = [asyncio.create_task(save(index)) for index in range(200)]
    await asyncio.sleep(0)  # all of them wait, or are under way
    most = api_bounds.MAX_TENANT_RESPONSE_CALLS
    for index in range(3):
        before = len(saved)
        await store.save("bob", response(f"b{index}"))
        await store.find_body("bob", f"resp_b{index}")
        assert len(saved) - before <= 8 * most  # each wait of the two calls lets a turn of theirs pass
    assert len(saved) < 200
    assert database.waiting <= most
    await asyncio.gather(*many)
    [(n_stored,)] = await database.read(
        lambda tx: tx.execute("SELECT count(*) FROM stored_responses WHERE tenant = 'alice'")
    )
    assert 50 <= n_stored < 200
    await store.find_body("bob", "resp_first")
    assert not store._slots._tenants


async def test_a_response_that_could_not_be_read_again_is_refused(database: Database) -> None:
    store = ResponseStore(database, wall_clock_s=Clock())
    saved, most = response("k", ""), api_bounds.STORED.high
    n_bytes = len(msgspec.json.encode(saved.body))
    await store.save("alice", response("k", "x" * (most - n_bytes)))
    assert len(await store.find_body("alice", "resp_k")) == most
    with pytest.raises(InvalidArgument, match="store: must have at most 33554432 bytes"):
        await store.save("alice", response("l", "x" * (most - n_bytes + 1)))
    with pytest.raises(NotFound):
        await store.find_body("alice", "resp_l")


async def test_a_sweep_that_fails_does_not_keep_a_job_from_its_end(database: Database) -> None:
    """On PostgreSQL a statement has its time. The transaction that a job ends with runs until it commits."""
    draws = iter([0.0, 1.0])
    store = ResponseStore(database, wall_clock_s=Clock(), chance=lambda: next(draws))
    insert = await store.insertion("alice", response("a"))

    class Slow:
        def execute(self, sql: str, values: Any = ()) -> Any:
            if sql.startswith("DELETE"):
                raise TimeoutError
            return []

    with pytest.raises(TimeoutError):
        insert(Slow())  # type: ignore[arg-type]
    insert(Slow())  # type: ignore[arg-type]


async def test_a_save_deletes_a_bounded_part_of_what_has_expired(database: Database) -> None:
    clock = Clock()
    store = ResponseStore(database, wall_clock_s=clock, ttl_s=60, chance=lambda: 1.0)
    for index in range(3):
        await store.save("alice", response(f"a{index}"))

    def copy(tx: SqlTransaction) -> None:
        for index in range(200):
            tx.execute(
                "INSERT INTO stored_responses SELECT tenant, id || ?, created_unix_s, expires_unix_s,"
                " n_bytes, body, items, earlier FROM stored_responses WHERE id = 'resp_a0'",
                (f"-{index}",),
            )

    await database.run(copy)
    clock.now_s += 61
    sweeping = ResponseStore(database, wall_clock_s=clock, ttl_s=60, chance=lambda: 0.0)
    left = [203]
    while left[-1] > 0:
        await sweeping.save("bob", response(f"b{len(left)}"))
        [(n_left,)] = await database.read(
            lambda tx: tx.execute("SELECT count(*) FROM stored_responses WHERE tenant = 'alice'")
        )
        left.append(n_left)
    assert left == [203, 139, 75, 11, 0]


MIB = 1 << 20


async def test_a_body_reads_no_more_than_its_share_of_stored_responses(database: Database) -> None:
    store = ResponseStore(database, wall_clock_s=Clock())
    n_most = api_bounds.REFERRED.high // (7 * MIB)
    keys = [f"k{index}" for index in range(n_most + 1)]
    for key in keys:
        await store.save("alice", response(key, key * (7 * MIB // len(key))))
    references = [{"type": "item_reference", "id": f"msg_{key}_i0"} for key in keys]
    found = await store.earlier_items("alice", draft(input=references[:n_most]))
    assert len(found.by_id) == n_most
    assert 7 * MIB * n_most <= found.n_read_bytes <= api_bounds.REFERRED.high
    with pytest.raises(InvalidArgument, match=f"at most {api_bounds.REFERRED.high} bytes") as refused:
        await store.earlier_items("alice", draft(input=references))
    assert refused.value.field == "input"


async def test_log_probabilities_of_a_conversation_take_little_memory(database: Database) -> None:
    """An answer of the largest stored size, all of it log probabilities."""
    store = ResponseStore(database, wall_clock_s=Clock())
    saved = response("k")
    row = {"token": "x", "logprob": -0.5, "bytes": [120], "top_logprobs": []}
    n_rows = (api_bounds.STORED.high - MIB) // len(msgspec.json.encode(row)) - MIB // 32
    [item] = saved.body["output"]
    item["content"][0]["logprobs"] = [row] * n_rows
    await store.save("alice", saved)
    tracemalloc.start()
    try:
        found = await store.earlier_items("alice", draft(previous_response_id="resp_k"))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.items[-1]["content"] == [{"type": "output_text", "text": "Hello.", "annotations": []}]
    assert found.n_read_bytes > api_bounds.STORED.high * 3 // 4
    assert peak_bytes < 3 * api_bounds.STORED.high


async def test_conversations_of_many_tenants_are_read_a_few_at_a_time(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ResponseStore(database, wall_clock_s=Clock())
    tenants = [f"t{index}" for index in range(2 * api_bounds.MAX_CONVERSATIONS_READ)]
    for tenant in tenants:
        await store.save(tenant, response("a"))
    find, gate, reading = store._find, asyncio.Event(), 0

    async def held(*args: Any, **options: Any) -> Any:
        nonlocal reading
        reading += 1
        await gate.wait()
        return await find(*args, **options)

    monkeypatch.setattr(store, "_find", held)
    reads = [
        asyncio.create_task(store.earlier_items(tenant, draft(previous_response_id="resp_a")))
        for tenant in tenants
    ]
    while store._slots._users.total() < len(tenants):
        await asyncio.sleep(0)
    for _ in range(100):
        await asyncio.sleep(0)
    assert reading == api_bounds.MAX_CONVERSATIONS_READ
    gate.set()
    assert all(found.items for found in await asyncio.gather(*reads))
