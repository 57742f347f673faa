"""A request's span has the attributes of OpenTelemetry's conventions, and exemplars lead to its trace."""

from __future__ import annotations

from typing import Any

import aiohttp
from opentelemetry.trace import StatusCode

from services.router.server import RouterServer
from tests.support.recorded_spans import kept_spans

PATH = "/v1/chat/completions"
BODY: Any = {"messages": [{"role": "user", "content": "Where is my order?"}], "max_tokens": 5}


async def test_an_answer_has_the_attributes_of_http_and_of_generative_ai(router: RouterServer) -> None:
    async with aiohttp.ClientSession() as http:
        with kept_spans() as kept:
            async with http.post(f"http://{router.http_endpoint}{PATH}", json=BODY) as answer:
                body = await answer.json()
            span = kept.one(f"POST {PATH}")
        found = dict(span.attributes or {})
        expected = {
            "http.request.method": "POST",
            "http.route": PATH,
            "url.scheme": "http",
            "http.response.status_code": 200,
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "slipstream",
            "gen_ai.request.model": "tiny",
            "gen_ai.response.finish_reasons": (body["choices"][0]["finish_reason"],),
            "gen_ai.usage.input_tokens": body["usage"]["prompt_tokens"],
            "gen_ai.usage.output_tokens": body["usage"]["completion_tokens"],
        }
        assert found.items() >= expected.items()
        assert span.context is not None
        url = f"http://{router.admin_http_endpoint}/metrics"
        accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
        async with http.get(url, headers=accept) as scrape:
            lines = (await scrape.text()).splitlines()
    ids = f'span_id="{span.context.span_id:016x}",trace_id="{span.context.trace_id:032x}"'
    trace = f"# {{{ids}}} "
    named = {line.partition("_bucket")[0] for line in lines if trace in line}
    times = ("time_to_first_token", "request_queue", "request_prefill", "request_decode", "request_duration")
    assert named == {f"slipstream_{name}_seconds" for name in times}


async def test_a_refusal_has_its_status_and_no_error(router: RouterServer) -> None:
    async with aiohttp.ClientSession(f"http://{router.http_endpoint}") as http:
        with kept_spans() as kept:
            async with http.post(PATH, json={**BODY, "top_p": 7}) as answer:
                assert answer.status == 400
            span = kept.one(f"POST {PATH}")
    found = dict(span.attributes or {})
    assert (found["http.response.status_code"], found["error.type"]) == (400, "InvalidArgument")
    assert span.status.status_code is StatusCode.UNSET
