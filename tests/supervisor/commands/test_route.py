"""`slipstream route` prints what placement decides for the files it is given, and what is wrong with them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from libs.common.fleet_bounds import MAX_ROUTE_FILE_BYTES
from services.router.placement.decision_json import HEADER_BYTES, header_text
from services.router.placement.fleet_json import fleet_from_json, request_from_json
from services.router.placement.policy import place
from slipstream.cli.app import app
from slipstream.errors import InvalidArgument, Unavailable
from supervisor.commands.route import show_route

FLEET: dict[str, Any] = {
    "prefill": [
        {"instance": "p0", "queued_tokens": 90_000},
        {"instance": "p1", "model": {"token_ms": 0.1}},
        {"instance": "p2", "refused": "does not answer"},
    ],
    "decode": [{"instance": "d0"}, {"instance": "d1", "context_tokens": 10_000, "sequences": 4}],
    "stores": [{"instance": "k0"}],
}
REQUEST: dict[str, Any] = {
    "prompt_tokens": 4_000,
    "prefill_expected_tokens": {"p0": 3_900},
    "store_held": {"k0": {"tokens": 2_000, "dram_tokens": 2_000}},
    "content_key": "00ff",
}


def run(tmp_path: Path, *flags: str, fleet: Any = FLEET, request: Any = REQUEST) -> str:
    (tmp_path / "fleet.json").write_text(json.dumps(fleet))
    (tmp_path / "request.json").write_text(json.dumps(request))
    arguments = [
        "route",
        "--fleet",
        str(tmp_path / "fleet.json"),
        "--request",
        str(tmp_path / "request.json"),
    ]
    result = CliRunner().invoke(app, [*arguments, *flags])
    if result.exception is not None:
        raise result.exception
    return result.output


def test_a_file_may_begin_with_a_mark_of_utf8(tmp_path: Path) -> None:
    files = [tmp_path / "fleet.json", tmp_path / "request.json"]
    for file, content in zip(files, (FLEET, REQUEST), strict=True):
        file.write_text(json.dumps(content), encoding="utf-8-sig")
    result = CliRunner().invoke(app, ["route", "--fleet", str(files[0]), "--request", str(files[1])])
    assert result.exit_code == 0, result.exception


def test_json_names_every_candidate_term_and_the_choice(tmp_path: Path) -> None:
    said = json.loads(run(tmp_path, "--json"))
    assert (said["prefill"], said["decode"], said["source"]) == ("p1", "d0", "k0")
    assert [(c["part"], c["instance"]) for c in said["candidates"]] == [
        ("prefill", "p0"),
        ("prefill", "p1"),
        ("prefill", "p2"),
        ("decode", "d0"),
        ("decode", "d1"),
    ]
    for cost in (said["cost"], *(c["cost"] for c in said["candidates"])):
        assert cost["total_ms"] == pytest.approx(sum(v for k, v in cost.items() if k != "total_ms"), abs=0.01)
    assert said["candidates"][2]["refused"] == "does not answer"
    why = said["reasons"][0]
    assert (why["part"], why["chosen"], why["rule"]) == ("prefill", "p1", "only"), (
        "p0 is beyond the load bound"
    )
    assert "p0 holds 3900 tokens but is refused: 90000 tokens in flight" in said["reason"]


def test_the_table_says_the_same(tmp_path: Path) -> None:
    text = run(tmp_path)
    assert "prefill p1, decode d0; KV from k0, 2000 tokens cached, 2000 to compute" in text
    assert "does not" in text
    odd = {
        "prefill": [{"instance": "[/x]"}, {"instance": "[b]", "refused": "[/why]"}],
        "decode": [{"instance": "d"}],
    }
    text = run(tmp_path, fleet=odd)
    assert all(name in text for name in ("[/x]", "[b]", "[/why]"))


@pytest.mark.parametrize(
    ("fleet", "request_", "field"),
    [
        ({"workers": []}, REQUEST, "fleet.workers"),
        ({**FLEET, "decode": [{}]}, REQUEST, "decode[0]"),
        ({**FLEET, "prefill": [{"instance": "p", "model": {"speed": 1}}]}, REQUEST, "prefill[0].model.speed"),
        (FLEET, {}, "request"),
        (FLEET, {**REQUEST, "content_key": "zz"}, "request.content_key"),
        (FLEET, [], "request"),
        ([], REQUEST, "fleet"),
        ({**FLEET, "prefill": 5}, REQUEST, "prefill"),
        ({**FLEET, "decode": {}}, REQUEST, "decode"),
        ({**FLEET, "region_ms": 5}, REQUEST, "region_ms"),
        ({**FLEET, "region_ms": {"eu": -1}}, REQUEST, "region_ms.eu"),
        ({**FLEET, "region_ms": {"eu": "5"}}, REQUEST, "region_ms.eu"),
        ({**FLEET, "region_ms": {"eu": True}}, REQUEST, "region_ms.eu"),
        ({**FLEET, "prefill": [{"instance": 5}]}, REQUEST, "prefill[0].instance"),
        ({**FLEET, "prefill": [{"instance": ""}]}, REQUEST, "prefill[0].instance"),
        ({**FLEET, "stores": [{"instance": "\ud800"}]}, REQUEST, "stores[0].instance"),
        ({**FLEET, "decode": [{"instance": "d\x1b[2J"}]}, REQUEST, "decode[0].instance"),
        ({**FLEET, "prefill": [{"instance": "p", "refused": None}]}, REQUEST, "prefill[0].refused"),
        (
            {**FLEET, "prefill": [{"instance": "p", "queued_tokens": "7"}]},
            REQUEST,
            "prefill[0].queued_tokens",
        ),
        ({**FLEET, "prefill": [{"instance": "p", "queue": 5}]}, REQUEST, "prefill[0].queue"),
        (FLEET, {**REQUEST, "may_skip_prefill": 1}, "request.may_skip_prefill"),
        ({**FLEET, "prefill": [{"instance": "p"}] * 2}, REQUEST, "prefill[1].instance"),
        (
            {**FLEET, "prefill": [{"instance": "p", "model": {"token_ms": float("nan")}}]},
            REQUEST,
            "prefill[0].model.token_ms",
        ),
        ({**FLEET, "decode": [{"instance": "d", "block_tokens": 0}]}, REQUEST, "decode[0].block_tokens"),
        ({**FLEET, "decode": [{"instance": "d", "free_blocks": True}]}, REQUEST, "decode[0].free_blocks"),
        (FLEET, {"prompt_tokens": "x"}, "request.prompt_tokens"),
        (FLEET, {"prompt_tokens": 0}, "request.prompt_tokens"),
        (FLEET, {"prompt_tokens": 1.5}, "request.prompt_tokens"),
        (FLEET, {**REQUEST, "prefill_expected_tokens": 5}, "request.prefill_expected_tokens"),
        (FLEET, {**REQUEST, "prefill_expected_tokens": {"p0": -1}}, "request.prefill_expected_tokens.p0"),
        (FLEET, {**REQUEST, "store_held": [1]}, "request.store_held"),
        (FLEET, {**REQUEST, "store_held": {"k0": 2}}, "request.store_held.k0"),
        (FLEET, {**REQUEST, "seed": "a"}, "request.seed"),
        (FLEET, {**REQUEST, "content_key": 5}, "request.content_key"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, fleet: Any, request_: Any, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        run(tmp_path, fleet=fleet, request=request_)
    assert caught.value.field == field


def test_a_fleet_that_cannot_serve_says_why(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="does not answer"):
        run(tmp_path, fleet={**FLEET, "decode": [{"instance": "d0", "refused": "does not answer"}]})
    with pytest.raises(InvalidArgument, match="No such file"):
        show_route(tmp_path / "none", tmp_path / "none", as_json=False)
    (deep := tmp_path / "deep").write_text("[" * 100_000)
    with pytest.raises(InvalidArgument, match="deep is not JSON"):
        show_route(deep, deep, as_json=False)


@pytest.mark.parametrize("kind", ["pipe", "device", "large"])
def test_a_file_without_bound_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = Path("/dev/zero") if kind == "device" else tmp_path / "given"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "large":
        path.touch()
        os.truncate(path, MAX_ROUTE_FILE_BYTES + 1)
    why = f"has more than {MAX_ROUTE_FILE_BYTES} bytes" if kind == "large" else "is no regular file"
    with pytest.raises(InvalidArgument, match=f"request: {path}: {why}"):
        show_route(path, path, as_json=False)


def test_a_header_is_one_bounded_line_of_a_large_fleet() -> None:
    fleet = {
        "prefill": [{"instance": f"prefill-{i}" + "x" * 90} for i in range(300)],
        "decode": [{"instance": f"decode-{i}" + "x" * 90} for i in range(300)],
    }
    text = header_text(place(request_from_json(REQUEST), fleet_from_json(fleet)))
    assert len(text) <= HEADER_BYTES
    assert "\n" not in text and text.isascii()
    assert json.loads(text)["candidates"]


def test_the_examples_of_the_documentation_work() -> None:
    root = Path(__file__).resolve().parents[3] / "docs" / "examples"
    decision = place(
        request_from_json(json.loads((root / "request.json").read_text())),
        fleet_from_json(json.loads((root / "fleet.json").read_text())),
    )
    assert (decision.prefill, decision.peer) == ("prefill-1", "prefill-0")
