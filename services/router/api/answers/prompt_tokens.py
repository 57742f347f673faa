"""The tokens of a prompt that does not run: all of them, whatever the size of the context."""

from __future__ import annotations

import asyncio
from functools import partial

from libs.common.block_hash import TokenArray
from services.router.execution.prompt_encoding import encode_ids
from services.router.execution.request_manager import RequestManager
from services.router.request.types import Caller, GenerationRequest
from services.router.request.validation import check_values


async def prompt_ids(
    manager: RequestManager, request: GenerationRequest, caller: Caller, *, n_bytes: int
) -> TokenArray:
    """The ids of a prompt whose message has so many bytes. Raises InvalidArgument, and as `read` does.

    The caller has a slot of `token_slots`. One without a deadline gets the default one.
    """
    caller = caller.within_default(asyncio.get_running_loop().time())
    await manager.read(caller, partial(check_values, request, manager.context.card), n_bytes=n_bytes)
    with manager.texts.holding(caller.tenant, request.text_chars):
        return await encode_ids(manager.context, request, caller)


async def count_tokens(
    manager: RequestManager, request: GenerationRequest, caller: Caller, *, n_bytes: int
) -> int:
    """The number of ids of `prompt_ids`. Raises Overloaded when the tenant has no slot in time, too."""
    async with manager.token_slots.serving(caller.tenant, n_bytes):
        return len(await prompt_ids(manager, request, caller, n_bytes=n_bytes))
