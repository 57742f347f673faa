"""Kimi's special tokens: names, and offsets from the end of the base vocabulary.

Kimi reserves 256 ids after the base ranks. With K2.5's 163,584 base ranks the offsets below give
K2.5's own ids (`<|im_end|>` = 163586); a smaller vocabulary keeps the same offsets. Source: the
`added_tokens_decoder` of moonshotai/Kimi-K2.5's tokenizer_config.json.
"""

from __future__ import annotations

from collections.abc import Mapping

RESERVED_TOKENS = 256

BOS = "[BOS]"
EOS = "[EOS]"
IM_END = "<|im_end|>"
IM_USER = "<|im_user|>"
IM_ASSISTANT = "<|im_assistant|>"
START_HEADER = "<|start_header_id|>"
END_HEADER = "<|end_header_id|>"
EOT = "[EOT]"
IM_SYSTEM = "<|im_system|>"
TOOL_CALLS_SECTION_BEGIN = "<|tool_calls_section_begin|>"
TOOL_CALLS_SECTION_END = "<|tool_calls_section_end|>"
TOOL_CALL_BEGIN = "<|tool_call_begin|>"
TOOL_CALL_ARGUMENT_BEGIN = "<|tool_call_argument_begin|>"
TOOL_CALL_END = "<|tool_call_end|>"
IM_MIDDLE = "<|im_middle|>"
MEDIA_BEGIN = "<|media_begin|>"
MEDIA_CONTENT = "<|media_content|>"
MEDIA_END = "<|media_end|>"
MEDIA_PAD = "<|media_pad|>"
THINK_BEGIN = "<think>"
THINK_END = "</think>"
UNK = "[UNK]"
PAD = "[PAD]"

# A spelling that the model sometimes writes as ordinary text. No special id stands for it.
SINGULAR_SECTION_BEGIN = "<|tool_call_section_begin|>"

KIMI_OFFSETS: Mapping[str, int] = {
    BOS: 0,
    EOS: 1,
    IM_END: 2,
    IM_USER: 3,
    IM_ASSISTANT: 4,
    START_HEADER: 6,
    END_HEADER: 7,
    EOT: 9,
    IM_SYSTEM: 10,
    TOOL_CALLS_SECTION_BEGIN: 11,
    TOOL_CALLS_SECTION_END: 12,
    TOOL_CALL_BEGIN: 13,
    TOOL_CALL_ARGUMENT_BEGIN: 14,
    TOOL_CALL_END: 15,
    IM_MIDDLE: 17,
    MEDIA_BEGIN: 18,
    MEDIA_CONTENT: 19,
    MEDIA_END: 20,
    MEDIA_PAD: 21,
    THINK_BEGIN: 22,
    THINK_END: 23,
    UNK: 254,
    PAD: 255,
}

# The tokens that end an answer: Kimi's own and its equivalents.
ANSWER_ENDS = (IM_END, EOS, EOT)

# All tokens of a call's form.
TOOL_CALL_TOKENS = (
    TOOL_CALLS_SECTION_BEGIN,
    TOOL_CALLS_SECTION_END,
    TOOL_CALL_BEGIN,
    TOOL_CALL_ARGUMENT_BEGIN,
    TOOL_CALL_END,
)

# The tokens of the chat template and the response parser. A vocabulary without one of them is refused.
REQUIRED_TOKENS: frozenset[str] = frozenset(
    {
        IM_END,
        IM_USER,
        IM_ASSISTANT,
        IM_SYSTEM,
        IM_MIDDLE,
        *TOOL_CALL_TOKENS,
        THINK_BEGIN,
        THINK_END,
    }
)


def special_ids(base_vocab_tokens: int, names: Mapping[int, str] | None = None) -> dict[str, int]:
    """All 256 special names with their ids; `names` (id -> name) overrides Kimi's own names.

    An id without a name is called `<|reserved_token_{id}|>`, as Kimi's tokenizer does.
    """
    if names is None:
        names = {base_vocab_tokens + offset: name for name, offset in KIMI_OFFSETS.items()}
    last = base_vocab_tokens + RESERVED_TOKENS
    outside = sorted(i for i in names if not base_vocab_tokens <= i < last)
    if outside:
        raise ValueError(f"special ids {outside} are outside of [{base_vocab_tokens}, {last})")
    ids = {names.get(i, f"<|reserved_token_{i}|>"): i for i in range(base_vocab_tokens, last)}
    if len(ids) != RESERVED_TOKENS:
        raise ValueError("two special tokens have the same name")
    missing = sorted(REQUIRED_TOKENS - ids.keys())
    if missing:
        raise ValueError(f"the vocabulary lacks the special tokens {missing}")
    return ids
