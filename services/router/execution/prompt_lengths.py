"""Refuses prompts that exceed the context before they wait for a place, or get a retryable refusal."""

from __future__ import annotations

import asyncio
import contextlib

from libs.common import service_bounds
from services.router.admission.gate import AdmissionGate
from services.router.execution.context import RouterContext
from services.router.execution.prompt_encoding import encode_prompt
from services.router.execution.running_request import RunningRequest
from services.router.request.types import Caller, GenerationRequest, PromptInput
from services.router.request.validation import check_context
from slipstream import errors

# A prompt may have this many times the tokens that are estimated from its characters.
_MAX_ESTIMATE_ERROR = 2


class PromptLengths:
    """Encodes the prompts that may be too long, one at a time."""

    def __init__(self, context: RouterContext, gate: AdmissionGate) -> None:
        self._context = context
        self._gate = gate
        self.turn = asyncio.Lock()  # of the prompt that is encoded
        self._n_waiting = 0
        # Of the queued prompt that waits for `turn`: the others in the queue come after new prompts.
        self._queued_turn = asyncio.Lock()

    def may_exceed(self, chars: int) -> bool:
        """Whether a prompt of so many characters may exceed the context."""
        _, estimated_tokens = self._gate.estimate(chars)
        return _MAX_ESTIMATE_ERROR * estimated_tokens >= self._context.card.max_context_tokens

    def check_ids(self, request: GenerationRequest) -> None:
        """Raises InvalidArgument for a prompt of ids that exceeds the context: its tokens are known."""
        if isinstance(request.input, PromptInput) and request.input.token_ids:
            check_context(
                request,
                prompt_tokens=len(request.input.token_ids),
                max_context_tokens=self._context.card.max_context_tokens,
            )

    async def check(self, request: GenerationRequest, caller: Caller) -> bool:
        """Encode a prompt. Raises InvalidArgument if it exceeds the context.

        At most MAX_MEASURED wait. For further requests this is False: the admission queue, which respects
        classes and tenants, is the place to wait, and `check_queued` goes on there.
        """
        self.check_ids(request)
        if self._n_waiting >= service_bounds.MAX_MEASURED:
            return False
        self._n_waiting += 1
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(caller.deadline_s), self.turn:
                    await self._encode(request, caller)
        finally:
            self._n_waiting -= 1
        return True

    async def check_queued(self, run: RunningRequest, request: GenerationRequest, caller: Caller) -> None:
        """End a request whose prompt exceeds the context while it waits for admission, not by its deadline.

        Cancelled when the request ends.
        """
        async with self._queued_turn, self.turn:
            if run.is_queued:
                try:
                    await self._encode(request, caller)
                except errors.SlipstreamError as error:
                    if run.is_queued and isinstance(error, errors.InvalidArgument):
                        run.end(error.with_traceback(None))

    async def _encode(self, request: GenerationRequest, caller: Caller) -> None:
        await encode_prompt(self._context, request, tenant=caller.tenant, request_id="")
