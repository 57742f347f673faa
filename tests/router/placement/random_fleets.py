"""Random requests and fleets from a seed. Many of their numbers are equal, to reach all tie-breaks."""

from __future__ import annotations

import random

from services.router.placement.cost_model import DecodeModel, PrefillModel
from services.router.placement.types import (
    DecodeWorker,
    HeldTokens,
    KvStore,
    PlacementFleet,
    PlacementRequest,
    PrefillWorker,
)

_GROUPS = (("socket", ""), ("mooncake", ""), ("socket", "far"))


class RandomFleets:
    """Draws a request and a fleet. Each instance has its own style: sizes, ties, sources, refusals."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        draw = self._random
        self._groups = draw.choice((_GROUPS[:1], _GROUPS[:1], _GROUPS))
        self._tokens = draw.choice(((0,), (0, 500, 4_000), range(0, 60_000)))
        self._models = draw.choice((1, 2, 50))
        self._refusals = draw.choice((0.0, 0.0, 0.2))
        self._prompt_tokens = draw.choice((1, 2, 64, draw.randint(3, 2_000), draw.randint(2_000, 200_000)))
        self._n_prefill, self._n_decode = draw.randint(0, 9), draw.randint(1, 9)
        self._n_stores = draw.choice((0, 0, 1, 4))
        self._held_share = draw.choice((0.0, 0.3, 1.0))

    def fleet(self) -> PlacementFleet:
        """A fleet of this style."""
        draw = self._random
        return PlacementFleet(
            tuple(self._prefill(f"p{i}") for i in range(self._n_prefill)),
            tuple(self._decode(f"d{i}") for i in range(self._n_decode)),
            tuple(self._store(f"k{i}") for i in draw.sample(range(self._n_stores), self._n_stores)),
            {"far": draw.choice((0.0, 80.0))},
        )

    def request(self) -> PlacementRequest:
        """A request of this style, which knows some workers that are not there."""
        draw, prompt = self._random, self._prompt_tokens
        prefill = [f"p{i}" for i in range(self._n_prefill)]
        decode = [f"d{i}" for i in range(self._n_decode)]
        stores = [f"k{i}" for i in range(self._n_stores)]
        expected, confirmed = self._held([*prefill, "gone"]), self._held([*prefill, "gone"])
        return PlacementRequest(
            prompt_tokens=prompt,
            seed=draw.choice((0, draw.getrandbits(64))),
            fingerprint="A",
            output_tokens=draw.choice((1, 256)),
            prefill_expected_tokens=expected,
            prefill_confirmed_tokens=confirmed,
            prefill_lendable_tokens={
                name: min(tokens, expected.get(name, 0))
                for name, tokens in confirmed.items()
                if draw.random() < 0.8
            },
            decode_expected_tokens=self._held([*decode, "gone"]),
            store_held={
                name: HeldTokens(tokens, draw.randint(0, tokens))
                for name, tokens in self._held([*stores, "gone"]).items()
            },
            content_key=draw.randbytes(4),
            requested_prefill=draw.choice(prefill) if prefill and draw.random() < 0.1 else "",
            may_skip_prefill=draw.random() < 0.5,
        )

    def _held(self, names: list[str]) -> dict[str, int]:
        draw, prompt = self._random, self._prompt_tokens
        equal = draw.randint(0, prompt)
        return {
            name: draw.choice((0, equal, equal, draw.randint(0, prompt + 64)))
            for name in names
            if draw.random() < self._held_share
        }

    def _identity(self) -> dict[str, str]:
        draw = self._random
        transport, region = draw.choice(self._groups)
        return {
            "fingerprint": "B" if draw.random() < self._refusals else "A",
            "transport": transport,
            "region": region,
            "refused": "does not answer" if draw.random() < self._refusals else "",
        }

    def _prefill(self, instance: str) -> PrefillWorker:
        draw = self._random
        queue = tuple(draw.choice(self._tokens) for _ in range(draw.choice((0, 0, 1, 6))))
        others = draw.choice((0, 0, 1, 5))
        return PrefillWorker(
            instance,
            queued_tokens=sum(queue) + (draw.choice(self._tokens) if others else 0),
            queued_requests=len(queue) + draw.choice((0, others)),
            queue=queue,
            last_cold=draw.choice((0, 0, 1, draw.randint(0, 99))),
            model=self._prefill_model(),
            **self._identity(),
        )

    def _decode(self, instance: str) -> DecodeWorker:
        draw = self._random
        sequences = draw.choice((0, 0, 4, draw.randint(0, 80)))
        model = DecodeModel() if self._models == 1 else DecodeModel(10.0 + draw.randrange(self._models) / 7)
        return DecodeWorker(
            instance,
            context_tokens=draw.choice(self._tokens) * sequences,
            sequences=sequences,
            queued_tokens=draw.choice((0, 300)),
            free_blocks=draw.choice((None, 0, draw.randint(0, 2_000))),
            max_sequences=draw.choice((0, 4, 64)),
            block_tokens=draw.choice((1, 64)),
            block_bytes=draw.choice((0, 1 << 16)),
            model=model,
            prefill_model=self._prefill_model(),
            **self._identity(),
        )

    def _store(self, instance: str) -> KvStore:
        identity = self._identity()
        return KvStore(instance, identity["transport"], identity["region"], identity["refused"])

    def _prefill_model(self) -> PrefillModel:
        draw = self._random
        if self._models == 1:
            return PrefillModel()
        step = draw.randrange(self._models)
        return PrefillModel(
            token_ms=0.1 + step / 30, dram_token_ms=0.02 + step / 300, peer_token_ms=draw.choice((0.02, 0.2))
        )
