"""Whether a request's prefill ends before its deadline, by the estimate of its length. Pure; milliseconds.

The estimate is a mean of recent prompts, of which one slow one may be the last. So a request that finds
nothing running is tried whatever the estimate: only a prompt that runs corrects it. For the same reason a
prompt far longer than recent ones counts for less. Beside others a late request is refused. Where its own
prompt is the cause by far, no repetition helps; else others are the cause.
"""

from __future__ import annotations

from services.router.admission.forecast import PredictedLoad
from services.router.admission.types import AdmissionRequest, Priority

# Estimates are wrong by less, mostly; a refusal that claims more than "busy" has to be right.
_SURE_FACTOR = 2.0


def is_late(ask: AdmissionRequest, now_ms: float, predicted: PredictedLoad) -> bool:
    """Whether its first token would come after its deadline even if it began now."""
    if ask.deadline_ms is None:
        return False
    return now_ms + predicted.wait_ms + predicted.least_prefill_ms > ask.deadline_ms


def is_late_alone(ask: AdmissionRequest, now_ms: float, predicted: PredictedLoad) -> bool:
    """Whether it would be late by far without all others. A job is not: it waits for another estimate."""
    if ask.deadline_ms is None or ask.priority is Priority.JOB:
        return False
    return predicted.least_prefill_ms > _SURE_FACTOR * max(ask.deadline_ms - now_ms, 0.0)


def late_message(left_ms: float, prefill_ms: float) -> str:
    """The words for a client whose time limit is too short for its prompt."""
    return (
        f"the time limit leaves {max(left_ms, 0.0):.0f} ms, and the prompt takes about "
        f"{prefill_ms:.0f} ms on an idle cluster"
    )
