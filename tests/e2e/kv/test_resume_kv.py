"""A stream whose workers die continues from KV in the kvstore, which is read, not computed again."""

from __future__ import annotations

import itertools
import os
import signal
from typing import Any

from tests.support.clusters.disturbance import DECODERS, PREFILLERS
from tests.support.clusters.local_cluster import LocalCluster, until

HELD = "slipstream_kvstore_blocks_dram"
READ = "slipstream_kvstore_hits_dram_total"
MIN_BLOCKS = 10
ARGUMENTS: dict[str, Any] = {
    "temperature": 1.0,
    "seed": 21,
    "presence_penalty": 0.5,
    "max_tokens": 120,
    "ignore_eos": True,
}


def resumed_from_the_store(fakes: LocalCluster, number: int) -> bool:
    """Kill the workers of a stream; whether its KV came from the store. The text is the same either way."""
    text = f"Case {number}. " + " ".join(f"order {number}-{i}" for i in range(200))
    messages = [{"role": "user", "content": text}]
    whole = fakes.client.chat(messages, **ARGUMENTS)
    fakes.assert_idle()
    assert fakes.status("kvstore-0").counters[HELD] > MIN_BLOCKS
    with fakes.gate.held(*DECODERS, from_token=60) as gate:
        stream = fakes.client.stream_chat(messages, **ARGUMENTS)
        events = iter(stream)
        while next(events).completion_tokens < 20:
            pass
        until(lambda: any(map(fakes.sequences, DECODERS)), what="it runs")
        # The other prefill worker must read the KV: all of them start with empty caches.
        victims = [name for name in DECODERS if fakes.sequences(name)] + list(PREFILLERS)
        pids = {name: fakes.pid(name) for name in victims}
        read = fakes.status("kvstore-0").counters.get(READ, 0.0)
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)
        gate.open()
    for _ in events:
        pass
    assert stream.reply.as_message() == whole.as_message()
    assert stream.reply.stats is not None and stream.reply.stats.attempts > 1
    for name, pid in pids.items():
        fakes.until_running(name, but=pid)
    fakes.assert_idle()
    return fakes.status("kvstore-0").counters[READ] - read >= MIN_BLOCKS


def test_kv_of_a_stream_whose_workers_died_comes_from_the_store(fakes: LocalCluster) -> None:
    """The test tries several streams: workers do not wait for a slow store, and the other decode worker may
    have a copy of the prompt."""
    numbers = itertools.count()
    until(lambda: resumed_from_the_store(fakes, next(numbers)), what="a stream went on from the store")
