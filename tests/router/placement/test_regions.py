"""Regions: those of workers' records and of --region-ms, and KV that stays in its region."""

from __future__ import annotations

import pytest

from libs.common.cluster.worker_record import Role, Worker, decode_worker, encode_worker
from libs.common.runtime.loading import load_settings
from libs.worker.process.settings import WorkerSettings
from services.router.settings import parse_region_ms


def test_a_worker_record_carries_its_region_and_old_records_have_none() -> None:
    worker = Worker(Role.PREFILL, "p0", "127.0.0.1:1", "i-1", region="eu-west")
    assert decode_worker(worker.key, encode_worker(worker)).worker == worker
    plain = Worker(Role.PREFILL, "p0", "127.0.0.1:1", "i-1")
    assert b"region" not in encode_worker(plain)
    assert decode_worker(plain.key, encode_worker(plain)).worker.region == ""
    with pytest.raises(ValueError, match="region"):
        Worker(Role.PREFILL, "p0", "127.0.0.1:1", "i-1", region="a/b")


def test_a_worker_takes_its_region_from_its_setting() -> None:
    def region(*arguments: str) -> str:
        given = ["--instance", "p0", *arguments]
        return load_settings(
            WorkerSettings, section="drafter", program="p", description="", arguments=given
        ).region

    assert region("--region", "eu") == "eu"
    assert region() == ""


def test_a_router_takes_distances_of_regions_from_its_setting() -> None:
    assert parse_region_ms("") == {}
    assert parse_region_ms("eu=0,us=80.5") == {"eu": 0.0, "us": 80.5}
    for wrong in ("eu", "=1", "eu=", "eu=-1", "eu=nan", "eu=soon"):
        with pytest.raises(ValueError):
            parse_region_ms(wrong)
