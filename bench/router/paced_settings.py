"""Settings of a worker of no model that answers at a set pace."""

from __future__ import annotations

from dataclasses import dataclass

from libs.common.runtime.settings import setting
from libs.worker.process.settings import WorkerSettings


@dataclass(frozen=True)
class PacedSettings(WorkerSettings):
    """What a worker of either tier is given, and its pace."""

    drafts: str = setting("given to decode workers; changes nothing here", default="off")
    prefill_ms: float = setting("milliseconds of any prompt", default=0.0)
    prefill_us_per_token: float = setting("microseconds more for each token of it", default=0.0)
    step_ms: float = setting("milliseconds of a token", default=0.0)
    openai_port: int = setting("also serve HTTP here; 0 = do not", default=0)
