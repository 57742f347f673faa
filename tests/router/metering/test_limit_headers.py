"""The headers of limits by the names of two APIs."""

from __future__ import annotations

from services.router.metering.limit_headers import LimitState, anthropic_headers, openai_headers

END = 1_798_761_630  # 2027-01-01T00:00:30Z
STATES = [LimitState("requests", 60, 0, END), LimitState("tokens", 100_000, 70, END + 60)]


def test_openais_clients_read_what_is_left_and_how_long_it_lasts() -> None:
    assert openai_headers(STATES, END - 29.6) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "30s",
        "x-ratelimit-limit-tokens": "100000",
        "x-ratelimit-remaining-tokens": "70",
        "x-ratelimit-reset-tokens": "1m30s",
    }


def test_anthropics_clients_read_when_it_ends() -> None:
    assert anthropic_headers(STATES) == {
        "anthropic-ratelimit-requests-limit": "60",
        "anthropic-ratelimit-requests-remaining": "0",
        "anthropic-ratelimit-requests-reset": "2027-01-01T00:00:30Z",
        "anthropic-ratelimit-tokens-limit": "100000",
        "anthropic-ratelimit-tokens-remaining": "70",
        "anthropic-ratelimit-tokens-reset": "2027-01-01T00:01:30Z",
    }


def test_without_limits_there_are_no_headers() -> None:
    assert openai_headers([], END) == anthropic_headers([]) == {}
