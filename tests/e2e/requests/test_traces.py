"""A request is one trace across real processes: from its client's context to the last worker."""

from __future__ import annotations

import itertools
import json
import os
import secrets
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from libs.common.cluster.worker_record import Role
from slipstream import errors
from tests.support.clusters.fake_engines import fake_engine_config
from tests.support.clusters.local_cluster import REQUEST_S, LocalCluster, until
from tests.support.fixture_dirs import lasting_dir
from tests.support.network.otlp_collector import CollectedSpan, OtlpCollector

GENERATE = "slipstream.v1.RouterService/Generate"
COMPLETIONS = "POST /v1/chat/completions"
WATCH = "slipstream.v1.PrefillService/WatchHandoff"
RESERVE, COMMIT, LOOKUP = (f"slipstream.v1.KvstoreService/{name}" for name in ("Reserve", "Commit", "Lookup"))
DECODERS = ("decode-0", "decode-1")
# Some blocks long.
TEXT = "The parcel left the depot on Monday, and nobody has seen it since. " * 8


@dataclass(frozen=True)
class Site:
    cluster: LocalCluster
    collector: OtlpCollector

    def spans(self, trace: str, *names: str, where: Any = lambda span: True) -> list[CollectedSpan]:
        """The spans of the trace, after a matching span of each name has arrived."""

        def came() -> bool:
            return set(names) <= {span.name for span in self.collector.of(trace) if where(span)}

        until(came, what=lambda: f"{names} in {self.collector.of(trace)}")
        return self.collector.of(trace)

    def until_in_use(self) -> None:
        """Return when the router places requests on both prefill workers, which a requested worker needs."""

        def in_use() -> bool:
            with urllib.request.urlopen(f"http://{self.cluster.admin_http}/healthz", timeout=60) as response:
                workers = json.load(response)["workers"]
            return all(workers.get(f"prefill/prefill-{number}") for number in (0, 1))

        until(in_use, what="both prefill workers are in use")


class Caller:
    """The span context of a client outside of the cluster."""

    def __init__(self) -> None:
        self.trace, self.span = secrets.token_hex(16), secrets.token_hex(8)
        self.headers = {"traceparent": f"00-{self.trace}-{self.span}-01"}


@pytest.fixture(scope="module")
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    with OtlpCollector() as collector, lasting_dir(request, "traces") as run_dir:
        environment = dict.fromkeys(Role, collector.environment)
        config = fake_engine_config(
            run_dir, drafters=1, drafts="on", kvstores=1, extra_environment=environment
        )
        with LocalCluster(config) as cluster:
            yield Site(cluster, collector)


def options(tokens: int) -> dict[str, Any]:
    return {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True}


def chat(site: Site, caller: Caller, text: str, *, prefill: str = "prefill-0", tokens: int = 8) -> Any:
    site.until_in_use()
    headers = {"x-slipstream-prefill": prefill, **caller.headers}
    messages = [{"role": "user", "content": text}]
    return site.cluster.client.chat(messages, headers=headers, **options(tokens))


def post(site: Site, headers: dict[str, str], text: str) -> str:
    """Run a request over HTTP to its end; returns its id."""
    site.until_in_use()
    body = {"messages": [{"role": "user", "content": text}], "model": "slipstream-mini", **options(8)}
    request = urllib.request.Request(
        f"http://{site.cluster.http}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json", "x-slipstream-prefill": "prefill-0", **headers},
    )
    with urllib.request.urlopen(request, timeout=REQUEST_S) as response:
        assert response.status == 200
        return str(response.headers["x-request-id"])


def one(spans: list[CollectedSpan], name: str) -> CollectedSpan:
    (found,) = (span for span in spans if span.name == name)
    return found


def assert_whole(spans: list[CollectedSpan], *, front: str, parent: str) -> None:
    """Check the spans of a request without failover: one of each, nested."""
    door, attempt = one(spans, front), one(spans, "attempt")
    prefill, decode, transfer = (one(spans, name) for name in ("prefill", "decode", "transfer"))
    assert door.parent == parent
    assert door.service == "slipstream-router"
    assert one(spans, "placement").parent == attempt.parent == door.id
    assert prefill.parent == decode.parent == attempt.id
    assert (transfer.parent, transfer.instance) == (decode.id, decode.instance)
    assert one(spans, WATCH).parent == transfer.id
    assert one(spans, "placement").attributes["placement.prefill"] == prefill.instance == "prefill-0"
    assert attempt.attributes["decode"] == decode.instance
    assert transfer.attributes["blocks"] > 0
    assert transfer.attributes["bytes"] > 0
    assert (decode.attributes["tokens"], decode.attributes["finish"]) == (7, "length")  # one is prefill's
    assert 1 <= decode.attributes["steps"] <= 7
    assert 0 <= decode.attributes["accepted_drafts"] <= decode.attributes["proposed_drafts"]
    assert (door.attributes["tokens"], door.attributes["attempts"]) == (8, 1)
    assert not any(span.failed for span in spans)


def test_a_request_over_grpc_is_one_trace(site: Site) -> None:
    caller = Caller()
    chat(site, caller, f"One. {TEXT}")
    assert_whole(site.spans(caller.trace, GENERATE, "decode", WATCH), front=GENERATE, parent=caller.span)


def test_a_request_over_http_is_one_trace(site: Site) -> None:
    caller = Caller()
    post(site, caller.headers, f"Two. {TEXT}")
    spans = site.spans(caller.trace, COMPLETIONS, "decode", WATCH)
    assert_whole(spans, front=COMPLETIONS, parent=caller.span)


@pytest.mark.parametrize(
    "given", ["", "00-0-0-01", f"00-{'0' * 32}-{'1' * 16}-01", "nonsense", "ff-" + "1" * 32]
)
def test_a_request_with_no_valid_context_begins_a_trace(site: Site, given: str) -> None:
    name = post(site, {"traceparent": given} if given else {}, f"Three {given!a}. {TEXT}")

    def door() -> CollectedSpan | None:
        spans = (span for span in site.collector.spans if span.name == COMPLETIONS)
        return next((span for span in spans if span.attributes["request_id"] == name), None)

    until(door, what="the request's span")
    found = door()
    assert found is not None
    assert_whole(site.spans(found.trace, "decode", WATCH), front=COMPLETIONS, parent="")


def test_requests_at_once_do_not_mix(site: Site) -> None:
    """All requests share one stream to each worker, and are in flight together."""
    site.cluster.assert_idle()
    callers = [Caller() for _ in range(4)]
    with ThreadPoolExecutor(len(callers)) as threads:
        with site.cluster.gate.held(*DECODERS, from_token=3) as gate:
            asked = [
                threads.submit(chat, site, caller, f"Four, {number}. {TEXT}")
                for number, caller in enumerate(callers)
            ]
            until(
                lambda: sum(map(site.cluster.sequences, DECODERS)) == len(callers), what="all of them decode"
            )
            gate.open()
        for answer in asked:
            answer.result(REQUEST_S)
    for caller in callers:
        spans = site.spans(caller.trace, GENERATE, "decode", WATCH)
        assert_whole(spans, front=GENERATE, parent=caller.span)
        ids = {one(spans, name).attributes["request_id"] for name in ("attempt", "prefill", "decode")}
        assert len(ids) == 1


def test_a_restore_is_in_the_trace_of_its_request(site: Site) -> None:
    numbers = itertools.count()
    restores: list[CollectedSpan] = []

    def restored() -> bool:
        """Run a prompt on one worker, then on the other when the store or the first worker has its blocks."""
        text, caller = f"Five, {next(numbers)}. {TEXT}", Caller()
        chat(site, Caller(), text)
        site.cluster.assert_idle()
        chat(site, caller, text, prefill="prefill-1")
        spans = site.spans(caller.trace, GENERATE, "prefill", "decode")
        prefill = one(spans, "prefill")
        restores[:] = [span for span in spans if span.name == "restore" and span.parent == prefill.id]
        return any(span.attributes.get("blocks") for span in restores)

    until(restored, what="blocks came from the store or the other worker")
    (found,) = (span for span in restores if span.attributes.get("blocks"))
    assert found.instance == "prefill-1"
    assert found.attributes["bytes"] > 0
    assert found.attributes["tiers"] in ("dram", "peer")
    (source,) = (
        name
        for name in ("kvstore-0", "prefill-0")
        if site.cluster.workers[name] == found.attributes["source"]
    )
    spans = site.spans(found.trace, "pin", where=lambda span: span.parent == found.id)
    (pin,) = (span for span in spans if span.name == "pin" and span.parent == found.id)
    assert pin.instance == source
    assert pin.attributes["blocks"] >= found.attributes["blocks"]
    assert pin.attributes["tiers"] == found.attributes["tiers"]


def test_what_is_stored_for_a_request_is_in_its_trace(site: Site) -> None:
    """No other request has blocks on the way to the store, so the first block of the put is this one's."""
    site.cluster.assert_idle()
    caller = Caller()
    chat(site, caller, f"Stored. {TEXT}")
    spans = site.spans(caller.trace, "prefill", RESERVE, COMMIT)
    prefill = one(spans, "prefill")
    puts = [span for span in spans if span.name in (RESERVE, COMMIT)]
    assert {span.instance for span in puts} == {"kvstore-0"}
    assert prefill.id in {span.parent for span in puts}
    blocks = sum(span.attributes["blocks"] for span in puts if span.name == COMMIT)
    assert 0 < blocks <= sum(span.attributes["wanted_blocks"] for span in puts if span.name == RESERVE)


def test_drafts_are_in_the_trace_of_their_request(site: Site) -> None:
    callers: list[Caller] = []

    def drafted() -> list[CollectedSpan]:
        return [
            span
            for caller in callers
            for span in site.collector.of(caller.trace)
            if span.name == "drafts" and span.attributes["proposals"]
        ]

    def came() -> bool:
        """Whether a request has drafts, which need a decode worker with a connected drafter."""
        callers.append(Caller())
        chat(site, callers[-1], f"Drafted, {len(callers)}. {TEXT}", tokens=20)
        site.cluster.assert_idle()
        return bool(drafted())

    until(came, what="a request had drafts")
    drafts = drafted()[0]
    decode = one(site.spans(drafts.trace, "decode"), "decode")
    assert (drafts.parent, drafts.instance) == (decode.id, "drafter-0")
    assert drafts.attributes["rows"] >= drafts.attributes["proposals"]
    assert drafts.attributes["proposed_drafts"] >= drafts.attributes["matched_drafts"] >= 0


def test_a_refused_request_says_why(site: Site) -> None:
    over_http, over_grpc = Caller(), Caller()
    with pytest.raises(urllib.error.HTTPError, match="400"):
        post(site, {**over_http.headers, "x-slipstream-prefill": "nobody"}, "Refused.")
    with pytest.raises(errors.InvalidArgument):
        chat(site, over_grpc, "Refused.", prefill="nobody")
    for caller, name in ((over_http, COMPLETIONS), (over_grpc, GENERATE)):
        door = one(site.spans(caller.trace, name), name)
        assert not door.failed  # the client's fault, and no error of the server
        assert door.attributes["error.type"] == "InvalidArgument"
        assert door.attributes["code"] == "INVALID_ARGUMENT"


def busy(site: Site) -> str:
    """The decode worker that runs a request; waits until one does."""
    until(lambda: any(map(site.cluster.sequences, DECODERS)), what="a decode worker runs it")
    return next(name for name in DECODERS if site.cluster.sequences(name))


def test_a_cancelled_request_ends_its_spans(site: Site) -> None:
    site.cluster.assert_idle()
    site.until_in_use()
    caller = Caller()
    with site.cluster.gate.held(*DECODERS, from_token=12):
        messages = [{"role": "user", "content": f"Six. {TEXT}"}]
        headers = {"x-slipstream-prefill": "prefill-0", **caller.headers}
        stream = site.cluster.client.stream_chat(messages, headers=headers, **options(400))
        events = iter(stream)  # its end is the request's
        next(events)
        busy(site)
        stream.close()
        spans = site.spans(caller.trace, GENERATE, "attempt", "decode")
    assert not any(span.failed for span in spans)
    assert one(spans, "decode").attributes["finish"] == "aborted"
    assert all(one(spans, name).attributes["cancelled"] for name in (GENERATE, "attempt", "decode"))
    site.cluster.assert_idle()


def test_a_failover_stays_in_the_same_trace(site: Site) -> None:
    site.cluster.assert_idle()
    caller = Caller()
    with ThreadPoolExecutor(1) as thread, site.cluster.gate.held(*DECODERS, from_token=12) as gate:
        asked = thread.submit(chat, site, caller, f"Seven. {TEXT}", tokens=20)
        lost = busy(site)
        pid = site.cluster.pid(lost)
        os.kill(pid, signal.SIGKILL)
        gate.open()
        assert asked.result(REQUEST_S).stats.attempts >= 2
    spans = site.spans(caller.trace, GENERATE, "decode")
    door = one(spans, GENERATE)
    attempts = {span.attributes["attempt"]: span for span in spans if span.name == "attempt"}
    assert {1, 2} <= attempts.keys()
    assert {span.parent for span in attempts.values()} == {door.id}
    assert (attempts[1].failed, attempts[1].attributes["error.type"]) == (True, "Unavailable")
    assert attempts[1].attributes["decode"] == lost
    assert not door.failed
    # The span of the killed process was lost with it.
    (resumed,) = (span for span in spans if span.attributes.get("finish") == "length" and span is not door)
    (number,) = (number for number, attempt in attempts.items() if attempt.id == resumed.parent)
    assert number > 1
    assert not attempts[number].failed
    assert (resumed.name, resumed.instance != lost) == ("decode", True)
    assert resumed.attributes["emitted_tokens"] > 0
    assert {span.parent for span in spans if span.name == "placement"} == {door.id}
    site.cluster.until_running(lost, but=pid)
    site.cluster.assert_idle()


def test_nothing_else_has_spans(site: Site) -> None:
    """Heartbeats, shared streams and calls without a request have no spans."""
    names = {span.name for span in site.collector.spans}
    expected = {GENERATE, COMPLETIONS, WATCH, "placement", "attempt", "prefill", "decode", "transfer"}
    releases = {
        f"slipstream.v1.{name}" for name in ("DecodeService/AbortDecode", "PrefillService/AbortPrefill")
    }
    puts = {RESERVE, COMMIT}
    assert expected <= names <= expected | releases | puts | {"restore", "pin", "drafts", LOOKUP}


def test_requests_succeed_without_a_collector(site: Site) -> None:
    """The last test of the file: the collector is stopped."""
    site.collector.stop()
    answers = [chat(site, Caller(), f"Eight, {number}. {TEXT}") for number in range(3)]
    assert all(answer.usage.completion_tokens == 8 for answer in answers)
    site.cluster.assert_idle()
