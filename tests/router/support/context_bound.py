"""The context bound of a fake worker, which its record may state wrongly."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from libs.common.cluster.worker_record import Worker
from slipstream import bounds
from slipstream.v1 import common_pb2


class ContextBound:
    """Part of a fake worker: refuses prompts and ends answers like an engine."""

    worker: Worker
    max_context_tokens: int = sys.maxsize

    def take_context(self, tokens: int, *, stated_tokens: int | None = None) -> None:
        """Take so many tokens of prompt and answer, and state them, or `stated_tokens`, in the record."""
        self.max_context_tokens = tokens
        stated = tokens if stated_tokens is None else stated_tokens
        self.worker = replace(self.worker, capacity={"max_context_tokens": stated})

    def check_context(self, context_tokens: int) -> None:
        """Raises ContextExceeded like an engine."""
        if context_tokens >= self.max_context_tokens:
            raise bounds.PROMPT_TOKENS.refused(
                "prompt", prompt_tokens=context_tokens, max_context_tokens=self.max_context_tokens
            )

    def finish(self, finish: Any, context_tokens: int) -> Any:
        """The finish reason of a sequence that has so many tokens now."""
        is_full = context_tokens >= self.max_context_tokens
        return finish or (common_pb2.FINISH_REASON_LENGTH if is_full else 0)
