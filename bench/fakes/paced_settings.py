"""Settings of the worker without a model that answers at a set pace."""

from __future__ import annotations

from dataclasses import dataclass

from libs.common.runtime.settings import setting
from libs.worker.process.settings import WorkerSettings


@dataclass(frozen=True)
class PacedSettings(WorkerSettings):
    """The settings of a worker of either tier, and its pace."""

    drafts: str = setting("accepted as of decode workers, without effect", default="off")
    memory_bytes: int | None = setting("accepted as of an engine, without effect", default=None)
    prefill_ms: float = setting("milliseconds of any prompt", default=0.0)
    prefill_us_per_token: float = setting("additional microseconds for each token of a prompt", default=0.0)
    step_ms: float = setting("milliseconds of a token", default=0.0)
