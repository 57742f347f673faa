"""The shared prefix: which blocks of a prompt all tenants share."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from libs.common.block_hash import NOTHING_SHARED, as_tokens, tenant_salt
from libs.text.chat_template import encode_chat
from services.router.request.model_card import ModelCard
from services.router.request.prompt_salts import PromptSalts, system_prompt_ids

few = st.lists(st.integers(0, 3), max_size=20)


@given(few, few)
def test_blocks_are_shared_while_the_prompt_equals_the_prefix(prefix: list[int], prompt: list[int]) -> None:
    found = PromptSalts(b"key", as_tokens(prefix)).shared(as_tokens(prompt), block_tokens=3)
    n_equal = 0
    while n_equal < min(len(prefix), len(prompt)) and prefix[n_equal] == prompt[n_equal]:
        n_equal += 1
    assert found.n_blocks == n_equal // 3


def test_nothing_is_shared_by_default() -> None:
    salts = PromptSalts()
    assert salts.shared(as_tokens([1] * 100), block_tokens=1) == NOTHING_SHARED
    assert salts.of_tenant("anna") == tenant_salt("anna")
    assert PromptSalts(b"key").of_tenant("anna") == tenant_salt("anna", key=b"key")


def test_the_shared_prefix_begins_each_conversation_with_that_system_prompt(card: ModelCard) -> None:
    text = "You answer in one sentence. " * 5
    ids = system_prompt_ids(card.tokenizer, text)
    for question in ("Hello", "What is the time?"):
        messages = [{"role": "system", "content": text}, {"role": "user", "content": question}]
        whole = encode_chat(card.tokenizer, messages).token_ids
        assert whole[: len(ids)] == ids.tolist()
        shared = PromptSalts(b"", ids).shared(as_tokens(whole), block_tokens=4)
        assert shared.n_blocks == len(ids) // 4 > 0
