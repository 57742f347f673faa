"""The table of sampling parameters: the name, type, default and range of each. Pure.

A field of `SamplingParams` that is annotated with a `Range` is plain. Its name is the same in JSON bodies, in
the messages `Sampling` and `SamplingParams` and in the engine. The router and the workers read, check and
copy all plain fields by `SAMPLING_RANGES`. Each step has separate code for the other fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, TypedDict, get_type_hints

from slipstream.bound import Range


class SamplingArguments(TypedDict, total=False):
    """The arguments that a client may state; those it leaves out, or that are None, take the default."""

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    logit_bias: Mapping[int, float] | None
    seed: int | None
    max_tokens: int | None
    min_tokens: int | None
    stop_token_ids: Sequence[int] | None
    top_logprobs: int | None
    prompt_logprobs: int | None
    ignore_eos: bool | None


@dataclass(frozen=True, slots=True)
class OutputConstraint:
    """The constraint of an answer's tokens (docs/structured-output.md).

    The grammar, in llguidance's JSON form, holds the answer, or with `awaits_calls` only its tool calls.
    """

    grammar: str
    awaits_calls: bool = False  # free text until a tool call begins
    thinking: bool = False  # the output begins inside the reasoning, which is free
    forced: tuple[int, ...] = ()  # the prompt's last tokens, with which the answer begins
    field: str = "grammar"  # of the client's request, for errors
    is_closing: bool = False  # the limit of tokens has changed a token of an earlier attempt


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the engine chooses tokens. The router fills every default."""

    temperature: Annotated[float, Range("temperature", 0, 2, "0: greedy.")] = 1.0
    top_p: Annotated[float, Range("top_p", 0, 1, "0: only the most likely token.")] = 1.0
    top_k: Annotated[int, Range("top_k", 0, 1 << 18, "0: off; -1 too over HTTP.", whole=True)] = 0
    min_p: Annotated[float, Range("min_p", 0, 1, "Share of the most likely token's probability.")] = 0.0
    presence_penalty: Annotated[float, Range("presence_penalty", -2, 2)] = 0.0
    frequency_penalty: Annotated[float, Range("frequency_penalty", -2, 2)] = 0.0
    repetition_penalty: Annotated[float, Range("repetition_penalty", 0.125, 8, "1: off.")] = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0  # u64
    max_tokens: int = 16  # includes tokens that earlier attempts emitted
    min_tokens: int = 0  # no stop token before this many
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False  # stop tokens do not stop
    banned_token_ids: tuple[int, ...] = ()  # never sampled
    constraint: OutputConstraint | None = None
    logprobs: int | None = None  # None = off; n = of the sampled token and the n most likely ones
    prompt_logprobs: int | None = None  # None = off; n = of each prompt token and the n most likely ones


def _ranges() -> dict[str, Range]:
    hints = get_type_hints(SamplingParams, include_extras=True)
    annotated = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
    return {name: row for name, rows in annotated.items() for row in rows if isinstance(row, Range)}


SAMPLING_RANGES: Mapping[str, Range] = _ranges()
SAMPLING_DEFAULTS: Mapping[str, float] = {name: getattr(SamplingParams(), name) for name in SAMPLING_RANGES}
