"""What was learnt of each worker's speed, and of each role's for workers not yet known. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TypeVar

from msgspec.structs import replace

from services.router.placement.cost_model import DecodeFit, DecodeModel, PrefillFit, PrefillModel

# A new worker is taken to be like its role once the role is known this well.
_ROLE_REPORTS = 8
# From then on the role learns from each so-manieth report.
_ROLE_SHARE = 4
# What is known of a worker that nothing is heard of counts for 1/e of what it did after so long.
FADE_S = 30.0

# Workers of which nothing is known yet.
_ANY_PREFILL = PrefillModel()
_ANY_DECODE = DecodeModel()

_Fit = TypeVar("_Fit", PrefillFit, DecodeFit)


class WorkerModels:
    """Fits by worker; the name of a worker is that of one run of it."""

    def __init__(self) -> None:
        self._prefill: dict[str, PrefillFit] = {}
        self._decode: dict[str, DecodeFit] = {}
        self._all_prefill = PrefillFit()
        self._prefill_reports = 0
        self._all_decode = DecodeFit()

    def prefill_model(self, worker: str, *, tokens_per_s: float = 0.0) -> PrefillModel:
        """How fast the worker computes prompts. `tokens_per_s`: what it says itself, 0 = nothing."""
        fit = self._prefill.get(worker)
        if fit is not None:
            return fit.model
        if self._all_prefill.reports >= _ROLE_REPORTS:
            return self._all_prefill.model
        return replace(_ANY_PREFILL, token_ms=1e3 / tokens_per_s) if tokens_per_s else _ANY_PREFILL

    def decode_model(self, worker: str) -> DecodeModel:
        """How fast the worker decodes and pulls."""
        fit = self._decode.get(worker)
        if fit is not None:
            return fit.model
        return self._all_decode.model if self._all_decode.reports >= _ROLE_REPORTS else _ANY_DECODE

    def observe_prefill(
        self,
        worker: str,
        *,
        ahead_tokens: int,
        ahead_requests: int,
        uncached_tokens: int,
        prompt_tokens: int,
        dram_tokens: int,
        nvme_tokens: int,
        duration_ms: float,
        peer_tokens: int = 0,
        longer_tokens: int = 0,
    ) -> None:
        """A prompt got its first token; see PrefillFit."""
        fit = self._prefill.get(worker)
        if fit is None:
            fit = self._prefill[worker] = PrefillFit(self.prefill_model(worker))
        role_is_known = self._all_prefill.reports >= _ROLE_REPORTS
        if role_is_known:
            # Reports are noisy: by its own alone each of equal workers would look different.
            fit.lean_on(self._all_prefill)
        self._prefill_reports += 1
        # What the role is like changes slowly.
        role_too = not role_is_known or not self._prefill_reports % _ROLE_SHARE
        for each in (fit, self._all_prefill)[: 1 + role_too]:
            each.observe(
                ahead_tokens=ahead_tokens,
                ahead_requests=ahead_requests,
                uncached_tokens=uncached_tokens,
                prompt_tokens=prompt_tokens,
                dram_tokens=dram_tokens,
                nvme_tokens=nvme_tokens,
                duration_ms=duration_ms,
                peer_tokens=peer_tokens,
                longer_tokens=longer_tokens,
            )

    def observe_step(self, worker: str, *, sequences: int, context_tokens: int, step_ms: float) -> None:
        """A decode worker's report."""
        for fit in (self._decode_fit(worker), self._all_decode):
            fit.observe_step(sequences=sequences, context_tokens=context_tokens, step_ms=step_ms)

    def observe_pull(self, worker: str, *, n_bytes: int, transfer_ms: float) -> None:
        """A sequence ended that had pulled its prompt's KV."""
        for fit in (self._decode_fit(worker), self._all_decode):
            fit.observe_pull(n_bytes=n_bytes, transfer_ms=transfer_ms)

    def fade(self, elapsed_s: float) -> None:
        """To be called every few seconds. A worker of which nothing was heard meanwhile is taken to be more
        and more like its role: one that was slow, and is avoided for it, would never show that it is quick
        again."""
        kept = math.exp(-elapsed_s / FADE_S)
        _fade(self._prefill.values(), self._all_prefill, kept)
        _fade(self._decode.values(), self._all_decode, kept)

    def forget(self, worker: str) -> None:
        """The worker is gone; what it taught about its role stays. Idempotent."""
        self._prefill.pop(worker, None)
        self._decode.pop(worker, None)

    def known(self) -> Mapping[str, PrefillModel | DecodeModel]:
        """All models by worker, to look at."""
        models: dict[str, PrefillModel | DecodeModel] = {w: f.model for w, f in self._prefill.items()}
        return models | {w: f.model for w, f in self._decode.items()}

    def _decode_fit(self, worker: str) -> DecodeFit:
        fit = self._decode.get(worker)
        if fit is None:
            fit = self._decode[worker] = DecodeFit(self.decode_model(worker))
        return fit


def _fade(fits: Iterable[_Fit], role: _Fit, kept: float) -> None:
    for fit in fits:
        if role.reports >= _ROLE_REPORTS:
            fit.lean_on(role)
        fit.fade(kept)
