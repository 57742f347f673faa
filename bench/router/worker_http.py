"""The pace of the fake workers as an OpenAI-style HTTP worker, for other routers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

from aiohttp import web

from bench.router.pace import Pace


class OpenAiFace:
    """The same pace behind OpenAI's streaming shape: a worker for routers that speak HTTP to theirs."""

    def __init__(self, pace: Pace, pieces: Sequence[str]) -> None:
        self._pace = pace
        self._pieces = pieces

    def app(self) -> web.Application:
        """The routes other routers ask a worker for."""
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        for path in ("/health", "/health_generate", "/ping"):
            app.router.add_get(path, self._health)
        for path in ("/get_server_info", "/server_info", "/get_model_info", "/model_info"):
            app.router.add_get(path, self._info)
        return app

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        count = int(body.get("max_completion_tokens") or body.get("max_tokens") or 16)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        text = sum(len(str(message.get("content") or "")) for message in body["messages"])
        await asyncio.sleep(self._pace.prefill_s(text // 4))
        for index in range(count):
            if index:
                await asyncio.sleep(self._pace.step_ms / 1e3)
            await response.write(self._chunk({"content": self._pieces[index % len(self._pieces)]}, None))
        await response.write(self._chunk({}, "length") + b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _chunk(self, delta: dict[str, str], finish: str | None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "bench"}
        return b"data: " + json.dumps(chunk | {"choices": [choice]}).encode() + b"\n\n"

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "bench", "object": "model"}]})

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def _info(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": "bench", "served_model_name": "bench", "is_generation": True})
