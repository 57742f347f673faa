"""SMG (Shepherd Model Gateway) as a process beside the router, with fake workers of the same pace.

SMG is no dependency: it runs in an environment that has the packages `smg`, `smg-grpc-proto` and `h2`, with a
prefill and a decode worker over gRPC (`bench/fakes/smg_worker.py`). All its options have their defaults but
log level, addresses and ports.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from bench.fakes.pace import ANSWER
from bench.router.rig import children, cpu_seconds, make_model
from libs.text.chat_template import encode_chat
from libs.text.tokenizer import Tokenizer
from supervisor.forking.launcher import guarded
from supervisor.ports import free_ports

_ROOT = Path(__file__).resolve().parent.parent.parent
_NEEDED = ["smg", "smg_grpc_proto", "h2"]
_START_S = 60.0
_LOG_LINES = 20
# The text of libs/text/chat_template.py for plain messages, so that both routers make the same prompt.
_CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_{{ message.role }}|>{{ message.role }}<|im_middle|>
{%- if message.role == "assistant" -%}<think></think>{%- endif -%}
{{ message.content }}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_assistant|>assistant<|im_middle|><think></think>
{%- endif -%}
"""


class SmgUnusable(RuntimeError):
    """The given environment lacks SMG, or SMG does not start, or its answer is wrong."""


class SmgUnderTest:
    """A running SMG and its fake workers."""

    def __init__(self, url: str, gateway: int, workers: Sequence[int]) -> None:
        self.url = url
        self._pids = [gateway, *children(gateway)]
        self._worker_pids = list(workers)

    def cpu_s(self) -> float:
        """CPU seconds that SMG's processes have used so far."""
        return sum(map(cpu_seconds, self._pids))

    def workers_cpu_s(self) -> float:
        """CPU seconds that the fake workers have used so far."""
        return sum(map(cpu_seconds, self._worker_pids))

    async def loop_delay_ms(self) -> dict[str, float]:
        """SMG has no such figure."""
        return {}


async def interpreter(where: Path) -> Path:
    """The Python of an environment, given by folder or interpreter. Raises SmgUnusable, which names what is
    missing."""
    python = where / "bin" / "python" if os.path.isdir(where) else where  # noqa: ASYNC240
    if not os.access(python, os.X_OK):
        raise SmgUnusable(f"{python} is no Python: --smg takes an environment's folder or its interpreter")
    code = (
        "import importlib.util as u, sys;"
        f"print([n for n in {_NEEDED} if u.find_spec(n) is None]); sys.exit(sys.version_info < (3, 11))"
    )
    process = await asyncio.create_subprocess_exec(python, "-c", code, stdout=PIPE, stderr=PIPE)
    out, error = await process.communicate()
    if process.returncode or out.strip() != b"[]":
        found = (out + error).decode(errors="replace").strip()
        raise SmgUnusable(
            f"{python} cannot run SMG; it wants Python 3.11 and `pip install smg smg-grpc-proto h2`. "
            f"Missing there: {found}"
        )
    return python


@asynccontextmanager
async def smg_beside(
    where: Path, folder: Path, *, prefill_ms: float, step_ms: float, more: Sequence[str] = ()
) -> AsyncIterator[SmgUnderTest]:
    """Start SMG in front of its fake workers, and check an answer; `more` extends its command line.

    Raises SmgUnusable."""
    python = await interpreter(where)
    model = _model(folder / "smg-model")
    tokenizer = Tokenizer.from_dir(model)
    answer = ",".join(map(str, tokenizer.encode_text(ANSWER)))
    pace = ["--prefill-ms", str(prefill_ms), "--step-ms", str(step_ms)]
    async with AsyncExitStack() as stack:
        workers, urls = [], {}
        for tier in ("prefill", "decode"):
            command = [str(python), "-m", "bench.fakes.smg_worker", "--tier", tier, *pace]
            command += ["--model", str(model), "--answer", answer]
            log = folder / f"smg-{tier}.log"
            worker = await stack.enter_async_context(_running(command, log))
            urls[tier] = f"grpc://127.0.0.1:{await _port(worker, log)}"
            workers.append(worker.pid)
        port, metrics_port = free_ports(2, rng=random.Random(), taken=set())
        log = folder / "smg.log"
        command = [str(python), "-m", "smg", "launch", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
        # SGLang's tiers connect over the bootstrap port; the fakes do not use it.
        command += ["--pd-disaggregation", "--prefill", urls["prefill"], "8998", "--decode", urls["decode"]]
        command += ["--model-path", str(model), "--log-level", "warn", "--worker-startup-check-interval", "1"]
        gateway = await stack.enter_async_context(_running([*command, *more], log))
        url = f"http://127.0.0.1:{port}"
        await _ready(url, gateway, log)
        await _check_answer(url, tokenizer, log)
        yield SmgUnderTest(url, gateway.pid, workers)


def _model(folder: Path) -> Path:
    """The files that SMG reads of a checkpoint: the project's tokenizer, and a template."""
    make_model(folder)
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "kimi_k2"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(_CHAT_TEMPLATE)
    return folder


@asynccontextmanager
async def _running(command: Sequence[str], log: Path) -> AsyncIterator[Process]:
    """A process that ends with the block, or with this process."""
    environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            *guarded(command),
            stdin=PIPE,
            stdout=PIPE if "bench.fakes.smg_worker" in command else out,
            stderr=out,
            env=environment,
        )
    try:
        yield process
    finally:
        # SMG waits five seconds for load balancers before it ends, and this run has none.
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _port(worker: Process, log: Path) -> int:
    assert worker.stdout is not None
    async with asyncio.timeout(_START_S):
        line = await worker.stdout.readline()
    if not line.startswith(b"listening "):
        raise SmgUnusable(f"a fake worker of SMG did not start: {_tail(log)}")
    return int(line.split()[1])


async def _ready(url: str, gateway: Process, log: Path) -> None:
    """Wait until SMG has its workers. Raises SmgUnusable with the last lines of its log."""
    deadline_s = asyncio.get_running_loop().time() + _START_S
    async with aiohttp.ClientSession() as session:
        while True:
            if gateway.returncode is not None:
                raise SmgUnusable(f"SMG ended with status {gateway.returncode}: {_tail(log)}")
            try:
                async with session.get(f"{url}/readiness") as answer:
                    if answer.status == 200:
                        return
                    state = f"{answer.status} {await answer.text()}"
            except aiohttp.ClientError as error:
                state = str(error)
            if asyncio.get_running_loop().time() > deadline_s:
                raise SmgUnusable(f"SMG was not ready in {_START_S:.0f} s, last {state!r}: {_tail(log)}")
            await asyncio.sleep(0.1)


async def _check_answer(url: str, tokenizer: Tokenizer, log: Path) -> None:
    """Check that prompt and answer equal those through our router. Raises SmgUnusable."""
    messages = [
        {"role": "user", "content": "hello you"},
        {"role": "assistant", "content": "so"},
        {"role": "user", "content": "and on"},
    ]
    prompt_tokens = len(encode_chat(tokenizer, messages).token_ids)
    body: dict[str, Any] = {"model": "bench", "messages": messages, "max_tokens": 8, "ignore_eos": True}
    timeout = aiohttp.ClientTimeout(total=_START_S)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.post(f"{url}/v1/chat/completions", json=body) as answer,
    ):
        text = await answer.text()
    if answer.status != 200:
        raise SmgUnusable(f"SMG answers {answer.status} {text}: {_tail(log)}")
    found = json.loads(text)
    seen = found["usage"]["prompt_tokens"], found["choices"][0]["message"]["content"]
    expected = prompt_tokens, tokenizer.decode(tokenizer.encode_text(ANSWER)[:8])
    if seen != expected:
        raise SmgUnusable(f"SMG makes another prompt or answer: {seen}, not {expected}")


def _tail(log: Path) -> str:
    """The last lines of a log."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join(["its last lines:", *lines[-_LOG_LINES:]])
