"""The report of a chaos run, and whether it holds. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.chaos.outcome import HTTP, SDK, Outcome, met_a_dead_router
from bench.request_log import percentiles

SHOWN_WRONG = 5


@dataclass(frozen=True, slots=True)
class Judged:
    """The outcomes, each counted once."""

    wrong: list[Outcome]
    failed_sdk: list[Outcome]
    failed_http: list[Outcome]  # not on a connection to a router that was killed
    excused_http: list[Outcome]

    @property
    def holds(self) -> bool:
        """No wrong text, no failure over the SDK, none over HTTP but on a killed router's connections."""
        return not (self.wrong or self.failed_sdk or self.failed_http)


def judge(
    outcomes: Sequence[Outcome],
    expected: Sequence[str],
    down_s: Mapping[str, Sequence[tuple[float, float]]],
) -> Judged:
    """`expected`: the text of each prompt. `down_s`: when each router was down."""
    failed_http = [each for each in outcomes if each.api == HTTP and each.error]
    excused = [each for each in failed_http if met_a_dead_router(each, down_s.get(each.router, ()))]
    return Judged(
        wrong=[each for each in outcomes if not each.error and each.text != expected[each.prompt]],
        failed_sdk=[each for each in outcomes if each.api == SDK and each.error],
        failed_http=[each for each in failed_http if not any(each is other for other in excused)],
        excused_http=excused,
    )


def report(outcomes: Sequence[Outcome], judged: Judged) -> dict[str, object]:
    """Counts and percentiles, ready for JSON. Stalls apart: only the SDK leaves a router that is stopped."""
    answered = [each for each in outcomes if not each.error]
    ttfts = [ttft for each in answered if (ttft := each.ttft_s) is not None]
    return {
        "requests": {api: sum(each.api == api for each in outcomes) for api in (SDK, HTTP)},
        "answered": len(answered),
        "wrong": len(judged.wrong),
        "wrong_shown": [(each.api, each.prompt, each.text) for each in judged.wrong[:SHOWN_WRONG]],
        "failed_sdk": _by_kind(judged.failed_sdk),
        "failed_http": _by_kind(judged.failed_http),
        "failed_http_router_killed": _by_kind(judged.excused_http),
        "refused_http_and_asked_again": sum(each.n_refused for each in outcomes),
        "stall_s": {
            api: _with_max([each.stall_s for each in answered if each.api == api]) for api in (SDK, HTTP)
        },
        "ttft_s": _with_max(ttfts),
    }


def _by_kind(outcomes: Sequence[Outcome]) -> dict[str, int]:
    return dict(Counter(each.error for each in outcomes))


def _with_max(values: Sequence[float]) -> dict[str, float]:
    return percentiles(values) | ({"max": round(max(values), 2)} if values else {})
