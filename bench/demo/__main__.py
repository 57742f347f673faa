"""`make demo`: the whole cluster in separate processes, and a customer's conversation with an agent.

The agent's text comes from the shipped model through the public gRPC API. After each turn the demo prints
its workers, the cached tokens of the prompt by tier, and its speed. Another worker prefills one of the turns,
and finds the prefix in the kvstore. The draft head runs in decode-0, as on any cluster of this model;
decode-1 asks the drafter service. It is drained at first, and takes over when decode-0 is killed. The last
turn has no drafts, because the drafter service was killed. The last line is one JSON object; exit status 1
means that a check failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.demo.script import SYSTEM_PROMPT, TOOLS, TURNS, CustomerTurn, run_tool
from bench.ledgers import block_counts, wait_until_idle
from slipstream.async_client import AsyncClient
from slipstream.errors import SlipstreamError
from slipstream.operator_access import operator_dial
from slipstream.replies import Reply
from slipstream.rpc.dial import Dial
from slipstream.v1 import worker_pb2, worker_pb2_grpc
from supervisor.cluster import ClusterSupervisor
from supervisor.configuration.config_check import why_no_mooncake
from supervisor.configuration.plan import ClusterConfig

SESSION = "demo"
MAX_CALLS_A_TURN = 3
# The demo chooses the prefill worker of each turn, so that every run moves at the same turn.
PIN_PREFILL_HEADER = "x-slipstream-prefill"
FIRST_WORKER, OTHER_WORKER = "prefill-0", "prefill-1"
LOCAL_HEAD, SERVED = "decode-0", "decode-1"  # decode workers by where their drafts come from
DRAFTER = "drafter-0"
_CALL_S = 10.0
BOLD, DIM, RED, RESET = "\033[1m", "\033[2m", "\033[31m", "\033[0m"


def say(text: str = "", *, end: str = "\n") -> None:
    """Print and flush; without colours unless the output is a terminal."""
    if not sys.stdout.isatty():
        for code in (BOLD, DIM, RED, RESET):
            text = text.replace(code, "")
    print(text, end=end, flush=True)


@dataclass(slots=True)
class DemoConversation:
    """The running conversation, its replies and the problems found."""

    client: AsyncClient
    messages: list[dict[str, Any]] = field(
        default_factory=lambda: [{"role": "system", "content": SYSTEM_PROMPT}]
    )
    replies: list[Reply] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    async def ask(self, headers: dict[str, str]) -> Reply:
        """Send the conversation so far, and stream the reply to the terminal."""
        stream = self.client.stream_chat(
            self.messages,
            tools=TOOLS,
            session=SESSION,
            temperature=0.0,
            max_tokens=160,
            headers=headers,
            timeout_s=60.0,
        )
        opened = False
        async for event in stream:
            if event.text and not opened:
                say(f"  {BOLD}agent{RESET}     ", end="")
                opened = True
            say(event.text, end="")
        if opened:
            say()
        self.replies.append(stream.reply)
        self.messages.append(stream.reply.as_message())
        return stream.reply

    async def turn(self, turn: CustomerTurn, headers: dict[str, str]) -> list[Reply]:
        """Run a customer's message, the tool calls it leads to, and the answer; returns the replies."""
        say(f"  {BOLD}customer{RESET}  {turn.user}")
        self.messages.append({"role": "user", "content": turn.user})
        replies = [await self.ask(headers)]
        called: list[tuple[str, Any]] = []
        while replies[-1].tool_calls and len(replies) <= MAX_CALLS_A_TURN:
            for call in replies[-1].tool_calls:
                arguments = parse_arguments(call.arguments)
                result = run_tool(call.name, arguments)
                called.append((call.name, arguments))
                say(f"  {DIM}calls     {call.name}({call.arguments}) -> {result}{RESET}")
                self.messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            replies.append(await self.ask(headers))
        self._check(turn, called, replies[-1].text)
        return replies

    def _check(self, turn: CustomerTurn, called: Sequence[tuple[str, Any]], answer: str) -> None:
        wanted = [(turn.tool, dict(turn.arguments))] if turn.tool else []
        if list(called) != wanted:
            self.problems.append(f"{turn.user!r}: called {called}, not {wanted}")
        missing = [value for value in turn.states if value not in answer]
        if missing:
            self.problems.append(f"{turn.user!r}: the answer does not state {missing}")


def parse_arguments(text: str) -> Any:
    """The call's arguments; an empty object, which the tool reports, when the model wrote no JSON."""
    try:
        parsed = json.loads(text)
    except json.JSONDecodeError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def show(replies: Sequence[Reply]) -> None:
    """Print one line for each request of a turn: workers, cached tokens, speed."""
    for reply in replies:
        stats, usage = reply.stats, reply.usage
        assert stats is not None
        assert usage is not None
        tiers = ", ".join(f"{tokens} {tier}" for tier, tokens in usage.cached_by_tier.items() if tokens)
        tokens_per_s = (usage.completion_tokens - 1) / stats.decode_ms * 1e3 if stats.decode_ms else 0.0
        drafts = "no drafts"
        if stats.drafted_steps:
            drafts = f"acceptance length {stats.acceptance_length:.2f}"
            if stats.drafted_steps < stats.decode_steps:
                drafts += f" in {stats.drafted_steps} of {stats.decode_steps} steps"
        say(
            f"  {DIM}{stats.prefill_worker} -> {stats.decode_worker} | prompt {usage.prompt_tokens}, "
            f"cached {usage.cached_tokens} ({tiers or 'none'}) | TTFT {stats.ttft_ms:.0f} ms, "
            f"{tokens_per_s:.0f} tokens/s, {drafts}{RESET}"
        )
    say()


async def set_serving(endpoint: str, dial: Dial, *, serves: bool) -> None:
    """Let a worker take requests, or drain it."""
    async with dial(endpoint) as channel:
        stub: worker_pb2_grpc.WorkerServiceAsyncStub = worker_pb2_grpc.WorkerServiceStub(channel)
        if serves:
            await stub.Undrain(worker_pb2.UndrainRequest(), timeout=_CALL_S)
        else:
            await stub.Drain(worker_pb2.DrainRequest(), timeout=_CALL_S)


async def converse(cluster: ClusterSupervisor, conversation: DemoConversation, dial: Dial) -> None:
    """Run the scripted turns; some of them move to another worker, or lose one."""
    worker, served = FIRST_WORKER, cluster.record().find(SERVED).endpoint
    # The first turns run where the draft head is. The router would choose the faster one of the two.
    await set_serving(served, dial, serves=False)
    for number, turn in enumerate(TURNS, 1):
        say(f"{BOLD}Turn {number}{RESET}" + (f" {DIM}({turn.note}){RESET}" if turn.note else ""))
        if "other prefill" in turn.note:
            worker = OTHER_WORKER
        if f"{LOCAL_HEAD} killed" in turn.note:
            await set_serving(served, dial, serves=True)
            await cluster.hold(LOCAL_HEAD)
        if "service killed" in turn.note:
            await cluster.hold(DRAFTER)
        replies = await conversation.turn(turn, {PIN_PREFILL_HEADER: worker})
        show(replies)
        if "other prefill" in turn.note:
            check_moved(conversation, replies[0])
        if "service killed" in turn.note and accepted_drafts(replies):
            conversation.problems.append("drafts were accepted although the drafter was killed")
    await asyncio.gather(cluster.release(LOCAL_HEAD), cluster.release(DRAFTER))


def accepted_drafts(replies: Sequence[Reply], worker: str = "") -> int:
    """Drafts that became text; only those of one decode worker with `worker`."""
    found = [reply.stats for reply in replies if reply.stats is not None]
    return sum(stats.accepted_drafts for stats in found if worker in ("", stats.decode_worker))


def check_moved(conversation: DemoConversation, reply: Reply) -> None:
    """Check that the turn ran on another prefill worker and found its prefix in the kvstore."""
    assert reply.stats is not None
    assert reply.usage is not None
    tiers = reply.usage.cached_by_tier
    if reply.stats.prefill_worker == FIRST_WORKER:
        conversation.problems.append(f"the turn still ran on {FIRST_WORKER}")
    if not tiers.get("dram", 0) + tiers.get("nvme", 0):
        conversation.problems.append("the kvstore served nothing to the other worker")


def report(
    cluster: ClusterSupervisor, conversation: DemoConversation, blocks: dict[str, int], leaked: int
) -> dict[str, Any]:
    """The object of the last line."""
    replies = conversation.replies
    usages = [reply.usage for reply in replies if reply.usage is not None]
    all_stats = [reply.stats for reply in replies if reply.stats is not None]
    decode_s = sum(stats.decode_ms for stats in all_stats) / 1e3
    completion = sum(usage.completion_tokens for usage in usages)
    drafted = [stats for stats in all_stats if stats.proposed_drafts]
    steps = sum(stats.drafted_steps for stats in drafted)
    generated = steps + sum(stats.accepted_drafts for stats in drafted)
    return {
        "ok": not conversation.problems and leaked == 0,
        "turns": len(TURNS),
        "prompt_tokens": sum(usage.prompt_tokens for usage in usages),
        "cached_tokens": sum(usage.cached_tokens for usage in usages),
        "completion_tokens": completion,
        "ttft_ms_p50": round(statistics.median(stats.ttft_ms for stats in all_stats), 1),
        "tokens_per_s": round((completion - len(usages)) / decode_s, 1) if decode_s else 0.0,
        "acceptance_length": round(generated / steps, 2) if steps else 0.0,
        "accepted_drafts_by_place": {
            "decode worker": accepted_drafts(replies, LOCAL_HEAD),
            "drafter service": accepted_drafts(replies, SERVED),
        },
        "kv_bytes_pulled": sum(stats.kv_bytes_pulled for stats in all_stats),
        "transport": all_stats[0].transport,
        "kvstore_blocks": blocks,
        "leaked_blocks": leaked,
        "ready_s": round(cluster.ready_s or 0.0, 1),
        "rss_mb": round(cluster.rss_bytes() / 1e6),
    }


async def run(arguments: argparse.Namespace, run_dir: Path) -> dict[str, Any]:
    """Start a cluster in `run_dir`, run the conversation, stop. Returns the object of the last line."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    # Drafts are on even where they save no time: the demo shows that losing the drafter changes no text.
    config = ClusterConfig(
        run_dir=run_dir,
        transport=transport_of(arguments.transport),
        drafts="on",
        drafts_from="local",
        drafters=1,
        instance_arguments={SERVED: ("--drafter", "service")},
        allow_requested_prefill=True,
    )
    async with ClusterSupervisor(config, say=lambda line: say(f"{DIM}{line}{RESET}")) as cluster:
        record = cluster.record()
        endpoints, dial = record.service_endpoints(), operator_dial(run_dir)
        say(f"ready in {cluster.ready_s:.1f} s\n")
        async with AsyncClient(record.router_grpc) as client:
            conversation = DemoConversation(client)
            await converse(cluster, conversation, dial)
        leaked = await wait_until_idle(endpoints, conversation.problems, dial)
        result = report(cluster, conversation, await block_counts(endpoints, dial), leaked)
        for problem in conversation.problems:
            say(f"{RED}problem: {problem}{RESET}")
        if sys.stdin.isatty() and sys.stdout.isatty() and not arguments.exit:
            await stay(record.router_grpc, record.router_http)
    return result


def transport_of(asked: str) -> str:
    """Mooncake for auto where it loads: the demo shows its transfers, though a local cluster needs none."""
    if asked != "auto":
        return asked
    if missing := why_no_mooncake():
        say(f"KV moves over plain sockets instead of Mooncake: {missing}")
    return "socket" if missing else "mooncake"


async def stay(grpc: str, http: str) -> None:
    """Keep the cluster up until Ctrl-C."""
    body = json.dumps({"messages": [{"role": "user", "content": "Hello!"}], "stream": True})
    say(f"The cluster stays up: gRPC {grpc}, HTTP http://{http}/v1. Try:")
    say(f"  curl -N http://{http}/v1/chat/completions -H 'content-type: application/json' -d '{body}'")
    say("Ctrl-C ends it.")
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stopping.set)
    await stopping.wait()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--transport", default="auto", choices=["auto", "mooncake", "socket"])
    parser.add_argument("--exit", action="store_true", help="end after the conversation, also on a terminal")
    parser.add_argument("--run-dir", type=Path, help="keep state and logs here (default: a temporary folder)")
    arguments = parser.parse_args(argv)
    try:
        with ExitStack() as kept:
            run_dir = arguments.run_dir or Path(
                kept.enter_context(tempfile.TemporaryDirectory(prefix="slipstream-demo-"))
            )
            result = asyncio.run(run(arguments, run_dir))
    except SlipstreamError as error:
        result = {"ok": False, "error": error.message}
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise SystemExit(130) from None
    # Printed last: stopping the cluster may print lines too.
    say(json.dumps(result))
    raise SystemExit(0 if result["ok"] else 1)


if __name__ == "__main__":
    main()
