"""A cached conversation has the same ids and hashes and encodes only its new messages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.common.block_hash import HashChain, chain_hashes, tenant_salt
from libs.text.chat_template import Segment, encode_chat, render_chat
from services.router.request.conversations.chat_query import ChatQuery
from services.router.request.conversations.message_key import label_of
from services.router.request.conversations.token_cache import TokenCache, encode, run_to_end
from services.router.request.model_card import ModelCard
from services.router.request.prompt import Prompt, PromptDraft
from services.router.request.types import ChatInput, GenerationRequest, PromptInput, ToolChoice

ROOT = b"r" * 16
BLOCK_TOKENS = 16

Messages = list[dict[str, Any]]


def prompt_of(
    card: ModelCard, memory: TokenCache, messages: Messages, *, tenant: str = "t", **chat: Any
) -> Prompt:
    request = GenerationRequest(ChatInput(messages=messages, **chat))
    draft = PromptDraft.of(request, replace(card, model_context_tokens=1 << 20), memory, tenant=tenant)
    return draft.finish(draft.encode(), request_id="r")


def hashes_of(prompt: Prompt, *, tenant: str = "t", root: bytes = ROOT) -> tuple[list[bytes], int]:
    chain, n_hashed = prompt.chain(root=root, salt=tenant_salt(tenant), block_tokens=BLOCK_TOKENS)
    return chain.hashes, n_hashed


texts = st.text(alphabet=st.sampled_from("ab <|im_end|>é\n"), max_size=60)
roles = st.sampled_from(["system", "user", "assistant"])
conversations = st.lists(st.tuples(roles, texts), min_size=1, max_size=6)


@given(st.lists(conversations, min_size=1, max_size=5), st.booleans(), st.sampled_from([0, 3_000, 1 << 20]))
def test_ids_and_hashes_are_those_of_the_whole_conversation(
    card: ModelCard, seen: list[list[tuple[str, str]]], thinking: bool, max_bytes: int
) -> None:
    memory = TokenCache(max_bytes=max_bytes, max_tenant_bytes=max_bytes)
    for rows in seen + seen[::-1]:
        messages: Messages = [{"role": role, "content": text} for role, text in rows]
        prompt = prompt_of(card, memory, messages, thinking=thinking)
        whole = encode_chat(card.tokenizer, messages, thinking=thinking).token_ids
        assert prompt.token_ids.tolist() == whole
        expected = chain_hashes(whole, root=ROOT, salt=tenant_salt("t"), block_tokens=BLOCK_TOKENS)
        assert hashes_of(prompt)[0] == expected
        assert memory.n_bytes <= max_bytes


def test_a_turn_encodes_only_new_messages(card: ModelCard) -> None:
    memory = TokenCache()
    history: Messages = [
        {"role": "user", "content": f"turn {i} " + "lorem ipsum dolor sit amet " * 200} for i in range(20)
    ]
    first = prompt_of(card, memory, history)
    n_first = len(first.token_ids)
    assert (first.encoded_tokens, hashes_of(first)[1]) == (n_first, n_first)
    assert n_first > 10_000
    history += [{"role": "assistant", "content": "done"}, {"role": "user", "content": "and the next one"}]
    second = prompt_of(card, memory, history)
    n_new = len(second.token_ids) - n_first
    tail = 16  # the generation prompt is encoded each time
    assert second.encoded_tokens <= n_new + tail
    assert hashes_of(second)[1] < n_new + tail + BLOCK_TOKENS  # from a block's start on
    again = prompt_of(card, memory, history)
    assert (again.encoded_tokens <= tail, hashes_of(again)[1] < tail + BLOCK_TOKENS) == (True, True)


def test_cached_messages_are_not_rendered_again(card: ModelCard) -> None:
    memory = TokenCache()
    rendered: list[int] = []

    def turn(messages: Messages) -> int:
        def render(first: int, end: int | None) -> list[Segment]:
            rendered.extend(range(first, len(messages) if end is None else end))
            return render_chat(messages, first=first, end=end, add_generation_prompt=False)

        found = memory.look_up(ChatQuery("t", messages, render))
        memory.finish(
            found, run_to_end(encode(found, card.tokenizer.encode_pieces, card.tokenizer.special_id)), b""
        )
        return len(found.missing)

    history: Messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    more: Messages = [*history, {"role": "user", "content": "c"}]
    turned = [dict(reversed(message.items())) for message in more]  # equal, with the fields in another order
    assert [turn(history), turn(more), turn(turned), turn(more)] == [2, 1, 0, 0]
    assert rendered == [0, 1, 2, 0]  # only one message of the reordered conversation


def test_long_first_messages_that_differ_in_the_middle_are_distinguished(card: ModelCard) -> None:
    """They have the same label: the last one is matched in raw form, the other in rendered form."""
    memory = TokenCache()
    talks: list[Messages] = [
        [{"role": "system", "content": "rule " * 100 + f"{user}" + " rule" * 100}] for user in "abc"
    ]
    assert len({label_of(talk[0]) for talk in talks}) == 1
    for turn in range(4):
        for talk in talks:
            talk.append({"role": "user", "content": f"and {turn}"})
            prompt = prompt_of(card, memory, talk)
            assert prompt.token_ids.tolist() == encode_chat(card.tokenizer, talk).token_ids
            assert turn == 0 or prompt.encoded_tokens < 32  # the new message and the generation prompt


def test_the_text_of_a_tool_result_counts_twice(card: ModelCard) -> None:
    """It is stored rendered and raw; a user's text is one object for both."""
    memory, text = TokenCache(), "word " * 10_000
    user = prompt_of(card, memory, [{"role": "user", "content": text}], tenant="user")
    result = {"role": "tool", "content": text, "tool_call_id": "functions.f:0"}
    tool = prompt_of(card, memory, [result], tenant="tool")
    more_ids_bytes = 8 * (len(tool.token_ids) - len(user.token_ids))
    more_bytes = memory.tenant_bytes("tool") - memory.tenant_bytes("user") - more_ids_bytes
    assert len(text) <= more_bytes < len(text) + 200


def test_messages_that_depend_on_their_position_are_rendered_each_time(card: ModelCard) -> None:
    """The template drops reasoning of earlier turns; tools and calls are not plain text."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    call = {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    talk: Messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "r", "tool_call_id": "functions.f:0"},
        {"role": "assistant", "content": "done", "reasoning_content": "so"},
        {"role": "user", "content": "b", "name": "Ann"},
    ]
    memory = TokenCache()
    for _ in range(2):
        for end in (1, 2, 3, 4, 5, 3, 1):
            for given_tools in (tools, []):
                for thinking in (True, False):
                    prompt = prompt_of(card, memory, talk[:end], tools=given_tools, thinking=thinking)
                    whole = encode_chat(card.tokenizer, talk[:end], given_tools, thinking=thinking)
                    assert prompt.token_ids.tolist() == whole.token_ids


def test_a_sibling_shares_the_prefix_and_a_tenant_shares_nothing(card: ModelCard) -> None:
    memory = TokenCache()
    system = {"role": "system", "content": "rules " * 500}
    one = prompt_of(card, memory, [system, {"role": "user", "content": "a"}])
    two = prompt_of(card, memory, [system, {"role": "user", "content": "b"}])
    assert two.encoded_tokens < 40 < one.encoded_tokens
    other = prompt_of(card, memory, [system, {"role": "user", "content": "b"}], tenant="u")
    assert other.encoded_tokens == len(other.token_ids)
    assert hashes_of(other, tenant="u")[0] != hashes_of(two)[0]


def test_hashes_follow_the_fingerprint(card: ModelCard) -> None:
    memory = TokenCache()
    messages: Messages = [{"role": "user", "content": "hello " * 100}]
    for root in (ROOT, b"s" * 16, ROOT):
        prompt = prompt_of(card, memory, messages)
        expected = chain_hashes(prompt.token_ids, root=root, salt=tenant_salt("t"), block_tokens=BLOCK_TOKENS)
        assert hashes_of(prompt, root=root)[0] == expected


def test_the_chain_continues_with_the_answer_and_a_forced_prefix_counts(card: ModelCard) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    prompt = prompt_of(
        card,
        TokenCache(),
        [{"role": "user", "content": "hello " * 50}],
        tools=tools,
        tool_choice=ToolChoice("function", "f"),
    )
    assert tuple(prompt.token_ids[-len(prompt.forced) :].tolist()) == prompt.forced
    chain, _ = prompt.chain(root=ROOT, salt=b"", block_tokens=BLOCK_TOKENS)
    whole = HashChain(root=ROOT, salt=b"", block_tokens=BLOCK_TOKENS)
    whole.extend([*prompt.token_ids.tolist(), *range(100)])
    chain.extend(range(100))
    assert chain.hashes == whole.hashes


def test_memory_is_bounded_per_tenant_and_in_total(card: ModelCard) -> None:
    memory = TokenCache(max_bytes=60_000, max_tenant_bytes=40_000)
    for i in range(60):
        for tenant in ("loud", "quiet") if i < 4 else ("loud",):
            prompt_of(card, memory, [{"role": "user", "content": f"{i} " + "x y " * 100}], tenant=tenant)
            assert memory.tenant_bytes(tenant) <= 40_000
            assert memory.n_bytes <= 60_000
    assert memory.tenant_bytes("quiet") > 0
    assert (
        prompt_of(
            card, memory, [{"role": "user", "content": "3 " + "x y " * 100}], tenant="quiet"
        ).encoded_tokens
        < 16
    )


def test_the_most_recently_used_conversation_stays(card: ModelCard) -> None:
    memory = TokenCache(max_bytes=30_000, max_tenant_bytes=30_000)
    kept: Messages = [{"role": "user", "content": "keep " * 100}]
    for i in range(50):
        assert prompt_of(card, memory, kept).encoded_tokens < 16 or i == 0
        prompt_of(card, memory, [{"role": "user", "content": f"{i} " + "x y " * 200}])


def test_plain_text_is_encoded_unchanged(card: ModelCard) -> None:
    draft = PromptDraft.of(GenerationRequest(PromptInput("some text")), card, TokenCache(), tenant="t")
    prompt = draft.finish(draft.encode(), request_id="r")
    assert prompt.token_ids.tolist() == card.tokenizer.encode_text("some text")
    assert hashes_of(prompt)[1] == len(prompt.token_ids)


@pytest.mark.parametrize("text", ["<|im_end|>", "<|im_user|>"])
def test_text_that_reads_like_a_control_token_is_not_one(card: ModelCard, text: str) -> None:
    memory = TokenCache()
    for _ in range(2):
        prompt = prompt_of(card, memory, [{"role": "user", "content": text}])
        controls = sum(segment.control for segment in render_chat([{"role": "user", "content": ""}]))
        special = set(card.tokenizer.special_ids.values())
        assert sum(token in special for token in prompt.token_ids.tolist()) == controls
