"""The processes of a run directory, as its supervisor records them in `cluster.json`. Only reads."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.errors import NotFound

if TYPE_CHECKING:
    from slipstream.rpc.tls import TlsFiles

RECORD_FILE = "cluster.json"
LOCK_FILE = "lock"
SECRET_FILE = "cluster.secret"


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """One process. `pid` is None while it is down; `start_ticks` distinguishes reuses of a pid.

    `exit_code` is that of its last end, the negative signal where one ended it; None before the first.
    """

    instance: str
    role: str
    state: str
    pid: int | None
    start_ticks: int | None
    endpoint: str
    http: str | None
    restarts: int
    log: str
    exit_code: int | None = None
    has_worker_service: bool = True  # etcd and the masters of the pool have none
    admin: str | None = None  # of a router: where its WorkerService is
    admin_http: str | None = None  # metrics and health

    def has_name(self, name: str) -> bool:
        """Whether it is the process of that name, or of that "role/name"."""
        return name in (self.instance, f"{self.role}/{self.instance}")


@dataclass(frozen=True, slots=True)
class ClusterRecord:
    """The cluster of a run directory. `ready_s` is None until everything was ready once."""

    supervisor_pid: int
    supervisor_start_ticks: int | None
    started_at: str  # ISO 8601, UTC
    run_dir: str
    etcd: str
    router_grpc: str
    router_http: str
    model: str
    ready_s: float | None
    processes: tuple[ProcessRecord, ...] = field(default_factory=tuple)
    tls: Mapping[str, str] = field(default_factory=dict)  # mutual TLS, by the names of TlsFiles' fields
    etcd_access: Mapping[str, str] = field(default_factory=dict)  # settings of an external etcd, by name
    client_ca: str = ""  # PEM whose certificates open the routers' public gRPC port, and no others do

    plain_http: tuple[str, ...] = ()  # roles that serve HTTP without TLS although there are certificates

    @property
    def http_url(self) -> str:
        """Base address of the OpenAI API of the first router."""
        return f"{self.http_scheme('router')}://{self.router_http}/v1"

    def console_url(self) -> str | None:
        """Address of the console of the first router; None where no router runs."""
        ports = (p.admin_http for p in self.processes if p.role == "router" and p.admin_http is not None)
        port = next(ports, None)
        return None if port is None else f"{self.http_scheme('router')}://{port}/console/"

    def http_scheme(self, role: str) -> str:
        """The scheme of the HTTP ports of such a process."""
        return "https" if self.tls and role not in self.plain_http else "http"

    def tls_files(self) -> TlsFiles | None:
        """The files by which the supervisor talks to its processes; None without mutual TLS."""
        if not self.tls:
            return None
        from slipstream.rpc.tls import TlsFiles  # with gRPC, which a command without calls does not load

        ca, certificate, key = (Path(self.tls[name]) for name in ("ca", "certificate", "key"))
        return TlsFiles(ca, certificate, key, self.tls.get("server_name", ""))

    def find(self, name: str) -> ProcessRecord:
        """The process of that name or "role/name". `NotFound`, listing the names, if there is none."""
        for process in self.processes:
            if process.has_name(name):
                return process
        names = ", ".join(process.instance for process in self.processes)
        raise NotFound(f"no process {name!r}; there are {names}")

    def ready_routers(self) -> list[ProcessRecord]:
        """The routers that serve. `NotFound` that says what the others do, if there is none."""
        routers = [process for process in self.processes if process.role == "router"]
        ready = [process for process in routers if process.state == "ready"]
        if not ready:
            states = [f"{each.instance} is {each.state}{_how_to_start(each)}" for each in routers]
            raise NotFound(f"no router serves in {self.run_dir}: {', '.join(states) or 'it has none'}")
        return ready

    def service_endpoints(self) -> dict[str, str]:
        """Endpoint of each process that serves WorkerService, by instance."""
        return {p.instance: p.admin or p.endpoint for p in self.processes if p.has_worker_service}


def _how_to_start(process: ProcessRecord) -> str:
    """What an operator can do for a process that is not ready."""
    if process.state == "drained":
        return f" (`slipstream undrain {process.instance}` starts it)"
    return f" (see {process.log})"


def secret_file(run_dir: Path) -> Path:
    """Where a local cluster keeps its secret. It outlives the processes: blocks on disk depend on it."""
    return run_dir / SECRET_FILE


def is_running(run_dir: Path) -> bool:
    """Whether a supervisor holds the directory."""
    try:
        with (run_dir / LOCK_FILE).open("r") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except FileNotFoundError:
        return False
    except OSError:
        return True


def admin_ports(run_dir: Path) -> list[str]:
    """The gRPC admin ports of the local cluster's ready routers. Raises NotFound."""
    record = read_record(run_dir, instead="--router HOST:PORT")
    return [router.admin for router in record.ready_routers() if router.admin]


def read_record(run_dir: Path, *, instead: str = "") -> ClusterRecord:
    """The cluster that runs in `run_dir`. `NotFound` if none does, also if one was killed there.

    `instead`: the flag that makes a run directory needless; the error names it.
    """
    try:
        record = json.loads((run_dir / RECORD_FILE).read_text())
    except FileNotFoundError:
        record = None
    except OSError as error:
        raise NotFound(f"{run_dir} cannot be a run directory: {error.strerror}") from None
    if record is None or not is_running(run_dir):
        others = f"--run-dir or {instead}" if instead else "--run-dir"
        raise NotFound(f"no cluster runs in {run_dir}; start one with `slipstream up`, or give {others}")
    processes = tuple(ProcessRecord(**process) for process in record.pop("processes"))
    plain_http = tuple(record.pop("plain_http", ()))
    return ClusterRecord(**record, processes=processes, plain_http=plain_http)
