"""SMG (Shepherd Model Gateway) beside the router: it and workers of the same pace, as processes of its own.

It is no dependency: it runs where an environment has its packages `smg` and `smg-grpc-proto`. A prefill and
a decode worker over gRPC (`router/smg_worker.py`), its own defaults but for log level, loopback and ports.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import random
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from bench.router.pace import ANSWER
from bench.router.rig import children, cpu_seconds, make_model
from libs.text.chat_template import encode_chat
from libs.text.tokenizer import Tokenizer
from supervisor.ports import free_ports

_ROOT = Path(__file__).resolve().parent.parent.parent
_NEEDED = ["smg", "smg_grpc_proto", "h2"]
_START_S = 60.0
_LOG_LINES = 20
_PR_SET_PDEATHSIG = 1
# What libs/text/chat_template.py makes of plain messages, so that both routers make the same prompt.
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
    """SMG is not installed where it was said to be, does not start, or does not do what was asked of it."""


class SmgUnderTest:
    """It and its workers, running."""

    def __init__(self, url: str, gateway: int, workers: Sequence[int]) -> None:
        self.url = url
        self._pids = [gateway, *children(gateway)]
        self._worker_pids = list(workers)

    def cpu_s(self) -> float:
        """CPU seconds its processes have used so far."""
        return sum(map(cpu_seconds, self._pids))

    def workers_cpu_s(self) -> float:
        """CPU seconds its fake workers have used so far."""
        return sum(map(cpu_seconds, self._worker_pids))

    async def loop_delay_ms(self) -> dict[str, float]:
        """It is not asked for any."""
        return {}


async def interpreter(where: Path) -> Path:
    """The Python of an environment, given by its folder or itself. Raises SmgUnusable: what is missing."""
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
    """SMG before its own fakes, ready and checked; `more` goes to its command line. Raises SmgUnusable."""
    python = await interpreter(where)
    model = _model(folder / "smg-model")
    tokenizer = Tokenizer.from_dir(model)
    answer = ",".join(map(str, tokenizer.encode_text(ANSWER)))
    pace = ["--prefill-ms", str(prefill_ms), "--step-ms", str(step_ms)]
    async with AsyncExitStack() as stack:
        workers, urls = [], {}
        for tier in ("prefill", "decode"):
            command = [str(python), "-m", "bench.router.smg_worker", "--tier", tier, *pace]
            command += ["--model", str(model), "--answer", answer]
            log = folder / f"smg-{tier}.log"
            worker = await stack.enter_async_context(_running(command, log))
            urls[tier] = f"grpc://127.0.0.1:{await _port(worker, log)}"
            workers.append(worker.pid)
        port, metrics_port = free_ports(2, rng=random.Random(), taken=set())
        log = folder / "smg.log"
        command = [str(python), "-m", "smg", "launch", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
        # The bootstrap port is one that SGLang's tiers meet at; the fakes do not.
        command += ["--pd-disaggregation", "--prefill", urls["prefill"], "8998", "--decode", urls["decode"]]
        command += ["--model-path", str(model), "--log-level", "warn", "--worker-startup-check-interval", "1"]
        gateway = await stack.enter_async_context(_running([*command, *more], log))
        url = f"http://127.0.0.1:{port}"
        await _ready(url, gateway, log)
        await _check_answer(url, tokenizer, log)
        yield SmgUnderTest(url, gateway.pid, workers)


def _model(folder: Path) -> Path:
    """What SMG reads of a checkpoint: our tokenizer, named as Kimi's, and a template."""
    make_model(folder)
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "kimi_k2"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(_CHAT_TEMPLATE)
    return folder


@asynccontextmanager
async def _running(command: Sequence[str], log: Path) -> AsyncIterator[Process]:
    """A process that ends with the block, or with us."""
    environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=PIPE,
            stdout=PIPE if "bench.router.smg_worker" in command else out,
            stderr=out,
            env=environment,
            preexec_fn=_die_with_parent,
        )
    try:
        yield process
    finally:
        # SMG waits five seconds for load balancers before it ends; nobody asks here any more.
        if process.returncode is None:
            process.kill()
        await process.wait()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


async def _port(worker: Process, log: Path) -> int:
    assert worker.stdout is not None
    async with asyncio.timeout(_START_S):
        line = await worker.stdout.readline()
    if not line.startswith(b"listening "):
        raise SmgUnusable(f"a fake worker of SMG did not start: {_tail(log)}")
    return int(line.split()[1])


async def _ready(url: str, gateway: Process, log: Path) -> None:
    """It has its workers. Raises SmgUnusable with what it logged last."""
    deadline_s = asyncio.get_running_loop().time() + _START_S
    async with aiohttp.ClientSession() as session:
        while True:
            if gateway.returncode is not None:
                raise SmgUnusable(f"SMG ended with status {gateway.returncode}: {_tail(log)}")
            try:
                async with session.get(f"{url}/readiness") as answer:
                    if answer.status == 200:
                        return
                    said = f"{answer.status} {await answer.text()}"
            except aiohttp.ClientError as error:
                said = str(error)
            if asyncio.get_running_loop().time() > deadline_s:
                raise SmgUnusable(f"SMG was not ready in {_START_S:.0f} s, it says {said!r}: {_tail(log)}")
            await asyncio.sleep(0.1)


async def _check_answer(url: str, tokenizer: Tokenizer, log: Path) -> None:
    """The same prompt and the same answer as through our router, or SmgUnusable."""
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
