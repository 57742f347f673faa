"""The console of a real cluster: a chat with a tool, its timeline and placement, drains, a lost router."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from libs.common.cluster.worker_record import Role
from slipstream.cluster_record import secret_file
from slipstream.rpc.cluster_secret import ClusterSecret
from slipstream.rpc.console_key import console_key
from supervisor.configuration.plan import ClusterConfig
from tests.router.console.browser.conftest import OpenPage
from tests.support.clusters.local_cluster import LocalCluster
from tests.support.console.fleet_source import FleetSource, Json
from tests.support.console.request_source import detail_of
from tests.support.fixture_dirs import lasting_dir

pytestmark = pytest.mark.timeout(450)
NETWORK = "Failed to load resource"
SYSTEM = "You answer the customers of Blue Harbor. Be warm and polite."


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    modules = dict.fromkeys(Role, "tests.support.clusters.altered_service")
    with (
        lasting_dir(request, "console") as run_dir,
        LocalCluster(ClusterConfig(run_dir=run_dir, drafters=1, drafts="on", modules=modules)) as running,
    ):
        yield running


def console_url(cluster: LocalCluster) -> str:
    return f"http://{cluster.admin_http}/console/"


def say(page: Page, text: str) -> None:
    """Send a message of the playground, and wait for the end of the answer."""
    before = page.get_by_role("article", name="Answer").count()
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")
    answer = page.get_by_role("article", name="Answer").nth(before)
    expect(answer).to_have_attribute("aria-busy", "false")


def use_tools(page: Page, session: str) -> None:
    page.get_by_label("System prompt").fill(SYSTEM)
    page.get_by_label("Session", exact=True).fill(session)
    page.get_by_role("button", name="Use the example tool").click()


def test_a_chat_calls_a_tool_and_shows_its_timeline_and_placement(
    cluster: LocalCluster, open_page: OpenPage
) -> None:
    watched = open_page(console_url(cluster) + "#/playground")
    page = watched.page
    use_tools(page, "console-1")
    say(page, "Where is my order 4711?")
    call = page.get_by_role("group", name="Call of get_order_status")
    assert json.loads(call.get_by_role("region").inner_text()) == {"order_id": "4711"}
    call.get_by_label("Result").fill('{"status": "shipped", "eta": "2026-09-05"}')
    page.get_by_role("button", name="Send the result").click()
    answer = page.get_by_role("article", name="Answer").nth(1)
    expect(answer).to_contain_text("shipped")
    figures = answer.locator(".answer-figures div")
    texts = dict(text.split("\n", 1) for text in figures.all_inner_texts())
    assert all(any(c.isdigit() for c in texts[name]) for name in ("TTFT", "Speed", "Output", "Prompt"))
    assert int(texts["Cached"].split()[0]) > 0  # the first turn's prompt
    assert "of" in texts["Drafts accepted"]
    assert watched.violations() == []
    answer.get_by_role("link", name="Timeline").click()
    detail = page.locator(".detail")
    expect(detail.get_by_text("Succeeded")).to_be_visible()
    for phase in ("Queue", "Placement", "Prefill", "Transfer to decode", "Tokens"):
        expect(detail.locator(".bar-label", has_text=phase).first).to_be_visible()
    expect(detail.get_by_text("Tokens over time")).to_be_visible()
    assert watched.violations() == []
    detail.get_by_role("link", name="Why here").click()
    prefill = page.get_by_role("region", name="Prefill workers")
    expect(prefill.locator("tbody tr")).to_have_count(2)
    expect(prefill.locator("tr.is-chosen")).to_have_count(1)
    assert watched.violations() == []


def test_stop_ends_an_answer(cluster: LocalCluster, open_page: OpenPage) -> None:
    page = open_page(console_url(cluster) + "#/playground").page
    page.get_by_label("Message", exact=True).fill("Hello!")
    with cluster.gate.held("prefill-0", "prefill-1", "decode-0", "decode-1"):
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Stop").click()
        expect(page.get_by_text("Stopped.")).to_be_visible()
    cluster.assert_idle()
    page.get_by_role("link", name="Timeline").click()
    expect(page.locator(".detail").get_by_text("Cancelled")).to_be_visible()


@pytest.mark.parametrize("view", ["fleet", "requests", "why", "cache", "jobs", "playground"])
def test_a_view_of_real_data_opens(cluster: LocalCluster, open_page: OpenPage, view: str) -> None:
    words = "Hello! " * 80  # a session has a place when a block is full
    cluster.client.chat([{"role": "user", "content": words}], session=f"view-{view}", max_tokens=4)
    watched = open_page(f"{console_url(cluster)}#/{view}", theme="dark")
    expect(watched.page.get_by_text("Live", exact=True)).to_be_visible()
    shown = {
        "fleet": "drafter-0",
        "requests": "view-requests",
        "why": "Prefill workers",
        "cache": "view-cache",
        "jobs": "Jobs of all tenants",
        "playground": "Send a message.",
    }
    expect(watched.page.get_by_text(shown[view]).first).to_be_visible()
    assert watched.violations() == []


def test_a_submitted_job_appears_and_ends_by_itself(cluster: LocalCluster, open_page: OpenPage) -> None:
    watched = open_page(f"{console_url(cluster)}#/jobs")
    page = watched.page
    expect(page.get_by_text("none waits")).to_be_visible()
    body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}
    [job] = cluster.client.jobs.submit([body])
    row = page.get_by_role("row", name=job.id)
    expect(row).to_contain_text("Succeeded")  # pushed: the page was not loaded again
    row.get_by_role("link").click()
    expect(page.locator(".detail")).to_contain_text("HTTP 200")
    assert watched.violations() == []


def test_clicks_drain_a_worker_and_take_it_back(cluster: LocalCluster, open_page: OpenPage) -> None:
    watched = open_page(console_url(cluster))
    watched.expected.append(NETWORK)  # the refusal that asks for the key
    page = watched.page
    page.get_by_role("button", name="Drain decode-0", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Drain", exact=True).click()
    key = console_key(ClusterSecret.from_file(secret_file(cluster.run_dir)))
    page.get_by_label("Key", exact=True).fill(key)
    page.get_by_role("button", name="Use key").click()
    card = page.get_by_label("decode-0", exact=True)
    expect(card.get_by_text("Draining")).to_be_visible()
    assert cluster.status("decode-0").load.draining
    page.get_by_role("button", name="Undrain decode-0", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Undrain", exact=True).click()
    expect(card.get_by_text("Ready")).to_be_visible()
    assert not cluster.status("decode-0").load.draining


def test_a_page_follows_a_router_that_starts_again(cluster: LocalCluster, open_page: OpenPage) -> None:
    watched = open_page(console_url(cluster) + "#/requests")
    watched.expected += [NETWORK, "ERR_"]
    page = watched.page
    expect(page.get_by_text("Live", exact=True)).to_be_visible()
    pid = cluster.pid("router-0")
    cluster.supervisor.kill("router-0")
    expect(page.get_by_text("Disconnected")).to_be_visible()
    cluster.until_running("router-0", but=pid)
    expect(page.get_by_text("Live", exact=True)).to_be_visible()
    cluster.client.chat([{"role": "user", "content": "Hello!"}], session="after", max_tokens=4)
    expect(page.get_by_role("gridcell", name="after")).to_be_visible()


def test_the_fake_router_has_the_keys_of_the_real_one(cluster: LocalCluster, open_page: OpenPage) -> None:
    """Else the pages would be tested with data that no router sends."""
    cluster.client.chat([{"role": "user", "content": "Hello!"}], session="keys", max_tokens=4)
    page = open_page(console_url(cluster)).page

    def read(path: str) -> Json:
        found: Json = page.evaluate("async (path) => (await fetch('/console/api/' + path)).json()", path)
        return found

    source = FleetSource(time.time() * 1e3, requests=3)
    requests = read("requests?limit=1")
    fake_requests = source.page_of_requests(limit=1, before=None)
    pairs = [
        (read("fleet"), source.fleet()),
        (read("cache?limit=1"), source.cache(after="", limit=1)),
        (requests, fake_requests),
    ]
    request_id = requests["requests"][0]["id"]
    pairs.append((read(f"requests/{request_id}"), detail_of(fake_requests["requests"][0])))
    for real, fake in pairs:
        assert missing_keys(real, fake) == []


def missing_keys(real: object, fake: object, path: str = "") -> list[str]:
    """The keys that only the fake has, with the first element of each list standing for all."""
    if isinstance(real, list) and isinstance(fake, list) and real and fake:
        return missing_keys(real[0], fake[0], f"{path}[]")
    if not isinstance(real, dict) or not isinstance(fake, dict):
        return []
    return [f"{path}.{key}" for key in fake if key not in real] + [
        found for key in fake if key in real for found in missing_keys(real[key], fake[key], f"{path}.{key}")
    ]
