"""`slipstream chat` with a real gRPC server in place of a router."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.demo.script import TOOLS
from slipstream.cli.chat.session import ChatOptions, read_tools, run_chat
from slipstream.cli.client_access import ClientAccess
from slipstream.errors import InvalidArgument, NotFound, Overloaded, Unauthenticated
from slipstream.rpc.rpc_errors import to_status
from slipstream.v1 import common_pb2, fleet_pb2, router_pb2, router_pb2_grpc
from supervisor.configuration.cluster_options import ROOT
from tests.cli.chat.terminal import chat_in_a_terminal
from tests.cli.fleet.fleet_port import FleetPort, process
from tests.support.stubs.blocking_router import serving
from tests.support.stubs.partial_servicer import partial_servicer


def _response(**event: Any) -> router_pb2.GenerateResponse:
    return router_pb2.GenerateResponse(events=[router_pb2.GenerateEvent(**event)])


def _evil() -> Iterator[router_pb2.GenerateResponse]:
    """An answer and a call that would clear the screen and set the window's title."""
    for part in ("You \x1b", "[2Jsaid \r", "evil", "\x07\x9b1A"):
        yield _response(delta=router_pb2.Delta(text=part))
    piece = router_pb2.ToolCallDelta(index=0, id="c", name="g\x1b]0;", arguments="{\x1b}")
    yield _response(delta=router_pb2.Delta(tool_calls=[piece]))
    yield _response(finished=router_pb2.Finished(finish_reason=common_pb2.FINISH_REASON_TOOL_CALLS))


class Router(router_pb2_grpc.RouterServiceServicer):
    """Answers "You said X.", calls a tool for "call", and is overloaded for "overload"."""

    def __init__(self) -> None:
        self.requests: list[router_pb2.GenerateRequest] = []
        self.sessions: list[str] = []

    def ListModels(self, request: Any, context: Any) -> router_pb2.ListModelsResponse:
        return router_pb2.ListModelsResponse(models=[router_pb2.Model(id="m")])

    def Generate(self, request: Any, context: Any) -> Iterator[router_pb2.GenerateResponse]:
        self.requests.append(request)
        self.sessions.append(dict(context.invocation_metadata())["x-session-affinity"])
        text = request.chat.messages[-1].content[0].text
        if text == "refuse":
            context.abort_with_status(to_status(Unauthenticated("the API key is wrong")))
        if text == "overload":
            context.abort_with_status(to_status(Overloaded("try later")))
        yield _response(started=router_pb2.Started(request_id="r"))
        if text == "evil":
            yield from _evil()
            return
        finish = common_pb2.FINISH_REASON_STOP
        if text == "call":
            piece = router_pb2.ToolCallDelta(index=0, id="functions.f:0", name="f", arguments="{}")
            yield _response(delta=router_pb2.Delta(tool_calls=[piece]))
            finish = common_pb2.FINISH_REASON_TOOL_CALLS
        else:
            for part in ("You said ", text, "."):
                yield _response(delta=router_pb2.Delta(text=part))
        yield _response(
            finished=router_pb2.Finished(
                finish_reason=finish,
                usage=router_pb2.Usage(prompt_tokens=9, completion_tokens=3, cached_tokens=4),
                stats=router_pb2.RequestStats(
                    prefill_worker="prefill-1", decode_worker="decode-0", ttft_ms=12
                ),
            )
        )


@pytest.fixture
def router() -> Iterator[tuple[Router, str]]:
    servicer = partial_servicer(Router)
    with serving(servicer) as endpoint:
        yield servicer, endpoint


def chat(endpoint: str, *arguments: str, typed: str) -> subprocess.CompletedProcess[str]:
    """The command in a process, with `typed` as its input."""
    return subprocess.run(
        [sys.executable, "-m", "slipstream.cli", "chat", "--endpoint", endpoint, *arguments],
        input=typed,
        capture_output=True,
        text=True,
        timeout=100,
    )


def talk(endpoint: str, *lines: str) -> list[str]:
    """Run a conversation with these input lines; return the printed prompts."""
    prompts: list[str] = []
    left = list(lines)

    def ask(prompt: str) -> str:
        prompts.append(prompt)
        if not left:
            raise EOFError
        line = left.pop(0)
        if line == "\x03":
            raise KeyboardInterrupt
        return line

    options = ChatOptions(ClientAccess(Path("nowhere"), endpoint), "Be kind.", [], {"max_tokens": 7})
    run_chat(options, ask=ask)
    return prompts


def test_turns_are_kept_and_printed(router: tuple[Router, str], capsys: pytest.CaptureFixture[str]) -> None:
    servicer, endpoint = router
    talk(endpoint, "hello", "  ", "again")
    shown = capsys.readouterr().out
    assert (
        "You said hello.\n[prefill-1 -> decode-0; 9 prompt tokens, 4 cached; first token after 12 ms" in shown
    )
    first, second = servicer.requests
    messages = [(message.role, message.content[0].text) for message in second.chat.messages]
    assert messages == [
        (router_pb2.MESSAGE_ROLE_SYSTEM, "Be kind."),
        (router_pb2.MESSAGE_ROLE_USER, "hello"),
        (router_pb2.MESSAGE_ROLE_ASSISTANT, "You said hello."),
        (router_pb2.MESSAGE_ROLE_USER, "again"),
    ]
    assert len(first.chat.messages) == 2
    assert first.sampling.max_tokens == 7
    assert len(set(servicer.sessions)) == 1
    assert servicer.sessions[0].startswith("chat-")


def test_commands_are_not_sent_to_the_model(
    router: tuple[Router, str], capsys: pytest.CaptureFixture[str]
) -> None:
    servicer, endpoint = router
    talk(endpoint, "hello", "/help", "/tools", "/nonsense", "/system Be brief.", "//slash", "/quit", "never")
    shown = capsys.readouterr().out
    assert "m at 127.0.0.1:" in shown and "/help lists the commands, Ctrl-D ends." in shown
    assert "/clear        start a new conversation" in shown
    assert "/nonsense: no such command" in shown
    sent = [[message.content[0].text for message in request.chat.messages] for request in servicer.requests]
    assert sent == [["Be kind.", "hello"], ["Be brief.", "/slash"]]
    assert len(set(servicer.sessions)) == 2


def test_no_control_text_of_an_answer_is_printed(
    router: tuple[Router, str], capsys: pytest.CaptureFixture[str]
) -> None:
    _, endpoint = router
    talk(endpoint, "evil")
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and "\x07" not in shown and "\x9b" not in shown and "\r" not in shown
    assert "You \u241b[2Jsaid \u240devil" in shown
    assert "The model calls g\u241b]0;({\u241b})." in shown


def test_a_terminal_has_editing_and_history(router: tuple[Router, str]) -> None:
    servicer, endpoint = router
    with chat_in_a_terminal(endpoint) as terminal:
        terminal.until("you>")
        terminal.type("hexllo\x1b[D\x1b[D\x1b[D\x7f\r")  # Left, three times, and Backspace
        terminal.until("You said hello.")
        terminal.until("you>")
        terminal.type("\x1b[A\r")  # Up: the line before
        terminal.until_true(lambda: len(servicer.requests) == 2)
        terminal.until("you>")
        terminal.type("/quit\r")
        assert terminal.end() == 0
    texts = [request.chat.messages[-1].content[0].text for request in servicer.requests]
    assert texts == ["hello", "hello"]


def test_a_failed_turn_is_left_out_of_the_conversation(
    router: tuple[Router, str], capsys: pytest.CaptureFixture[str]
) -> None:
    servicer, endpoint = router
    talk(endpoint, "overload", "hello")
    assert "error: try later" in capsys.readouterr().err
    assert len(servicer.requests[1].chat.messages) == 2


def test_a_wrong_key_ends_the_command_with_one_line_and_an_exit_code(router: tuple[Router, str]) -> None:
    _, endpoint = router
    ended = chat(endpoint, "--api-key", "wrong", typed="refuse\nhello\n")
    assert (ended.returncode, ended.stderr) == (1, "slipstream: the API key is wrong\n")


def test_a_key_that_cannot_be_sent_ends_the_command(router: tuple[Router, str]) -> None:
    servicer, endpoint = router
    ended = chat(endpoint, "--api-key", "schl\u00fcssel", typed="hello\nhello\n")
    assert ended.returncode == 1
    assert ended.stderr == "slipstream: api_key: must be printable ASCII characters\n"
    assert not servicer.requests


@pytest.mark.parametrize(("typed", "code"), [("overload\n", 1), ("overload\nhello\n", 0), ("", 0)])
def test_the_exit_code_is_that_of_the_last_turn(router: tuple[Router, str], typed: str, code: int) -> None:
    _, endpoint = router
    assert chat(endpoint, typed=typed).returncode == code


def test_tools_are_answered_by_the_user(
    router: tuple[Router, str], capsys: pytest.CaptureFixture[str]
) -> None:
    servicer, endpoint = router
    prompts = talk(endpoint, "call", "42", "call", "")
    assert prompts[1] == prompts[3] == "f returns> "
    shown = capsys.readouterr().out
    assert shown.count("The model calls f({}).\n") == 2
    assert shown.count("Type what it returns") == 1
    assert servicer.requests[3].chat.messages[-1].content[0].text == '{"error": "failed"}'
    messages = servicer.requests[1].chat.messages
    assert len(messages) == 4
    assert messages[2].tool_calls[0].name == "f"
    assert messages[3].tool_call_id == "functions.f:0"


class MovingFleet(FleetPort):
    """Names the router at `found` to its first caller, and another one to later callers."""

    def __init__(self, found: str) -> None:
        router = process("router")
        router.client_endpoint = found
        super().__init__(router)

    async def GetFleet(self, request: Any, context: Any) -> fleet_pb2.GetFleetResponse:
        answer = await super().GetFleet(request, context)
        self.processes["router-0"].client_endpoint = "127.0.0.1:1"
        return answer


def test_the_greeting_names_the_router_that_answers(
    router: tuple[Router, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, endpoint = router
    lines = iter(("hello", "/quit"))
    with MovingFleet(endpoint).serving() as port:
        options = ChatOptions(ClientAccess(tmp_path, routers=(port.endpoint,)), None, [], {})
        assert run_chat(options, ask=lambda _: next(lines))
        assert ClientAccess(tmp_path, routers=(port.endpoint,)).router() == ("127.0.0.1:1", None)
    shown = capsys.readouterr().out
    assert shown.startswith(f"m at {endpoint}.") and "You said hello." in shown


def test_a_missing_cluster_and_invalid_tools_raise_errors(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no cluster runs"):
        run_chat(ChatOptions(ClientAccess(tmp_path), None, [], {}))
    tools = tmp_path / "tools.json"
    for text in ("{}", "nonsense", "[1]", "[" * 50_000):
        tools.write_text(text)
        with pytest.raises(InvalidArgument, match="--tools"):
            read_tools(tools)
    tools.write_text('[{"type": "function"}]')
    assert read_tools(tools) == [{"type": "function"}]


def test_the_example_declares_the_tools_of_the_demo() -> None:
    assert read_tools(ROOT / "docs" / "examples" / "tools.json") == TOOLS


def test_one_interrupt_drops_the_line_and_two_end_the_conversation(
    router: tuple[Router, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(router[1], "\x03", "Hello.", "\x03", "\x03", "never sent") == ["you> "] * 4
    shown = capsys.readouterr().out
    assert shown.count("Ctrl-C again") == 2 and "You said Hello.." in shown and "never" not in shown
