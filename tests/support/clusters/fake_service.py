"""A fake of any service: it accepts the flags, serves health and WorkerService, and does no work.

It appends events to `RUN_DIR/events.jsonl`. `RUN_DIR/behaviour.json`, {instance: behaviour}, selects a fault:

    exit           ends at once with code 3
    never_ready    is alive and stays NOT_SERVING
    deaf           ignores SIGTERM
    breaks         ends with code 5 on SIGTERM
    breeds         starts a child process
    meets          is not ready before all others with `meets` have started too
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from libs.common.cluster.worker_service import WorkerIdentity, WorkerService
from libs.common.rpc.serve import ServiceHost
from libs.common.telemetry.logs import configure_logging
from slipstream.v1 import worker_pb2, worker_pb2_grpc
from tests.support.stubs.idle_process import IdleProcess


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for flag in ("instance", "listen", "etcd", "run-dir", "log-level"):
        parser.add_argument(f"--{flag}", required=True)
    for flag in ("transport", "model", "draft-model", "http", "admin", "admin-http", "data-dir", "drain-s"):
        parser.add_argument(f"--{flag}")
    for flag in ("drafts", "drafter", "memory-bytes", "log-format", "engine", "autoscale-limits"):
        parser.add_argument(f"--{flag}")
    parser.add_argument("--allow-requested-prefill", action="store_true")
    parser.add_argument("--database")
    return parser.parse_args()


def breed() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])


def all_have_started(run_dir: Path) -> bool:
    wanted = {
        name for name, how in json.loads((run_dir / "behaviour.json").read_text()).items() if how == "meets"
    }
    events = map(json.loads, (run_dir / "events.jsonl").read_text().splitlines())
    return wanted <= {event["instance"] for event in events if event["event"] == "started"}


async def main() -> None:
    flags = arguments()
    run_dir = Path(flags.run_dir)

    def note(event: str, **more: object) -> None:
        record = {"instance": flags.instance, "event": event, "at": time.monotonic(), **more}
        with (run_dir / "events.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")

    behaviours = run_dir / "behaviour.json"
    behaviour = json.loads(behaviours.read_text()).get(flags.instance) if behaviours.exists() else None
    configure_logging(flags.instance.rpartition("-")[0], flags.instance, form=flags.log_format or "text")
    note("started", pid=os.getpid(), argv=sys.argv[1:], threads=os.environ.get("OMP_NUM_THREADS"))
    if behaviour == "exit":
        print("this service has no hope", flush=True)
        raise SystemExit(3)
    if behaviour == "breeds":
        note("bred", pid=breed().pid)
    while behaviour == "meets" and not all_have_started(run_dir):
        await asyncio.sleep(0.05)
    host = ServiceHost(flags.listen)
    admin = ServiceHost(flags.admin) if flags.admin else host
    identity = WorkerIdentity(flags.instance.rpartition("-")[0], flags.instance)
    load = worker_pb2.LoadReport(requests_running=2, blocks_free=7)
    worker = WorkerService(identity, IdleProcess(load))
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, admin.server)
    await host.start(["slipstream.v1.WorkerService"])
    if admin is not host:
        await admin.start(["slipstream.v1.WorkerService"])
    note("ready")
    for each in (host, admin):
        await each.set_ready(behaviour != "never_ready")
    if behaviour == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        await asyncio.Event().wait()
    await host.wait_for_stop()
    note("stopping")
    if behaviour == "breaks":
        raise SystemExit(5)
    await host.stop(grace_s=1)
    note("stopped")


if __name__ == "__main__":
    asyncio.run(main())
