"""Refuses prompts that exceed the context before they wait for a place, or get a retryable refusal."""

from __future__ import annotations

import asyncio
import contextlib

from libs.common import service_bounds
from services.router.admission.gate import AdmissionGate
from services.router.execution.context import RouterContext
from services.router.execution.prompt_encoding import encode_prompt
from services.router.request.types import Caller, GenerationRequest

# A prompt may have this many times the tokens that are estimated from its characters.
_MAX_ESTIMATE_ERROR = 2


class PromptLengths:
    """Encodes the prompts that may be too long, one at a time."""

    def __init__(self, context: RouterContext, gate: AdmissionGate) -> None:
        self._context = context
        self._gate = gate
        self.turn = asyncio.Lock()  # of the prompt that is encoded
        self._n_waiting = 0

    def may_exceed(self, chars: int) -> bool:
        """Whether a prompt of so many characters may exceed the context."""
        _, estimated_tokens = self._gate.estimate(chars)
        return _MAX_ESTIMATE_ERROR * estimated_tokens >= self._context.card.max_context_tokens

    async def check(self, request: GenerationRequest, caller: Caller) -> None:
        """Encode a prompt. Raises InvalidArgument if it exceeds the context.

        At most MAX_MEASURED wait. Further requests skip the check: the admission queue, which respects
        classes and tenants, is the place to wait.
        """
        if self._n_waiting >= service_bounds.MAX_MEASURED:
            return
        self._n_waiting += 1
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(caller.deadline_s), self.turn:
                    await encode_prompt(self._context, request, tenant=caller.tenant, request_id="")
        finally:
            self._n_waiting -= 1
