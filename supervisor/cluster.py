"""A local cluster as one object: etcd and the services, started in order and stopped in order.

    async with Cluster(ClusterConfig(), say=print) as cluster:     # ready, or an error that says why
        cluster.record().router_grpc
        cluster.kill("decode-0")                  # comes back by itself
        await cluster.hold("drafter-0")           # stays ended until `release`

On the way out, also after an error or a cancellation, everything is stopped in the reverse order. If
this process is killed, the kernel kills its children (see exec_guard.py).
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import TracebackType

from libs.common.cluster.exit_reports import REPORTED_ROLES, report_exit, run_name
from libs.common.cluster.worker_record import Role, Worker
from libs.common.etcd.access import EtcdAccess
from libs.common.etcd.messages import EtcdRefused, EtcdUnavailable
from libs.common.service_bounds import DEATH_REPORT_WAIT_S
from slipstream.cluster_record import ClusterRecord, ProcessRecord, secret_file
from slipstream.errors import DeadlineExceeded, FailedPrecondition, NotFound, Unauthenticated
from slipstream.rpc.cluster_secret import ClusterSecret
from slipstream.rpc.tls import TlsFiles
from supervisor import drain_marks, process_stats, run_directory
from supervisor.configuration.config_check import check_config, exposed_secrets, idle_drafters, keyless
from supervisor.configuration.plan import (
    ETCD,
    ClusterConfig,
    ProcessPlan,
    plan_services,
    ports_needed,
    thread_limits,
)
from supervisor.etcd import etcd_binary, etcd_command
from supervisor.forking.launcher import ProcessLauncher, open_launcher
from supervisor.health import until_etcd_ready, until_grpc_ready, until_pool_ready
from supervisor.logs import ProcessLogs
from supervisor.pool import POOL_MASTER, plan_masters, pool_ports_needed, with_masters
from supervisor.ports import free_ports
from supervisor.process import SupervisedProcess, service_environment
from supervisor.scrape_targets import watch_routers
from supervisor.start_problems import StartProblems

_SERVICE_ROLES = frozenset(Role)
_ETCD_WAVE = -2
_EXTERNAL_ETCD_S = 2.0
ETCD_PREFIX = "/slipstream/v1/"
_UNTIL_READY = {ETCD: until_etcd_ready, POOL_MASTER: until_pool_ready}


class ClusterSupervisor:
    """The processes of one run directory."""

    def __init__(
        self,
        config: ClusterConfig,
        *,
        say: Callable[[str], None],
        rng: random.Random | None = None,
        launcher: ProcessLauncher | None = None,
    ) -> None:
        """`say` gets one line for everything a user should know: progress, restarts, errors logged.

        `launcher` starts the processes and outlives this object; None: one of this object's, by
        `config.start`.
        """
        run_dir, model = (Path(os.path.realpath(path)) for path in (config.run_dir, config.model))
        self._config = replace(config, run_dir=run_dir, model=model)
        self.say = say
        self._rng = rng or random.Random()
        self._started_s = time.monotonic()
        self._started_at = datetime.now(UTC).isoformat(timespec="seconds")
        self._etcd = EtcdAccess.of(config)
        self._plans: list[ProcessPlan] = []
        self._processes: dict[str, SupervisedProcess] = {}
        self._lock: run_directory.RunDirLock | None = None
        self._logs: ProcessLogs | None = None
        self._problems = StartProblems(say)
        self._launcher = launcher
        self._own_launcher: ProcessLauncher | None = None
        self._reports: set[asyncio.Task[None]] = set()
        self._routers: tuple[Worker, ...] = ()  # the processes in discovery
        self._following: asyncio.Task[None] | None = None
        self._record_is_old = False
        self.ready_s: float | None = None

    async def __aenter__(self) -> ClusterSupervisor:
        self._lock = run_directory.RunDirLock(self._config.run_dir)
        try:
            async with asyncio.timeout(self._config.ready_timeout_s):
                await self._start()
        except TimeoutError:
            late = [p.plan.instance for p in self._processes.values() if p.state != "ready"]
            await self._stop()
            raise DeadlineExceeded(
                f"not ready within {self._config.ready_timeout_s:g} s: {', '.join(late)}; "
                f"see {self._config.run_dir / 'logs'}"
            ) from None
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    def record(self) -> ClusterRecord:
        """The running processes, as in cluster.json."""
        router = next(plan for plan in self._plans if plan.role == Role.ROUTER)
        return ClusterRecord(
            supervisor_pid=os.getpid(),
            supervisor_start_ticks=process_stats.start_ticks(os.getpid()),
            started_at=self._started_at,
            run_dir=str(self._config.run_dir),
            etcd=self._etcd.endpoints,
            router_grpc=router.endpoint,
            router_http=router.http or "",
            model=str(self._config.model),
            ready_s=self.ready_s,
            processes=tuple(self._process_record(process) for process in self._processes.values()),
            tls=_tls_record(self._config.tls),
            etcd_access=_etcd_record(self._config),
            client_ca=str(self._config.tls_client_ca.resolve()) if self._config.tls_client_ca else "",
            plain_http=tuple(self._config.plain_http),
        )

    def rss_bytes(self) -> int:
        """Resident memory of all processes, this one included; shared pages count once in each."""
        pids = [process.pid for process in self._processes.values() if process.pid is not None]
        return sum(process_stats.resident_bytes(pid) for pid in [*pids, os.getpid()])

    def kill(self, instance: str) -> None:
        """SIGKILL a process; it is started again. `NotFound` for an unknown name."""
        self._find(instance).kill()

    async def hold(self, instance: str) -> None:
        """SIGKILL a process and keep it down."""
        await self._find(instance).hold()

    async def release(self, instance: str) -> None:
        """Let a held process run again; returns when it is ready."""
        await self._find(instance).release()

    def kill_now(self) -> None:
        """SIGKILL everything at once; for a second Ctrl-C while stopping."""
        for process in self._processes.values():
            process.kill_now()

    async def _start(self) -> None:
        check_config(self._config)
        ClusterSecret.keep_in(secret_file(self._config.run_dir))
        self._say_what_starts()
        drain_marks.clear_drained(self._config.run_dir)
        self._logs = ProcessLogs(
            self._config.run_dir / "logs",
            on_problem=self._problems,
            is_json=self._config.log_format == "json",
            max_bytes=self._config.log_max_bytes,
            n_files=self._config.log_files,
        )
        taken = {int(a.rpartition(":")[2]) for a in (self._config.http, self._config.grpc) if a}
        n_pool = pool_ports_needed(self._config)
        ports = free_ports(ports_needed(self._config) + 2 + n_pool, rng=self._rng, taken=taken)
        etcd_plan = await self._plan_etcd(ports[:2])
        masters = plan_masters(self._config, etcd=self._etcd.endpoints, ports=ports[2 : 2 + n_pool])
        services = plan_services(
            with_masters(self._config, masters), etcd=self._etcd.endpoints, ports=ports[2 + n_pool :]
        )
        self._plans = [*etcd_plan, *masters, *services]
        if self._launcher is None:
            commands = [plan.command for plan in services]
            environment = service_environment(thread_limits())
            self._launcher = self._own_launcher = open_launcher(self._config.start, commands, environment)
        for wave in sorted({plan.wave for plan in self._plans}):
            started = [self._supervise(plan) for plan in self._plans if plan.wave == wave]
            await _all_ready([process for process in started if process.plan.awaited])
        self._following = asyncio.create_task(self._follow_routers(), name="routers")
        await _all_ready([process for process in self._processes.values() if not process.plan.awaited])
        self.ready_s = time.monotonic() - self._started_s
        self._problems.started()
        self.state_changed()

    async def _follow_routers(self) -> None:
        """Keep scrape.json up to date with processes that routers start."""
        async with aclosing(watch_routers(self._etcd)) as changes:
            async for routers in changes:
                self._routers = routers
                self.state_changed()

    def _say_what_starts(self) -> None:
        config = self._config
        parts = ["etcd"] if config.etcd is None else []
        if config.pool is not None:
            parts.append(f"{config.pool_masters} pool master")
        parts += [f"{count} {role}" for role, count in config.counts().items() if count]
        for text in (*exposed_secrets(config), *keyless(config), *idle_drafters(config)):
            self.say(text)
        self.say(f"starting {', '.join(parts)}")

    async def _plan_etcd(self, ports: list[int]) -> list[ProcessPlan]:
        if self._config.etcd is not None:
            client = self._etcd.open(timeout_s=_EXTERNAL_ETCD_S)
            try:
                await client.get(ETCD_PREFIX)
            except (EtcdUnavailable, EtcdRefused, Unauthenticated) as error:
                raise FailedPrecondition(f"no etcd at {self._config.etcd}: {error}") from None
            finally:
                await client.close()
            return []
        self._etcd = EtcdAccess(f"127.0.0.1:{ports[0]}")
        data_dir = self._config.run_dir / "etcd"
        # It has processes and hints of the run before, of no use now; blocks on disk are elsewhere.
        # Other files in a folder of this name are not etcd's.
        await asyncio.to_thread(shutil.rmtree, data_dir / "member", ignore_errors=True)
        command = etcd_command(etcd_binary(), data_dir=data_dir, client_port=ports[0], peer_port=ports[1])
        return [ProcessPlan(ETCD, ETCD, _ETCD_WAVE, tuple(command), self._etcd.endpoints)]

    def _supervise(self, plan: ProcessPlan) -> SupervisedProcess:
        assert self._logs is not None
        assert self._launcher is not None
        process = SupervisedProcess(plan, self._logs, self._launcher, self)
        self._processes[plan.instance] = process
        process.start()
        return process

    async def until_ready(self, plan: ProcessPlan) -> None:
        """Return when the process of the plan is ready."""
        wait = _UNTIL_READY.get(plan.role) or partial(until_grpc_ready, tls=self._config.tls)
        await wait(plan.admin or plan.endpoint)

    def drained_by(self, plan: ProcessPlan) -> str:
        """Who drained the process, by its mark in the run directory."""
        return drain_marks.drained_by(self._config.run_dir, plan.instance)

    def died(self, plan: ProcessPlan, incarnation: str, *, crashed: bool) -> None:
        """Write the exit report by which routers decide whether a request crashed the worker."""
        if plan.role not in REPORTED_ROLES:
            return

        async def report() -> None:
            client = self._etcd.open(timeout_s=_EXTERNAL_ETCD_S)
            try:
                run = run_name(Role(plan.role), plan.instance, incarnation)
                await report_exit(client, run, crashed=crashed)
            finally:
                await client.close()

        task = asyncio.create_task(report(), name=f"death of {plan.instance}")
        self._reports.add(task)
        task.add_done_callback(self._reports.discard)

    async def _stop(self) -> None:
        """Stop in the reverse of the start order, then release the run directory."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        for wave in sorted({plan.wave for plan in self._plans}, reverse=True):
            wave_plans = (plan for plan in self._plans if plan.wave == wave)
            running = [self._processes[p.instance] for p in wave_plans if p.instance in self._processes]
            grace_s = self._config.grace_s
            await asyncio.gather(*(each.stop(grace_s=each.plan.drain_s + grace_s) for each in running))
        if self._reports:  # without etcd they would be written for longer
            await asyncio.wait(self._reports, timeout=DEATH_REPORT_WAIT_S)
        for report in self._reports:
            report.cancel()
        await asyncio.gather(*self._reports, return_exceptions=True)
        if self._own_launcher is not None:
            self._own_launcher.close()
        if self._logs is not None:
            self._logs.close()
        run_directory.remove_record(self._config.run_dir)
        if self._lock is not None:
            self._lock.close()

    def state_changed(self) -> None:
        """Write the record. A full disk leaves the old one; the processes run on all the same."""
        try:
            run_directory.write_record(self._config.run_dir, self.record(), self._routers)
            self._record_is_old = False
        except OSError as error:
            if not self._record_is_old:
                where = self._config.run_dir
                self.say(f"what runs cannot be noted in {where}, others see what was: {error.strerror}")
            self._record_is_old = True

    def _process_record(self, process: SupervisedProcess) -> ProcessRecord:
        assert self._logs is not None
        plan = process.plan
        return ProcessRecord(
            instance=plan.instance,
            role=plan.role,
            state=process.state,
            pid=process.pid,
            start_ticks=process_stats.start_ticks(process.pid) if process.pid is not None else None,
            endpoint=plan.endpoint,
            http=plan.http,
            restarts=process.restarts,
            log=str(self._logs.path(plan.instance)),
            exit_code=process.exit_code,
            has_worker_service=plan.role in _SERVICE_ROLES,
            admin=plan.admin,
            admin_http=plan.admin_http,
        )

    def _find(self, instance: str) -> SupervisedProcess:
        if instance not in self._processes:
            raise NotFound(f"no process {instance!r}; there are {', '.join(self._processes)}")
        return self._processes[instance]


async def _all_ready(processes: list[SupervisedProcess]) -> None:
    """All ready, or the first failure, at once."""
    try:
        async with asyncio.TaskGroup() as group:
            for process in processes:
                group.create_task(process.wait_ready())
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None


def _tls_record(tls: TlsFiles | None) -> dict[str, str]:
    """Names of files for cluster.json, which holds no secret, and the name in the certificates."""
    if tls is None:
        return {}
    files = {name: str(path.resolve()) for name, path in tls.paths().items()}
    return {**files, "server_name": tls.server_name} if tls.server_name else files


def _etcd_record(config: ClusterConfig) -> dict[str, str]:
    """Settings of the external etcd for cluster.json: names of files, and no secret."""
    files = {name: getattr(config, name) for name in ("etcd_ca", "etcd_certificate", "etcd_key")}
    files["etcd_password_file"] = config.etcd_password_file
    found = {name: str(path.resolve()) for name, path in files.items() if path is not None}
    return {**found, "etcd_user": config.etcd_user} if config.etcd_user else found
