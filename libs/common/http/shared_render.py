"""One rendering of the metrics for all readers that wait."""

from __future__ import annotations

import asyncio

from prometheus_client.exposition import choose_encoder

from libs.common.telemetry.process_metrics import ProcessMetrics

Page = tuple[bytes, str]  # a text and its content type


class SharedRender:
    """Renders one text at a time, so that a flood of readers costs the process one rendering after the other.

    A reader gets a text whose values were measured after the reader came.
    """

    def __init__(self, metrics: ProcessMetrics) -> None:
        self._metrics = metrics
        self._lock = asyncio.Lock()
        self._coming: dict[str, asyncio.Task[Page]] = {}  # by content type

    async def page(self, accept: str) -> Page:
        """The text for a reader whose Accept header is `accept`."""
        form = choose_encoder(accept)[1]
        coming = self._coming.get(form)
        if coming is None:
            coming = self._coming[form] = asyncio.create_task(self._render(form, accept), name="metrics")
        return await asyncio.shield(coming)

    async def _render(self, form: str, accept: str) -> Page:
        async with self._lock:
            del self._coming[form]  # later readers wait for the next rendering
            self._metrics.measure()
            # A text of thousands of lines takes milliseconds, which streams on the event loop must not wait.
            return await asyncio.to_thread(self._metrics.render, accept)
