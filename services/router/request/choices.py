"""Splits a request for several answers into one request for each choice. Pure.

Each choice is a separate request to the rest of the router. It is admitted, placed and sampled alone, and the
prefix cache shares the KV of the prompt. A choice's seed and id are functions of the request's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from services.router.request.types import ChatInput, GenerationRequest, PromptInput
from slipstream import bounds

_ID_CHARS = 128  # of a request id (validation.py)
_SUFFIX_CHARS = 4


def split_choices(
    request: GenerationRequest, inputs: Sequence[ChatInput | PromptInput], *, n: int
) -> Sequence[GenerationRequest]:
    """`n` requests for each input, in the order of the answer's choices. Raises InvalidArgument."""
    count = n * len(inputs)
    if count == 1:
        return (request,)
    bounds.CHOICES.check(count)
    return tuple(
        [
            request if index == 0 else _choice(request, inputs[index // n], index, within=index % n)
            for index in range(count)
        ]
    )


def with_id(requests: Sequence[GenerationRequest], request_id: str) -> Sequence[GenerationRequest]:
    """The requests of all choices under another id."""
    return [
        msgspec.structs.replace(request, request_id=choice_id(request_id, index))
        for index, request in enumerate(requests)
    ]


def _choice(
    request: GenerationRequest, source: ChatInput | PromptInput, index: int, *, within: int
) -> GenerationRequest:
    sampling = request.sampling
    if within and sampling.prompt_logprobs is not None:  # they are those of the prompt's first choice
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
    if within and sampling.seed is not None:
        sampling = msgspec.structs.replace(sampling, seed=choice_seed(sampling.seed, within))
    return msgspec.structs.replace(
        request, input=source, sampling=sampling, request_id=choice_id(request.request_id, index)
    )


def choice_seed(seed: int, index: int) -> int:
    """The seed of a prompt's choice. The first one has the request's own, so that `n` changes no answer."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}.{index}".encode(), digest_size=8, person=b"slipstream-n")
    return int.from_bytes(digest.digest(), "little", signed=True)


def choice_id(request_id: str, index: int) -> str:
    """The id of a choice's request: that of the request with the choice's index. Empty stays empty."""
    if index == 0 or not request_id:
        return request_id
    if len(request_id) > _ID_CHARS - _SUFFIX_CHARS:
        digest = hashlib.blake2b(request_id.encode(), digest_size=8).hexdigest()
        request_id = f"{request_id[: _ID_CHARS - _SUFFIX_CHARS - len(digest)]}{digest}"
    return f"{request_id}.{index}"
