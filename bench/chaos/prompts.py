"""The requests of the chaos: help-desk questions with fixed seeds, so that each has one right answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bench.demo.script import SYSTEM_PROMPT

MAX_TOKENS = 96
_HOURS = "The store is open from {first}:00 to {last}:00. Order {order} has {parcels} parcels. "
_QUESTIONS = (
    "When are you open?",
    "How many parcels has my order?",
    "What is the warranty on order {order}?",
    "Can I return order {order}?",
)


@dataclass(frozen=True, slots=True)
class ChaosPrompt:
    """One request; equal over the SDK and over HTTP."""

    messages: tuple[dict[str, str], ...]
    sampling: dict[str, Any]


def prompts(count: int) -> list[ChaosPrompt]:
    """`count` different prompts of about 600 tokens, every other one sampled at temperature 0.7."""
    found = []
    for number in range(count):
        order = 400_000 + 7_919 * number
        facts = [
            _HOURS.format(first=6 + line % 5, last=17 + line % 6, order=order + line, parcels=line % 9)
            for line in range(12)
        ]
        question = _QUESTIONS[number % len(_QUESTIONS)].format(order=order)
        messages = (
            {"role": "system", "content": SYSTEM_PROMPT + " " + "".join(facts)},
            {"role": "user", "content": question},
        )
        sampling: dict[str, Any] = (
            {"temperature": 0.7, "seed": number} if number % 2 else {"temperature": 0.0}
        )
        found.append(ChaosPrompt(messages, {**sampling, "max_tokens": MAX_TOKENS, "ignore_eos": True}))
    return found
