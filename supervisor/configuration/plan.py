"""Which processes a local cluster has, with which arguments. Pure, but for the ports it is given."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from libs.common.cluster.worker_record import Role
from libs.common.runtime.memory_limit import memory_limit_bytes
from libs.common.worker_bounds import DEFAULT_DRAIN_S
from libs.engine.kernels.device_name import CPU
from libs.engine.parallel.sizes import ParallelSizes, parse_sizes
from libs.worker.process.settings import EngineSettings
from services.decode.settings import DecodeSettings
from slipstream.cluster_record import secret_file
from supervisor.configuration.cluster_options import ClusterOptions
from supervisor.configuration.worker_sizes import WorkerPlace, share_of_unstated

ETCD = "etcd"
# Settings with which services reach an external etcd.
ETCD_ACCESS = ("etcd_ca", "etcd_certificate", "etcd_key", "etcd_user", "etcd_password_file")
POOLS = ("mooncake",)
_ENGINES = (Role.PREFILL, Role.DECODE)
DRAFTS = ("auto", "on", "off")
REMOTE, LOCAL = "remote", "local"
DRAFTERS = ("auto", REMOTE, LOCAL)
LOG_LEVELS = ("debug", "info", "warning", "error")
ACCESS_LOG = ("on", "off")
_SWITCHES = ("--allow-requested-prefill",)  # flags of services without a value


@dataclass(frozen=True, slots=True)
class ClusterConfig(ClusterOptions):
    """The cluster that the user asked for: what flags state, and what only a file or a program does."""

    block_tokens: int = EngineSettings.block_tokens  # of all workers
    decode_steps: str = DecodeSettings.decode_steps
    modules: Mapping[Role, str] = field(default_factory=lambda: {role: f"services.{role}" for role in Role})
    extra_arguments: Mapping[Role, Sequence[str]] = field(default_factory=dict)
    instance_arguments: Mapping[str, Sequence[str]] = field(default_factory=dict)  # by instance
    extra_environment: Mapping[Role, Mapping[str, str]] = field(default_factory=dict)
    config_file: Path | None = None  # that every service reads
    plain_http: tuple[Role, ...] = ()  # by the file
    file_memory_bytes: Mapping[Role, int] = field(default_factory=dict)  # of each worker of these roles
    file_device: Mapping[Role, str] = field(default_factory=dict)
    file_parallel: Mapping[Role, str] = field(default_factory=dict)
    file_drain_s: Mapping[Role, float] = field(default_factory=dict)
    from_file: frozenset[str] = frozenset()  # settings that the file has for some service, and no flag sets
    unused: frozenset[str] = frozenset()  # settings of the file that no process has

    @property
    def head_place(self) -> str:
        """REMOTE or LOCAL. By default the head runs in decode workers that compute on the processor.

        There a step is short, and a message to a drafter costs more than a draft. A cluster
        with drafters, or with devices or ranks, whose steps are long, gets the service.
        """
        if self.drafts_from != "auto":
            return self.drafts_from
        is_far = self._cut(Role.DECODE).n_ranks > 1 or self.device(Role.DECODE) != CPU
        return REMOTE if self.drafters or is_far else LOCAL

    def device(self, role: Role) -> str:
        """The device of workers of this role, by flag or file."""
        return self.sizes.device or self.file_device.get(role, CPU)

    def parallel(self, role: Role) -> str | None:
        """How workers of this role are cut, by flag or file."""
        by_flag = self.flag_parallel(role)
        return self.file_parallel.get(role) if by_flag is None else by_flag

    def parallel_name(self, role: Role) -> str:
        """The flag or the setting of the file that says it, for errors."""
        is_in_file = self.flag_parallel(role) is None
        return f"--config, [{role}] parallel" if is_in_file else f"--{role}-parallel"

    def flag_parallel(self, role: Role) -> str | None:
        """An empty flag is one process, whatever the file says."""
        return {Role.PREFILL: self.prefill_parallel, Role.DECODE: self.decode_parallel}.get(role)

    def _cut(self, role: Role) -> ParallelSizes:
        """Raises InvalidArgument for a cut that is none."""
        return parse_sizes(self.parallel(role) or "", self.parallel_name(role))

    def workers(self) -> list[WorkerPlace]:
        """Where each prefill and decode worker runs. Raises InvalidArgument for a cut that is none."""
        counts, by_flag = self.counts(), self.sizes.memory_bytes
        found = []
        for role in _ENGINES:
            n_bytes = by_flag or self.file_memory_bytes.get(role, 0)
            found += [WorkerPlace(self.device(role), self._cut(role).n_ranks, n_bytes)] * counts[role]
        return found

    def drain_of_s(self, role: Role) -> float:
        """How long a process of this role may drain. `--drain-s` is the routers'."""
        return self.drain_s if role is Role.ROUTER else self.file_drain_s.get(role, DEFAULT_DRAIN_S)

    def drafter_devices(self) -> list[str]:
        """The device of each drafter, by the file: `--device` is of prefill and decode workers."""
        return [self.file_device.get(Role.DRAFTER, CPU)] * self.counts()[Role.DRAFTER]

    def stated_devices(self) -> dict[str, str]:
        """The device of each process that runs, by the flag or the key of the file that states it."""
        counts = self.counts()
        found = {"--device": self.sizes.device} if self.sizes.device else {}
        for role, device in self.file_device.items():
            is_by_flag = role in _ENGINES and self.sizes.device
            if counts[role] and not is_by_flag:
                found[f"{self.config_file}: [{role}] device"] = device
        return found

    def host_memory_bytes(self) -> list[int]:
        """What each worker without a device may take of the host; 0: the worker decides."""
        return [worker.memory_bytes for worker in self.workers() if worker.device == CPU]

    def counts(self) -> dict[Role, int]:
        """How many processes of each role, in the order in which they are started and shown."""
        return {
            Role.KVSTORE: self.kvstores,
            Role.PREFILL: self.prefill,
            Role.DECODE: self.decode,
            Role.DRAFTER: int(self.head_place == REMOTE) if self.drafters is None else self.drafters,
            Role.ROUTER: self.routers,
        }


DATABASE_NAME = "slipstream.db"  # of the routers, in the run directory


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """One process. Its health is asked at `admin`, or else at `endpoint`.

    `wave` n starts when all of n-1 are ready, but for those that are not `awaited`: they have until the end
    of the start. The waves stop in reverse.
    """

    instance: str
    role: str
    wave: int
    command: tuple[str, ...]
    endpoint: str
    http: str | None = None
    admin: str | None = None
    admin_http: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    awaited: bool = True
    drain_s: float = 0.0  # that its running work has when it stops


def instances(config: ClusterConfig) -> Iterator[tuple[Role, str]]:
    """Role and name of every service process."""
    for role, count in config.counts().items():
        for number in range(count):
            yield role, f"{role}-{number}"


def ports_needed(config: ClusterConfig) -> int:
    """How many free ports `plan_services` takes at most."""
    return 2 * sum(config.counts().values()) + 2 * config.routers


def thread_limits(cpu_count: int | None = None) -> dict[str, str]:
    """Several processes share the cores; each with a thread per core would thrash."""
    threads = max(1, (cpu_count or os.cpu_count() or 2) // 2)
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}


def memory_arguments(config: ClusterConfig, role: Role, memory_bytes: int) -> list[str]:
    """The share of a worker with its KV cache in the host, where neither a flag nor the file states one."""
    is_on_host = role in _ENGINES and config.device(role) == CPU
    if not is_on_host or config.sizes.memory_bytes or role in config.file_memory_bytes:
        return []
    share = share_of_unstated(config.host_memory_bytes(), memory_bytes)
    return ["--memory-bytes", str(share)]


def plan_services(
    config: ClusterConfig,
    *,
    etcd: str,
    ports: list[int],
    cpu_count: int | None = None,
    memory_bytes: int | None = None,
) -> list[ProcessPlan]:
    """The service processes: everything else first, routers when all of it is ready."""
    free = iter(ports)
    plans = []
    for role, instance in instances(config):
        first_router = instance == f"{Role.ROUTER}-0"
        listen = config.grpc if first_router and config.grpc else f"127.0.0.1:{next(free)}"
        http = admin = None
        admin_http = f"127.0.0.1:{next(free)}"
        if role is Role.ROUTER:
            http = config.http if first_router and config.http else f"127.0.0.1:{next(free)}"
            admin = f"127.0.0.1:{next(free)}"
        command = [sys.executable, "-m", config.modules[role], "--instance", instance, "--listen", listen]
        command += ["--etcd", etcd, "--admin-http", admin_http]
        if admin is not None:
            command += ["--admin", admin]
        if config.config_file is not None:
            command += ["--config", str(config.config_file)]
        command += memory_arguments(config, role, memory_bytes or memory_limit_bytes())
        command += _arguments(config, role, instance, http)
        plans.append(
            ProcessPlan(
                instance=instance,
                role=role,
                wave=1 if role is Role.ROUTER else 0,
                command=tuple(command),
                endpoint=listen,
                http=http,
                drain_s=config.drain_of_s(role),
                admin=admin,
                admin_http=admin_http,
                env={
                    "SLIPSTREAM_CLUSTER_SECRET_FILE": str(secret_file(config.run_dir)),
                    **thread_limits(cpu_count),
                    **config.extra_environment.get(role, {}),
                },
            )
        )
    return plans


def _arguments(config: ClusterConfig, role: Role, instance: str, http: str | None) -> list[str]:
    """The arguments of a service beside its name and addresses."""
    arguments = _access_arguments(config)
    if role is Role.KVSTORE:
        # Blocks are bytes to it: it needs no model.
        if config.disk_bytes is not None:
            arguments += ["--disk-bytes", str(config.disk_bytes)]
        if config.pool is not None:
            arguments += ["--pool", config.pool]
    else:
        arguments += ["--model", str(config.model)]
        arguments += _given(("--draft-model", config.draft_model)) if role is not Role.ROUTER else []
    if role is Role.DECODE:
        arguments += ["--drafts", config.drafts]
        has_local_head = config.draft_model is not None and config.head_place == LOCAL
        arguments += ["--drafter", LOCAL] if has_local_head else []
    arguments += _given(("--parallel", config.flag_parallel(role)))
    arguments += config.sizes.arguments() if role in _ENGINES else []
    if http is not None:
        arguments += ["--drain-s", f"{config.drain_s:g}"]
        arguments += ["--database", f"sqlite:{config.run_dir.resolve() / DATABASE_NAME}"]
        arguments += ["--allow-requested-prefill"] if config.allow_requested_prefill else []
        arguments += _given(
            ("--served-model-name", config.served_model_name),
            ("--api-keys", config.api_keys),
            ("--shared-prefix", config.shared_prefix),
            ("--prices", config.prices),
            ("--allowed-hosts", config.allowed_hosts),
            ("--cors-origins", config.cors_origins),
            ("--access-log", config.access_log),
            ("--tls-client-ca", config.tls_client_ca),
            ("--autoscale-limits", _absent_tiers(config)),
        )
    if role is not Role.ROUTER:
        arguments += ["--transport", config.transport]
    arguments += ["--log-level", config.log_level, "--log-format", config.log_format]
    left = _without(arguments, config.from_file)
    extra = (*config.extra_arguments.get(role, ()), *config.instance_arguments.get(instance, ()))
    return [*_of_one_process(config, role, instance, http), *left, *extra]


def _of_one_process(config: ClusterConfig, role: Role, instance: str, http: str | None) -> list[str]:
    """The arguments that the file cannot state, because each process has its own."""
    arguments = ["--run-dir", str(config.run_dir)]
    if role is Role.KVSTORE:
        arguments += ["--data-dir", str(config.run_dir / "data" / instance)]
    has_head = config.draft_model is not None or role in (Role.ROUTER, Role.KVSTORE)
    for name in sorted(config.unused):
        if name != "draft_model" or not has_head:
            arguments += [f"--{name.replace('_', '-')}", ""]  # none, whatever the file says
    return arguments if http is None else [*arguments, "--http", http]


def _absent_tiers(config: ClusterConfig) -> str | None:
    """Limits of autoscaling by which no tier is recommended that this cluster does without."""
    counts = config.counts()
    absent = [f"{role}=0:0" for role in (Role.PREFILL, Role.DRAFTER, Role.KVSTORE) if not counts[role]]
    return ",".join(absent) if absent and config.etcd is None else None


def _without(arguments: Sequence[str], names: Collection[str]) -> list[str]:
    """The flags and their values, but for the settings of these names."""
    left: list[str] = []
    parts = iter(arguments)
    for flag in parts:
        values = [] if flag in _SWITCHES else [next(parts)]  # which may begin with - in a file
        if flag[2:].replace("-", "_") not in names:
            left += [flag, *values]
    return left


def _access_arguments(config: ClusterConfig) -> list[str]:
    """How a service proves who it is, and reaches an external etcd: names of files, and no secret."""
    arguments = []
    if config.tls is not None:
        arguments += _given(
            ("--tls-ca", config.tls.ca),
            ("--tls-certificate", config.tls.certificate),
            ("--tls-key", config.tls.key),
            ("--tls-server-name", config.tls.server_name or None),
        )
    return arguments + _given(
        ("--etcd-ca", config.etcd_ca),
        ("--etcd-certificate", config.etcd_certificate),
        ("--etcd-key", config.etcd_key),
        ("--etcd-user", config.etcd_user or None),
        ("--etcd-password-file", config.etcd_password_file),
    )


def _given(*flags: tuple[str, str | Path | None]) -> list[str]:
    """The flags that have a value; paths are absolute, as the services may run elsewhere."""
    found: list[str] = []
    for flag, value in flags:
        if value is not None:
            found += [flag, str(value.resolve()) if isinstance(value, Path) else value]
    return found
