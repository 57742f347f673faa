"""All tiers have the same metrics; the metrics page names them and `kv stat` shows them."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from libs.common.telemetry.counters import Counters
from libs.common.telemetry.metric_tables.table import METRICS
from libs.common.transport.open import open_transport
from services.kvstore.core.metrics import evicted_and_wanted, tier_metrics
from services.kvstore.core.node import Node
from services.kvstore.core.puts import Puts
from services.kvstore.disk.set import DiskSet
from services.kvstore.disk.tier import DiskTier
from services.kvstore.dram.tier import DramTier
from services.kvstore.pool.config import PoolOptions
from services.kvstore.pool.tier import PoolTier
from services.kvstore.service import KvstoreServicer
from slipstream.cli.kv.nodes import NodeReply
from slipstream.cli.kv.show import _node
from slipstream.enum_names import KVSTORE_TIERS
from slipstream.v1 import worker_pb2
from tests.kvstore.disk.memory_disk import MemoryDisk
from tests.kvstore.pool.memory_pool import MemoryPool
from tests.support.stubs.idle_process import idle_service

PAGE = Path(__file__).parents[3] / "docs" / "kvstore-metrics.md"
KINDS = {metric.name: metric.kind for metric in METRICS.values()}


def named() -> dict[str, list[str]]:
    """Return the metric of each tier by row of the page."""
    found = {}
    for line in PAGE.read_text().splitlines():
        what, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        names = [re.fullmatch(r"`(\w+)`", cell) for cell in cells]
        if len(cells) == len(KVSTORE_TIERS.values) and all(names):
            short = [name[1] for name in names if name is not None]
            found[what] = [
                name if name.startswith("slipstream_") else f"slipstream_kvstore_{name}" for name in short
            ]
    return found


def test_the_metrics_page_names_each_metric_of_the_table_once() -> None:
    names = [name for row in named().values() for name in row]
    assert len(named()) == 10 and len(set(names)) == len(names) == 10 * len(KVSTORE_TIERS.values)
    assert METRICS.keys() >= set(names)
    of_a_tier = re.compile(r"slipstream_kvstore_\w+_(dram|nvme|pool)(_|$)")
    left = {name for name in METRICS if of_a_tier.match(name)}.difference(names)
    assert left == {"slipstream_kvstore_index_bytes_nvme", "slipstream_kvstore_inventory_blocks_pool"}


async def test_a_node_with_all_tiers_reports_every_gauge_and_kv_stat_shows_it() -> None:
    disks = DiskSet([DiskTier(Path("/memory"), disk_bytes=2 << 20, io=MemoryDisk(record=False))])
    disks.open()
    dram = DramTier(1 << 20)
    options = PoolOptions("127.0.0.1:1", staging_bytes=4 << 20)
    client: Any = MemoryPool(options)
    transport = open_transport("socket")
    node = Node(dram, disks, transport, pool=PoolTier(dram, options, client))
    try:
        reported = node.measure()
        assert METRICS.keys() >= reported.keys() and reported.items() >= tier_metrics(node.store).items()
        gauges = {name for row in named().values() for name in row if KINDS[name] == "gauge"}
        assert gauges <= set(reported)
        # Call counters exist only after a call; here each gets a distinct value.
        values = {name: float(at) for at, name in enumerate((n for row in named().values() for n in row), 2)}
        pins = {"_count": 50.0, "_sum": 1.0}
        values |= {
            f'slipstream_kvstore_pin_seconds{part}{{tier="{tier}"}}': value
            for part, value in pins.items()
            for tier in KVSTORE_TIERS.values
        }
        report = _node(NodeReply("kv", worker_pb2.GetStatusResponse(counters=values), ""))
        for at, tier in enumerate(KVSTORE_TIERS.values):
            shown = set(report["tiers"][tier].values())
            for what, names in named().items():
                if "time" not in what:  # `kv stat` shows the mean of times
                    assert values[names[at]] in shown, (what, tier)
            assert (report["tiers"][tier]["pins"], report["tiers"][tier]["mean_pin_ms"]) == (50.0, 20.0)
            gaps_s = values[named()["time between the two, seconds"][at]]
            assert report["tiers"][tier]["mean_rewanted_gap_ms"] == (
                gaps_s * 1e3 / values[named()["evicted, then wanted"][at]]
            )
        servicer = KvstoreServicer(
            node.store,
            Puts(node.store, transport, Counters(), now_ms=lambda: 0.0),
            transport,
            idle_service(),
        )
        assert "slipstream_kvstore_corrupt_blocks_dram_total" in servicer.measure()
    finally:
        await node.close()
        await transport.close()


def test_blocks_evicted_and_wanted_are_those_of_the_last_tier() -> None:
    dram = SimpleNamespace(table=SimpleNamespace(rewanted=(7, 0.0), n_blocks=4, n_bytes=400))
    disk = SimpleNamespace(
        metrics=lambda: {
            "slipstream_kvstore_blocks_nvme": 2,
            "slipstream_kvstore_bytes_nvme": 60,
            "slipstream_kvstore_evicted_rerequested_nvme_total": 3,
        }
    )
    memory_only: Any = SimpleNamespace(dram=dram, disk=None, pool=None)
    with_disk: Any = SimpleNamespace(dram=dram, disk=disk, pool=None)
    assert evicted_and_wanted(memory_only) == (7, 100.0)
    assert evicted_and_wanted(with_disk) == (3, 30.0)
