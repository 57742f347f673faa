"""The fitted speed of each worker, and of each role for workers without reports. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TypeVar

from msgspec.structs import replace

from services.router.placement.cost_model import (
    MAX_OFF,
    DecodeFit,
    DecodeModel,
    PrefillFit,
    PrefillModel,
    PrefillReport,
)

# A new worker has the rates of its role once the role has this many reports.
_ROLE_REPORTS = 8
# From then on every fourth report updates the role.
_ROLE_SHARE = 4
# After so long without a report the rates of a worker weigh 1/e.
DECAY_S = 30.0

# The rates before any report.
_ANY_PREFILL = PrefillModel()
# As far as a fit goes, so that a stated speed leads no further.
_LEAST_TOKEN_MS, _MOST_TOKEN_MS = _ANY_PREFILL.token_ms / MAX_OFF, _ANY_PREFILL.token_ms * MAX_OFF
_ANY_DECODE = DecodeModel()

_Fit = TypeVar("_Fit", PrefillFit, DecodeFit)


class WorkerModels:
    """Fits by worker: each process of a worker has a separate name."""

    def __init__(self) -> None:
        self._prefill: dict[str, PrefillFit] = {}
        self._decode: dict[str, DecodeFit] = {}
        self._all_prefill = PrefillFit()
        self._prefill_reports = 0
        self._all_decode = DecodeFit()

    def prefill_model(self, worker: str, *, tokens_per_s: float = 0.0) -> PrefillModel:
        """How fast the worker computes prompts. `tokens_per_s`: the speed in its load report, 0 = none."""
        fit = self._prefill.get(worker)
        if fit is not None:
            return fit.model
        if self._all_prefill.reports >= _ROLE_REPORTS:
            return self._all_prefill.model
        if not tokens_per_s > 0:
            return _ANY_PREFILL
        return replace(_ANY_PREFILL, token_ms=min(max(1e3 / tokens_per_s, _LEAST_TOKEN_MS), _MOST_TOKEN_MS))

    def decode_model(self, worker: str) -> DecodeModel:
        """How fast the worker decodes and pulls."""
        fit = self._decode.get(worker)
        if fit is not None:
            return fit.model
        return self._all_decode.model if self._all_decode.reports >= _ROLE_REPORTS else _ANY_DECODE

    def observe_prefill(self, worker: str, report: PrefillReport) -> None:
        """Add the time of a first token."""
        fit = self._prefill.get(worker)
        if fit is None:
            fit = self._prefill[worker] = PrefillFit(self.prefill_model(worker))
        role_is_known = self._all_prefill.reports >= _ROLE_REPORTS
        if role_is_known:
            # Reports are noisy: fitted to its own reports alone, each of equal workers would look different.
            fit.set_prior_from(self._all_prefill)
        self._prefill_reports += 1
        # The rates of a role change slowly.
        fit.observe(report)
        if not role_is_known or not self._prefill_reports % _ROLE_SHARE:
            self._all_prefill.observe(report)

    def observe_step(self, worker: str, *, sequences: int, context_tokens: int, step_ms: float) -> None:
        """Add the step time in a decode worker's load report."""
        for fit in (self._decode_fit(worker), self._all_decode):
            fit.observe_step(sequences=sequences, context_tokens=context_tokens, step_ms=step_ms)

    def observe_pull(self, worker: str, *, n_bytes: int, transfer_ms: float) -> None:
        """Add the transfer time of a sequence that ended."""
        for fit in (self._decode_fit(worker), self._all_decode):
            fit.observe_pull(n_bytes=n_bytes, transfer_ms=transfer_ms)

    def decay(self, elapsed_s: float) -> None:
        """Move the rates of workers without new reports towards those of their role, every few seconds.

        Without this, a worker that is avoided because it was slow could never show that it is fast again.
        """
        kept = math.exp(-elapsed_s / DECAY_S)
        _decay(self._prefill.values(), self._all_prefill, kept)
        _decay(self._decode.values(), self._all_decode, kept)

    def remove(self, worker: str) -> None:
        """Drop a departed worker. Its reports still count for the role. Idempotent."""
        self._prefill.pop(worker, None)
        self._decode.pop(worker, None)

    def known(self) -> Mapping[str, PrefillModel | DecodeModel]:
        """All models by worker."""
        models: dict[str, PrefillModel | DecodeModel] = {w: f.model for w, f in self._prefill.items()}
        return models | {w: f.model for w, f in self._decode.items()}

    def _decode_fit(self, worker: str) -> DecodeFit:
        fit = self._decode.get(worker)
        if fit is None:
            fit = self._decode[worker] = DecodeFit(self.decode_model(worker))
        return fit


def _decay(fits: Iterable[_Fit], role: _Fit, kept: float) -> None:
    for fit in fits:
        if role.reports >= _ROLE_REPORTS:
            fit.set_prior_from(role)
        fit.decay(kept)
