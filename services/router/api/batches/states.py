"""The states of a batch, and which follows which. Pure."""

from __future__ import annotations

import enum

import msgspec


class BatchState(enum.StrEnum):
    """The states of a batch, as OpenAI names them. One that a later version stored reads as IN_PROGRESS."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @classmethod
    def _missing_(cls, value: object) -> BatchState:
        return cls.IN_PROGRESS


_S = BatchState
FINAL = frozenset({_S.COMPLETED, _S.FAILED, _S.EXPIRED, _S.CANCELLED})
ACTIVE = tuple(state for state in BatchState if state not in FINAL)
# The states in which a client may cancel.
CANCELLABLE = frozenset({_S.VALIDATING, _S.IN_PROGRESS, _S.FINALIZING})


class LineCounts(msgspec.Struct, frozen=True, gc=False):
    """The requests of a batch: all, those with an answer, those that failed or were taken back."""

    total: int = 0
    completed: int = 0
    failed: int = 0

    @property
    def left(self) -> int:
        """The requests that have not ended."""
        return self.total - self.completed - self.failed


def has_ended(state: BatchState, counts: LineCounts, *, is_late: bool) -> bool:
    """Whether no request runs any more, so that the files can be written.

    A batch that is late or being cancelled submits no further ones, and its jobs are taken back.
    """
    return is_late or state is _S.CANCELLING or counts.left == 0


def end_of(state: BatchState, *, is_late: bool, n_unfinished: int) -> BatchState:
    """The final state of a batch whose files are written."""
    if state is _S.CANCELLING:
        return _S.CANCELLED
    return _S.EXPIRED if is_late and n_unfinished else _S.COMPLETED
