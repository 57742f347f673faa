"""Many readers of the metrics share renderings, and none gets values from before it came."""

from __future__ import annotations

import asyncio

from libs.common.http.shared_render import SharedRender
from libs.common.telemetry.counters import Counters
from libs.common.telemetry.process_metrics import ProcessMetrics


class CountedMetrics(ProcessMetrics):
    """Metrics that count their measurements."""

    measured = 0

    def __init__(self) -> None:
        super().__init__("decode", Counters(), lambda _: {})

    def measure(self) -> None:
        self.measured += 1
        self.counters.set("slipstream_requests_running", self.measured)


def running(page: tuple[bytes, str]) -> float:
    (line,) = [line for line in page[0].decode().splitlines() if line.startswith("slipstream_requests_run")]
    return float(line.split()[1])


async def test_readers_that_wait_together_share_a_rendering() -> None:
    metrics = CountedMetrics()
    render = SharedRender(metrics)
    accepts = [f"text/plain; q=0.{number}" for number in range(100)]  # made-up headers make no new text
    pages = await asyncio.gather(*map(render.page, accepts))
    assert metrics.measured == 1
    assert {running(page) for page in pages} == {1.0}


async def test_a_reader_gets_values_of_its_own_time() -> None:
    metrics = CountedMetrics()
    render = SharedRender(metrics)
    first = asyncio.create_task(render.page(""))
    while not metrics.measured:
        await asyncio.sleep(0)
    second = asyncio.create_task(render.page(""))  # the first text is being made
    assert (running(await first), running(await second)) == (1.0, 2.0)


async def test_a_reader_that_leaves_takes_the_text_from_no_other() -> None:
    render = SharedRender(CountedMetrics())
    leaving, staying = (asyncio.create_task(render.page("")) for _ in range(2))
    await asyncio.sleep(0)
    leaving.cancel()
    assert running(await staying) == 1.0
