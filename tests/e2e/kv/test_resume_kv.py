"""A stream whose workers die goes on from the KV that the store holds: it is read, not computed again."""

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
    """The workers of a stream are killed; whether its KV came from the store. The text is the same anyway."""
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
        # The other prefill worker is to read and not to have it: all of them begin with nothing.
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
    """A store that answers late is done without, and one stream may find the other decode worker with a copy
    of its prompt; so it may take several."""
    numbers = itertools.count()
    until(lambda: resumed_from_the_store(fakes, next(numbers)), what="a stream went on from the store")
