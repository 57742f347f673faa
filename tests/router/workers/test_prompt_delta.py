"""Prompts sent by reference to a prefix: the worker always ends up with the whole prompt."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from libs.common.block_hash import as_tokens, chain_hashes, tenant_salt
from libs.worker.requests.prompt_cache import PromptCache
from libs.worker.requests.request_spec import parse_prompt
from services.router.workers.prompt_delta import OutgoingPrompt, PromptSender, RemotePromptCache
from slipstream.errors import Internal, PrefixUnknown
from slipstream.v1 import decode_pb2, prefill_pb2

BLOCK = 4
ROOT = bytes(16)
SALTS = [tenant_salt(name) for name in ("a", "b")]


def outgoing(tokens: list[int], salt: bytes = SALTS[0]) -> OutgoingPrompt:
    hashes = chain_hashes(tokens, root=ROOT, salt=salt, block_tokens=BLOCK)
    return OutgoingPrompt(as_tokens(tokens), hashes, root=ROOT, salt=salt, block_tokens=BLOCK)


class Worker:
    """Parses and caches prompts as real workers do."""

    def __init__(self, max_bytes: int = 1 << 20) -> None:
        self.memory = PromptCache(
            block_tokens=BLOCK, max_bytes=max_bytes, max_tenant_bytes=max_bytes, min_tokens=BLOCK
        )

    def take(self, request: prefill_pb2.StartPrefill, salt: bytes) -> list[int]:
        ids, _ = parse_prompt(
            request.prompt,
            request.block_hashes,
            request.prefix,
            root=ROOT,
            salt=salt,
            memory=self.memory,
            block_tokens=BLOCK,
        )
        return list(ids.tolist())


def send(sender: PromptSender, worker: Worker, tokens: list[int], salt: bytes = SALTS[0]) -> tuple[int, bool]:
    """The number of blocks referred to, and whether the worker knew them. It gets the prompt in any case."""
    sent = sender.send(prefill_pb2.StartPrefill(), outgoing(tokens, salt))
    named = sent.prefix_blocks
    assert len(sent.request.prompt) == 4 * (len(tokens) - named * BLOCK)
    unknown: PrefixUnknown | None = None
    try:
        got = worker.take(sent.request, salt)
    except PrefixUnknown as error:
        unknown = error
    if unknown is not None:
        assert sender.send_whole(sent, unknown)
        got = worker.take(sent.request, salt)
    assert got == tokens
    return named, unknown is None


# Turns of conversations with common prefixes: (conversation, length, tenant, router).
_turns = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 60), st.sampled_from(SALTS), st.integers(0, 1)), max_size=30
)


@given(_turns, st.sampled_from([3_000, 8_000, 1 << 20]))
def test_a_worker_gets_the_whole_prompt_whatever_it_evicted(
    turns: list[tuple[int, int, bytes, int]], max_bytes: int
) -> None:
    worker = Worker(max_bytes)
    routers = [PromptSender(min_tokens=BLOCK) for _ in range(2)]
    for talk, length, salt, router in turns:
        tokens = [*range(20), *(100 * talk + n for n in range(40))][:length]
        _, knew = send(routers[router], worker, tokens, salt)
        assert knew or max_bytes < 1 << 20


def test_a_turn_sends_only_its_new_blocks() -> None:
    worker, sender = Worker(), PromptSender()
    talk = np.random.default_rng(0).integers(0, 1000, 3000).tolist()
    assert send(sender, worker, talk[:1500]) == (0, True)
    for end in range(1600, 3000, 100):
        assert send(sender, worker, talk[:end]) == ((end - 100) // BLOCK, True)
    # Another conversation branches off in the middle: a reference up to there.
    assert send(sender, worker, [*talk[:2001], 7, 7, 7]) == (500, True)
    # Another tenant with the same ids: no reference.
    assert send(sender, worker, talk[:1500], SALTS[1]) == (0, True)


def test_short_prefixes_are_sent_whole() -> None:
    worker, sender = Worker(), PromptSender()
    talk = list(range(2000))
    send(sender, worker, talk[:1500])
    assert send(sender, worker, [*talk[:1020], *range(5000, 5500)]) == (0, True)
    assert send(sender, worker, [*talk[:1024], *range(6000, 6500)]) == (256, True)
    assert send(sender, worker, talk[:1000]) == (0, True)


def test_a_restarted_worker_costs_one_more_round_trip_for_each_conversation() -> None:
    sender = PromptSender()
    talks = [[talk, *range(2000)] for talk in range(3)]
    worker = Worker()
    for talk in talks:
        assert send(sender, worker, talk) == (0, True)
    worker = Worker()
    for talk in talks:
        assert send(sender, worker, talk) == (len(talk) // BLOCK, False)
    for talk in talks:
        assert send(sender, worker, talk) == (len(talk) // BLOCK, True)


def test_only_an_unknown_prefix_is_sent_again() -> None:
    sender = PromptSender(min_tokens=BLOCK)
    prompt = outgoing(list(range(40)))
    whole = sender.send(decode_pb2.StartSequence(), prompt)
    assert not sender.send_whole(whole, PrefixUnknown("without a reference"))
    named = sender.send(decode_pb2.StartSequence(), prompt)
    assert named.prefix_blocks == 10
    assert not sender.send_whole(named, Internal("something else"))
    assert named.request.prefix.blocks == 10
    assert sender.send_whole(named, PrefixUnknown("evicted"))
    assert not named.request.HasField("prefix")
    assert named.request.prompt == whole.request.prompt
    assert not sender.send_whole(named, PrefixUnknown("once is enough"))


@given(st.lists(st.integers(0, 9), max_size=30), st.lists(st.integers(0, 9), max_size=20))
def test_a_resumed_prompt_equals_one_made_from_all_ids(tokens: list[int], emitted: list[int]) -> None:
    resumed, expected = outgoing(tokens).followed_by(emitted), outgoing([*tokens, *emitted])
    assert resumed.ids.tolist() == expected.ids.tolist()
    assert list(resumed.hashes) == list(expected.hashes)


@given(st.lists(st.tuples(st.integers(1, 80), st.booleans()), max_size=60), st.integers(2, 200))
def test_expected_blocks_are_bounded_and_were_sent(sends: list[tuple[int, bool]], max_blocks: int) -> None:
    remote, ever = RemotePromptCache(max_blocks=max_blocks), set[bytes]()
    for number, (length, is_unknown) in enumerate(sends):
        hashes = [bytes([number if n > length // 2 else 0, n]) for n in range(length)]
        known = remote.known_blocks(hashes)
        assert not known or hashes[known - 1] in ever
        if known and is_unknown:
            remote.remove_unknown(hashes, after_blocks=known)
            assert remote.known_blocks(hashes) < known
            known = 0
        remote.add_sent(hashes, after_blocks=known)
        ever.update(hashes)
        assert len(remote) <= max_blocks


def test_a_worker_that_evicts_soon_gets_fewer_references() -> None:
    """With more conversations than its cache holds, most prompts are sent whole at once."""
    worker, sender = Worker(max_bytes=20_000), PromptSender(min_tokens=BLOCK)
    talks = [outgoing([talk, *range(63)]) for talk in range(20)]
    failures: list[int] = []
    for _ in range(60):
        misses = 0
        for talk in talks:
            sent = sender.send(prefill_pb2.StartPrefill(), talk)
            try:
                worker.take(sent.request, SALTS[0])
            except PrefixUnknown as error:
                misses += sender.send_whole(sent, error)
                worker.take(sent.request, SALTS[0])
        failures.append(misses)
    assert max(failures[:3]) == 20
    assert sum(failures[-40:]) < 80  # of 800


def test_a_prefix_in_frequent_use_is_kept() -> None:
    remote = RemotePromptCache(max_blocks=8)
    begin = [b"first", b"second"]
    remote.add_sent(begin, after_blocks=0)
    for number in range(40):  # branches of it, many more than are kept
        branch = [*begin, b"%d" % number]
        assert remote.known_blocks(branch) == len(begin)
        remote.add_sent(branch, after_blocks=len(begin))
        assert len(remote) <= 8
