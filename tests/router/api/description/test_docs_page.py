"""The page of the API's description: complete, and nothing in it can run or load."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

from services.router.api.description.docs_page import PAGE_HEADERS, docs_html, render_page
from services.router.api.description.openapi import openapi_json

ALLOWED_TAGS = {
    *("html", "meta", "title", "style", "h1", "h2", "p", "a", "code", "table", "tr", "td", "th"),
}


class _Page(HTMLParser):
    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.headings: list[str] = []
        self.text = ""
        self.feed(page.decode())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            assert not name.startswith("on") and name in ("lang", "charset", "name", "content", "href", "id")
            if name == "href":
                self.links.append(value or "")
            if name == "id":
                self.ids.add(value or "")

    def handle_data(self, data: str) -> None:
        self.text += data + "\n"


def test_the_page_names_every_operation_and_every_field() -> None:
    document = json.loads(openapi_json())
    page = _Page(docs_html())
    words = set(page.text.split("\n"))
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert f"{method.upper()} {path}" in words
            assert operation["summary"] in words
    for schema in document["components"]["schemas"].values():
        assert schema["properties"].keys() <= words


def test_nothing_in_the_page_runs_or_loads() -> None:
    page = _Page(docs_html())
    assert page.tags <= ALLOWED_TAGS
    inner = {link.removeprefix("#") for link in page.links if link.startswith("#")}
    assert inner == page.ids
    assert set(page.links) - {f"#{name}" for name in inner} == {"openapi.json"}
    assert len(docs_html()) < 64 << 10


def test_the_policy_allows_the_one_style_of_the_page() -> None:
    (style,) = re.findall(r"<style>(.*?)</style>", docs_html().decode())
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = PAGE_HEADERS["Content-Security-Policy"]
    assert f"style-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'") and "script-src" not in policy


def test_text_of_a_document_cannot_become_markup() -> None:
    bad = "<script>alert(1)</script>"
    schema = {"properties": {bad: {"type": bad}, "x": {"enum": [bad]}}}
    operation = {
        "summary": bad,
        "requestBody": {"content": {"application/json": {"schema": schema}}},
    }
    document = {
        "info": {"title": bad, "version": bad},
        "paths": {bad: {"post": operation}},
        "components": {"schemas": {}},
    }
    assert b"<script" not in render_page(document)
