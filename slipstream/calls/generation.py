"""The call of one generation, as both clients make it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from slipstream.calls.callers import Metadata
from slipstream.calls.resume import Resumption
from slipstream.v1 import router_pb2


def begin_generation(
    request: router_pb2.GenerateRequest,
    metadata: Metadata,
    *,
    timeout_s: float,
    resume_within_s: float,
    max_retries: int,
) -> tuple[Resumption, Callable[[Any, Resumption], Any]]:
    """The state of the generation, and what calls a router's stub in that state, at first and again."""
    now_s = time.monotonic()
    resumption = Resumption(
        request,
        now_s=now_s,
        deadline_s=now_s + timeout_s,
        within_s=resume_within_s,
        max_retries=max_retries,
    )

    def call(stub: Any, resumption: Resumption) -> Any:
        left_s = resumption.left_s(time.monotonic())
        pairs = (*metadata, *resumption.metadata.items())
        return stub.Generate(resumption.request(), timeout=left_s, metadata=pairs)

    return resumption, call
