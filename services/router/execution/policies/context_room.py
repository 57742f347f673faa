"""How much context an attempt asks of its workers, and where the workers' bounds end its answer. Pure.

A request that states no bound of its answer runs on any worker that takes its prompt and OPEN_OUTPUT_TOKENS
more, rather than on the workers with the longest context only. The decode worker that brings its first token
caps the answer: prompt and answer fit into that worker's context. Later attempts keep the cap. Where no
worker has so much room any more, the answer goes on at one with less, which lowers the cap. A cap never
rises, so a failover changes no token before the answer's end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

# The room behind its prompt that a request without a bound of its answer asks of its workers.
OPEN_OUTPUT_TOKENS = 1024


class OutputRoom(msgspec.Struct, frozen=True, gc=False):
    """The lengths of an answer, in tokens, that a request asks room for. The first that workers have counts.

    `is_open`: workers' bounds may end the answer before `max_tokens`. The fields are those of the client's
    request that errors name.
    """

    lengths_tokens: tuple[int, ...] = ()  # empty: `max_tokens`
    is_open: bool = False
    max_tokens_field: str = "max_tokens"
    prompt_field: str = "messages"


class ContextRoom(msgspec.Struct, frozen=True, gc=False):
    """The context that the workers of an attempt must take, prompt and answer, in tokens.

    A prefill worker makes the first token only, and goes on to a second one at a decode worker.
    """

    prefill_tokens: int = 0
    decode_tokens: int = 0


def list_output_lengths(
    max_tokens: int, *, stated_tokens: int | None, is_capped: bool, least_tokens: int = 1
) -> tuple[int, ...]:
    """The lengths that a request asks room for before it has a token.

    `max_tokens` is the bound of its answer, and `stated_tokens` what the client stated. With `is_capped` the
    context may end an answer before that. `least_tokens` is the shortest answer that serves the client.
    """
    shortest = min(max_tokens, max(1, least_tokens))
    usual = min(max_tokens, shortest - 1 + OPEN_OUTPUT_TOKENS)
    if stated_tokens is None:
        return _distinct((usual, shortest))
    return _distinct((max_tokens, usual, shortest)) if is_capped else (max_tokens,)


def list_rooms(
    output_room: OutputRoom, *, prompt_tokens: int, emitted_tokens: int, max_tokens: int
) -> Sequence[ContextRoom]:
    """The rooms to ask of the workers of the next attempt; the first room that they have counts.

    `max_tokens` is the bound of the whole answer, of which `emitted_tokens` were emitted.
    """
    context_tokens, left = prompt_tokens + emitted_tokens, max_tokens - emitted_tokens
    lengths = output_room.lengths_tokens or (left,)
    if emitted_tokens:
        lengths = _distinct((left, min(left, OPEN_OUTPUT_TOKENS), 1))
    return [ContextRoom(context_tokens + min(n, 2), context_tokens + n) for n in lengths]


def capped_output_tokens(max_tokens: int, *, prompt_tokens: int, worker_tokens: int | None) -> int:
    """The longest answer within `max_tokens` that fits behind the prompt at a decode worker.

    `worker_tokens` is the longest context that the worker states; None: it states none.
    """
    return max_tokens if worker_tokens is None else max(1, min(max_tokens, worker_tokens - prompt_tokens))


def _distinct(lengths: Iterable[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(lengths))
