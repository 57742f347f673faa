"""What of a prompt is sent, given what a worker was sent before: it always comes to the whole prompt."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
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
    """Takes prompts in as real ones do."""

    def __init__(self, max_bytes: int = 1 << 20) -> None:
        self.memory = PromptCache(
            block_tokens=BLOCK, max_bytes=max_bytes, max_tenant_bytes=max_bytes, min_tokens=BLOCK
        )

    def take(self, request: prefill_pb2.PrefillRequest, salt: bytes) -> list[int]:
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
    """How many blocks were named, and whether the worker knew them. It gets the prompt in any case."""
    sent = sender.send(prefill_pb2.PrefillRequest(), outgoing(tokens, salt), may_name=True)
    named = sent.named_blocks
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


# Turns of conversations that share beginnings: (which talk, how far, tenant, which router).
_turns = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 60), st.sampled_from(SALTS), st.integers(0, 1)), max_size=30
)


@settings(max_examples=100, deadline=None)
@given(_turns, st.sampled_from([3_000, 8_000, 1 << 20]))
def test_whatever_a_worker_forgot_it_gets_the_whole_prompt(
    turns: list[tuple[int, int, bytes, int]], max_bytes: int
) -> None:
    worker = Worker(max_bytes)
    routers = [PromptSender(min_tokens=BLOCK) for _ in range(2)]
    for talk, length, salt, router in turns:
        tokens = [*range(20), *(100 * talk + n for n in range(40))][:length]
        _, knew = send(routers[router], worker, tokens, salt)
        assert knew or max_bytes < 1 << 20


def test_a_turn_is_sent_by_what_is_new_in_it() -> None:
    worker, sender = Worker(), PromptSender()
    talk = np.random.default_rng(0).integers(0, 1000, 3000).tolist()
    assert send(sender, worker, talk[:1500]) == (0, True)
    for end in range(1600, 3000, 100):
        assert send(sender, worker, talk[:end]) == ((end - 100) // BLOCK, True)
    # Another beginning in the middle of it: up to there.
    assert send(sender, worker, [*talk[:2001], 7, 7, 7]) == (500, True)
    # A tenant's own, though the ids are the same.
    assert send(sender, worker, talk[:1500], SALTS[1]) == (0, True)


def test_short_beginnings_are_sent() -> None:
    worker, sender = Worker(), PromptSender()
    talk = list(range(2000))
    send(sender, worker, talk[:1500])
    assert send(sender, worker, [*talk[:1020], *range(5000, 5500)]) == (0, True)
    assert send(sender, worker, [*talk[:1024], *range(6000, 6500)]) == (256, True)
    assert send(sender, worker, talk[:1000]) == (0, True)


def test_a_new_run_of_a_worker_costs_one_more_trip_for_each_conversation() -> None:
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


def test_only_a_forgotten_beginning_is_a_reason_to_send_again() -> None:
    sender = PromptSender(min_tokens=BLOCK)
    prompt = outgoing(list(range(40)))
    whole = sender.send(decode_pb2.StartSequence(), prompt, may_name=True)
    assert not sender.send_whole(whole, PrefixUnknown("of nothing that was named"))
    named = sender.send(decode_pb2.StartSequence(), prompt, may_name=True)
    assert named.named_blocks == 10
    assert not sender.send_whole(named, Internal("something else"))
    assert named.request.prefix.blocks == 10
    assert sender.send_whole(named, PrefixUnknown("forgotten"))
    assert not named.request.HasField("prefix")
    assert named.request.prompt == whole.request.prompt
    assert not sender.send_whole(named, PrefixUnknown("once is enough"))


def test_older_workers_get_whole_prompts() -> None:
    sender = PromptSender(min_tokens=BLOCK)
    for _ in range(3):
        sent = sender.send(prefill_pb2.PrefillRequest(), outgoing(list(range(40))), may_name=False)
        assert not sent.named_blocks
        assert not sent.request.HasField("prefix")
        assert len(sent.request.prompt) == 160


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=30), st.lists(st.integers(0, 9), max_size=20))
def test_a_resumed_prompt_is_as_if_made_anew(tokens: list[int], emitted: list[int]) -> None:
    resumed, anew = outgoing(tokens).followed_by(emitted), outgoing([*tokens, *emitted])
    assert resumed.ids.tolist() == anew.ids.tolist()
    assert list(resumed.hashes) == list(anew.hashes)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 80), st.booleans()), max_size=60), st.integers(2, 200))
def test_what_is_believed_is_bounded_and_was_sent(sends: list[tuple[int, bool]], max_blocks: int) -> None:
    believed, ever = RemotePromptCache(max_blocks=max_blocks), set[bytes]()
    for number, (length, is_unknown) in enumerate(sends):
        hashes = [bytes([number if n > length // 2 else 0, n]) for n in range(length)]
        known = believed.known_blocks(hashes)
        assert not known or hashes[known - 1] in ever
        if known and is_unknown:
            believed.unknown(hashes, after_blocks=known)
            assert believed.known_blocks(hashes) < known
            known = 0
        believed.sent(hashes, after_blocks=known)
        ever.update(hashes)
        assert len(believed) <= max_blocks


def test_a_worker_that_forgets_soon_is_asked_ever_less() -> None:
    """More conversations than its memory holds: most prompts go whole at once, without a trip in vain."""
    worker, sender = Worker(max_bytes=20_000), PromptSender(min_tokens=BLOCK)
    talks = [outgoing([talk, *range(63)]) for talk in range(20)]
    in_vain: list[int] = []
    for _ in range(60):
        misses = 0
        for talk in talks:
            sent = sender.send(prefill_pb2.PrefillRequest(), talk, may_name=True)
            try:
                worker.take(sent.request, SALTS[0])
            except PrefixUnknown as error:
                misses += sender.send_whole(sent, error)
                worker.take(sent.request, SALTS[0])
        in_vain.append(misses)
    assert max(in_vain[:3]) == 20
    assert sum(in_vain[-40:]) < 80  # of 800


def test_a_beginning_that_is_named_again_and_again_is_not_forgotten() -> None:
    believed = RemotePromptCache(max_blocks=8)
    begin = [b"first", b"second"]
    believed.sent(begin, after_blocks=0)
    for number in range(40):  # branches of it, many more than are remembered
        branch = [*begin, b"%d" % number]
        assert believed.known_blocks(branch) == len(begin)
        believed.sent(branch, after_blocks=len(begin))
        assert len(believed) <= 8
