"""Cached conversations equal encoding from scratch, for any order of requests."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from libs.common.block_hash import chain_hashes, tenant_salt
from libs.text import chat_template
from libs.text.chat_template import encode_chat
from services.router.request.conversations.message_key import message_bytes
from services.router.request.conversations.message_node import ID_BYTES, NODE_BYTES, MessageNode, NewMessage
from services.router.request.conversations.token_cache import TENANT_BYTES, TokenCache
from services.router.request.model_card import ModelCard, load_model_card
from services.router.request.prompt import Prompt, PromptDraft
from services.router.request.types import ChatInput, GenerationRequest

BLOCK_TOKENS = 16
ROOTS = (b"r" * 16, b"s" * 16)
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]

Message = dict[str, Any]


def call(arguments: Any) -> Message:
    return {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": arguments}}


def answer(**fields: Any) -> Message:
    return {"role": "assistant", "content": "", **fields}


TEXTS = st.sampled_from(["a", "b", "<|im_end|>", "order " * 12])
MESSAGES = st.one_of(
    st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "system"]), TEXTS),
    st.builds(lambda text: {"content": [{"type": "text", "text": text}], "role": "user"}, TEXTS),
    st.builds(lambda text: {"role": "tool", "content": text, "tool_call_id": "functions.f:0"}, TEXTS),
    st.builds(lambda text: answer(content=text), TEXTS),
    st.builds(lambda text, why: answer(content=text, reasoning_content=why), TEXTS, TEXTS),
    st.builds(lambda text, why: answer(tool_calls=[call(text)], reasoning_content=why), TEXTS, TEXTS),
    st.builds(lambda value: answer(tool_calls=[call({"x": value})]), st.sampled_from([1, True, 1.0, "1"])),
)


@dataclass
class Request:
    """An encoded request that is not finished yet."""

    tenant: str
    messages: list[Message]
    options: dict[str, Any]
    draft: PromptDraft
    encoded: Any

    def whole(self, card: ModelCard) -> list[int]:
        return encode_chat(card.tokenizer, self.messages, **self.options).token_ids


class Conversations(RuleBasedStateMachine):
    """Requests start and finish in any order; `conversations` holds all of them so far."""

    card: ModelCard
    max_bytes, max_tenant_bytes = 1 << 30, 1 << 30

    def __init__(self) -> None:
        super().__init__()
        self.memory = TokenCache(max_bytes=self.max_bytes, max_tenant_bytes=self.max_tenant_bytes)
        self.conversations: list[list[Message]] = [[]]
        self.open: list[Request] = []
        self.unhashed: list[tuple[Request, Prompt]] = []

    @initialize()
    def first(self) -> None:
        self.begin("t", 0, 0, [{"role": "user", "content": "a"}], False, False)

    @rule(
        tenant=st.sampled_from("tu"),
        which=st.integers(0, 30),
        kept=st.integers(0, 12),
        more=st.lists(MESSAGES, max_size=4),
        thinking=st.booleans(),
        tools=st.booleans(),
    )
    def begin(
        self, tenant: str, which: int, kept: int, more: list[Message], thinking: bool, tools: bool
    ) -> None:
        """A turn, a sibling, a repetition or a prefix of an earlier conversation, as new objects."""
        before = self.conversations[which % len(self.conversations)]
        messages: list[Message] = json.loads(json.dumps([*before[: len(before) - kept // 4], *more]))
        if not messages:
            return
        self.conversations.append(messages)
        options: dict[str, Any] = {"thinking": thinking, "tools": TOOLS if tools else []}
        request = GenerationRequest(ChatInput(messages=messages, **options))
        draft = PromptDraft.of(request, self.card, self.memory, tenant=tenant)
        self.open.append(Request(tenant, messages, options, draft, draft.encode()))

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 10))
    def finish(self, which: int) -> None:
        request = self.open.pop(which % len(self.open))
        prompt = request.draft.finish(request.encoded, request_id="r")
        assert prompt.token_ids.tolist() == request.whole(self.card)
        self.unhashed.append((request, prompt))

    @precondition(lambda self: self.unhashed)
    @rule(which=st.integers(0, 10), root=st.sampled_from(ROOTS))
    def hash(self, which: int, root: bytes) -> None:
        request, prompt = self.unhashed.pop(which % len(self.unhashed))
        salt = tenant_salt(request.tenant)
        chain, _ = prompt.chain(root=root, salt=salt, block_tokens=BLOCK_TOKENS)
        whole = request.whole(self.card)
        assert chain.hashes == chain_hashes(whole, root=root, salt=salt, block_tokens=BLOCK_TOKENS)

    @invariant()
    def cache_is_consistent(self) -> None:
        memory, in_all = self.memory, 0
        for tenant, root in memory._tree.roots.items():
            nodes = list(below(root))
            order = {id(node): at for at, node in enumerate(memory._lru.nodes(tenant))}
            assert set(map(id, nodes)) == set(order)
            for node in nodes:
                check(node)
                assert node.parent is root or order[id(node)] < order[id(node.parent)]
            n_bytes = TENANT_BYTES + sum(node.n_bytes for node in nodes)
            assert n_bytes == memory._lru.tenant_bytes(tenant) <= self.max_tenant_bytes
            in_all += n_bytes
        assert in_all == memory.n_bytes <= self.max_bytes


class CrowdedConversations(Conversations):
    max_bytes, max_tenant_bytes = 20_000, 14_000


def below(node: MessageNode) -> list[MessageNode]:
    return [found for child in node.children.values() for found in (child, *below(child))]


def check(node: MessageNode) -> None:
    """Raise AssertionError for a node with inconsistent fields or with only one child."""
    n = len(node.keys)
    assert n
    assert [len(node.raw), len(node.reasoning), len(node.ends), len(node.sizes)] == [n] * 4
    assert len(node.ids) == ID_BYTES * (node.end - node.begin)
    assert node.n_bytes == NODE_BYTES + sum(node.sizes)
    assert node.parent is not None
    assert (node.parent.end, node.parent.children[node.keys[0]]) == (node.begin, node)
    assert len(node.children) != 1
    assert set(map(id, node.labeled.values())) <= set(map(id, node.children.values()))
    assert (
        node.hashed.chain is None
        or len(node.hashed.hashes) <= node.end // BLOCK_TOKENS - node.begin // BLOCK_TOKENS
    )


@pytest.fixture(scope="module")
def card(model_dir: Path) -> ModelCard:
    return replace(load_model_card(model_dir), model_context_tokens=1 << 20)


@pytest.mark.parametrize("machine", [Conversations, CrowdedConversations])
def test_any_order_of_requests(machine: type[Conversations], card: ModelCard) -> None:
    machine.card = card
    limits = settings(stateful_step_count=25, deadline=None)
    run_state_machine_as_test(machine, settings=limits)


def test_a_conversation_is_one_node_and_is_merged_again(card: ModelCard) -> None:
    memory = TokenCache(max_tenant_bytes=60_000)

    def turn(messages: list[Message]) -> Prompt:
        request = GenerationRequest(ChatInput(messages=json.loads(json.dumps(messages))))
        draft = PromptDraft.of(request, card, memory, tenant="t")
        return draft.finish(draft.encode(), request_id="r")

    talk: list[Message] = [{"role": "user", "content": "hello"}]
    for i in range(10):
        turn(talk)
        talk += [answer(content=f"{i}"), {"role": "user", "content": f"and {i}"}]
    root = memory._tree.roots["t"]
    (node,) = root.children.values()
    assert (len(node.keys), node.children) == (19, {})
    turn([*talk[:5], {"role": "user", "content": "another way"}])
    (node,) = root.children.values()
    assert (len(node.keys), sorted(len(child.keys) for child in node.children.values())) == (5, [1, 14])
    while len(node.children) == 2:  # until the unused branch is evicted
        turn(talk)
        turn([{"role": "user", "content": f"{memory.n_bytes} " + "x " * 800}])
    assert len(node.keys) == 21
    assert turn(talk).encoded_tokens < 16


def test_tool_calls_and_reasoning_are_matched_in_raw_form(card: ModelCard) -> None:
    """In a tool loop no cached message is rendered again."""
    memory = TokenCache()
    loop: list[Message] = [{"role": "user", "content": "hello"}]
    for i in range(8):
        loop.append(answer(tool_calls=[call(json.dumps({"n": i}))], reasoning_content=f"because {i}"))
        loop.append({"role": "tool", "content": f"{i}", "tool_call_id": "functions.f:0"})
        request = GenerationRequest(ChatInput(messages=json.loads(json.dumps(loop)), thinking=True))
        draft = PromptDraft.of(request, card, memory, tenant="t")
        assert draft.conversation is not None
        assert len(draft.conversation.missing) == (3 if i == 0 else 2)
        place = draft.conversation.cursor
        assert place.at == len(loop) - len(draft.conversation.missing)
        draft.finish(draft.encode(), request_id="r")
        (node,) = memory._tree.roots["t"].children.values()
        assert node.count_equal(0, json.loads(json.dumps(loop)), 0, kept_from=0) == len(loop)
        assert node.count_equal(0, loop, 0, kept_from=len(loop)) == 1  # up to the first reasoning


def test_a_conversation_in_another_raw_form_is_rendered_once(
    card: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each message is rendered alone, and the messages that keep their reasoning are found only once."""
    memory, asked = TokenCache(), 0
    first = GenerationRequest(ChatInput(messages=[{"role": "user", "content": "hello"}], thinking=True))
    PromptDraft.of(first, card, TokenCache(), tenant="t").encode()  # fills the caches of the template

    def kept_from(*_: Any, **__: Any) -> int:
        nonlocal asked
        asked += 1
        return 0

    monkeypatch.setattr(chat_template, "reasoning_kept_from", kept_from)
    for silent in ({"content": ""}, {}):
        loop: list[Message] = [{"role": "user", "content": "hello"}]
        for i in range(8):
            loop.append({"role": "assistant", "tool_calls": [call(json.dumps({"n": i}))], **silent})
            loop.append({"role": "tool", "content": f"{i}", "tool_call_id": "functions.f:0"})
        request = GenerationRequest(ChatInput(messages=loop, thinking=True))
        draft = PromptDraft.of(request, card, memory, tenant="t")
        draft.finish(draft.encode(), request_id="r")
    assert draft.conversation is not None and not draft.conversation.missing
    assert asked == 0


def test_calls_without_texts_count_with_their_objects() -> None:
    """Otherwise many of them would exceed the bounds unnoticed."""

    def message(n_calls: int) -> Message:
        return {"role": "assistant", "tool_calls": [json.loads(json.dumps(call(""))) for _ in range(n_calls)]}

    one, many = (message_bytes((), message(n), n_tokens=0) for n in (1, 101))
    assert (many - one) / 100 >= 2 * sys.getsizeof({"name": "", "arguments": ""})


def test_arguments_that_are_equal_but_rendered_differently_are_rendered(card: ModelCard) -> None:
    memory = TokenCache()
    for value in (1, True, 1.0, 1, True):
        messages = [{"role": "user", "content": "a"}, answer(tool_calls=[call({"x": value})])]
        draft = PromptDraft.of(GenerationRequest(ChatInput(messages=messages)), card, memory, tenant="t")
        prompt = draft.finish(draft.encode(), request_id="r")
        assert prompt.token_ids.tolist() == encode_chat(card.tokenizer, messages).token_ids


def test_hashes_of_a_merged_child_are_dropped_if_the_parent_lacks_some() -> None:
    """They would count as the hashes of earlier blocks."""
    for n_first, n_kept in ((0, 0), (1, 1), (2, 5)):
        first, child = MessageNode(), MessageNode()
        first.extend([NewMessage((True, "a"), None, 0, bytes(ID_BYTES * 2 * BLOCK_TOKENS), n_bytes=0)])
        child.begin = first.end
        child.extend([NewMessage((True, "b"), None, 0, bytes(ID_BYTES * 3 * BLOCK_TOKENS), n_bytes=0)])
        for node, n_hashes in ((first, n_first), (child, 3)):
            node.hashed.chain, node.hashed.hashes = (ROOTS[0], BLOCK_TOKENS), [b"h" * 16] * n_hashes
        first.absorb(child)
        assert (len(first.hashed.hashes), first.end) == (n_kept, 5 * BLOCK_TOKENS)
