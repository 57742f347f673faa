"""Shared texts, tools and strategies for the tests of libs.text."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from libs.text.special_tokens import KIMI_OFFSETS, SINGULAR_SECTION_BEGIN

CORPUS = (
    "Where is my order? Your order 4711 left the warehouse yesterday, it's on its way.",
    'functions.get_weather:0 {"city": "Paris", "unit": "celsius"} ## Return of functions.get_weather:0',
    "namespace functions { type get_weather = (_: { city: string }) => any; }",
    "The weather in Paris is sunny and 21 degrees; the weather in Oslo is cold and wet.",
    "I'll look it up. We've found that you're right; don't worry, they'd say.",
    "user assistant system tool tool_declare",
    "你好，世界。天气很好。",
    "# Tools\n\n## functions\nnamespace functions {\n}\n",
)

WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
                "city": {"type": "string", "description": "Name of the city"},
                "days": {"type": "integer", "minimum": 1, "maximum": 7, "default": 1},
            },
            "required": ["city"],
        },
    },
}

SPECIAL_SPELLINGS = (
    *KIMI_OFFSETS,
    SINGULAR_SECTION_BEGIN,
    "<|reserved_token_405|>",
    "<|kimi_k25_video_placeholder|>",
)

any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=24)


def texts_with(spellings: Sequence[str]) -> st.SearchStrategy[str]:
    """Draw arbitrary text that contains some of the given spellings."""
    return st.lists(st.one_of(any_text, st.sampled_from(spellings)), max_size=6).map("".join)


hostile_text = texts_with(SPECIAL_SPELLINGS)
