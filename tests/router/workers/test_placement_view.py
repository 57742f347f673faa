"""The columns of placement follow every change of a worker: load, age of its report, readiness, rates."""

from __future__ import annotations

from bench.placement.decision import Scene, fleet_of_records
from bench.placement.idle_fleet import NOW_S, IdleConnection, open_fleet
from libs.common.cluster.worker_record import Role
from services.router.placement.fleet_arrays import FleetArrays
from services.router.workers import connection
from services.router.workers.connection import TokensInFlight
from services.router.workers.fleet import RouterFleet
from slipstream.v1 import worker_pb2


class Clock:
    now_s = NOW_S

    def __call__(self) -> float:
        return self.now_s


def columns(arrays: FleetArrays) -> dict[str, object]:
    """Everything that a decision reads of the workers."""
    found: dict[str, object] = {"turns": list(arrays.prefill.cold_turns)}
    for part in (arrays.prefill, arrays.decode):
        for name, value in vars(part).items():
            if hasattr(value, "tolist"):
                found[f"{type(part).__name__}.{name}"] = value.tolist()
        found[f"{type(part).__name__}.rates"] = part.rates._columns.tolist()
        found[f"{type(part).__name__}.usable"] = {
            group: rows.tolist() for group, rows in part.usable(b"bench".hex()).items()
        }
    found["queues"] = [each.tolist() for each in arrays.prefill.queues()]
    return found


def check(fleet: RouterFleet) -> dict[str, object]:
    """The columns of now, which equal those of records of now."""
    now = columns(fleet.placement_arrays())
    assert now == columns(FleetArrays(fleet_of_records(fleet)))
    return now


async def test_each_change_reaches_the_columns() -> None:
    clock = Clock()
    async with open_fleet(3, clock=clock) as fleet:
        scene = Scene(fleet)
        prefill, decode = fleet.links_of(Role.PREFILL)[1], fleet.links_of(Role.DECODE)[2]
        assert isinstance(prefill, IdleConnection) and isinstance(decode, IdleConnection)
        seen = [check(fleet)]

        def changed() -> bool:
            seen.append(check(fleet))
            return seen[-1] != seen[-2]

        assert not changed()
        counts = [TokensInFlight(prefill, 70), TokensInFlight(decode, 900)]
        assert changed()
        counts[1].add(1)
        assert changed()
        for count in counts:
            count.release()
        assert changed()
        scene.change(decode)
        assert changed()
        fleet.note_cold_request(prefill.key)
        assert changed()
        fleet.book.observe_pull(decode.key, n_bytes=1 << 24, transfer_ms=500.0)
        assert changed()
        fleet.book.fade(1.0)
        fleet.book.fade(60.0)
        assert changed()
        clock.now_s += connection.STALE_AFTER_S + 0.1
        assert changed()
        prefill.report_load(worker_pb2.LoadReport(sequence=1 << 40, draining=True))
        assert not prefill.ready
        assert changed()
