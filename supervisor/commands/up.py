"""`slipstream up`: what its flags and its file come to, and the cluster in the foreground."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from libs.common.runtime.memory_limit import memory_limit_bytes
from slipstream.cli.options import tls_from
from slipstream.errors import InvalidArgument
from supervisor.cluster import ClusterSupervisor
from supervisor.configuration.cluster_file import ClusterFile
from supervisor.configuration.cluster_options import (
    ANY_PORT,
    DEFAULT_DRAFT_MODEL,
    DEFAULT_MODEL,
    ClusterOptions,
    WorkerSizes,
)
from supervisor.configuration.plan import LOCAL, ClusterConfig
from supervisor.configuration.worker_sizes import (
    check_devices,
    check_driver,
    check_memory,
    has_cuda_driver,
)


def say(line: str) -> None:
    """Print progress and problems to stderr, so that output can be piped. The cluster runs on when stderr is
    closed or full."""
    with contextlib.suppress(OSError):
        print(f"slipstream: {line}", file=sys.stderr, flush=True)


def checked_config(options: Mapping[str, Any], file: Path | None, flags: Collection[str]) -> ClusterConfig:
    """What the flags and the file come to. `options`: the values of all flags; `flags`: those given.

    Raises InvalidArgument.
    """
    config = _of_options(options)
    if file is not None:
        config = with_file(config, file, flags)
    config = with_fitting_draft_model(with_server_name(config, options["tls_server_name"]))
    check_counts(config)
    check_driver(config.stated_devices(), has_driver=has_cuda_driver())
    check_devices(config.workers(), config.drafter_devices())
    check_memory(config.host_memory_bytes(), memory_limit_bytes())
    return config


def _of_options(options: Mapping[str, Any]) -> ClusterConfig:
    values = {each.name: options[each.name] for each in fields(ClusterOptions) if each.name in options}
    for name in ("http", "grpc"):
        values[name] = None if values[name] == ANY_PORT else values[name]
    sizes = WorkerSizes.of(options)
    tls = tls_from(options["tls_ca"], options["tls_certificate"], options["tls_key"])
    return ClusterConfig(**values, sizes=sizes, tls=tls)


# Parameters of `slipstream up` that are another setting of a service.
_SETTINGS = {"grpc": "listen", "prefill_parallel": "parallel", "decode_parallel": "parallel"}


def with_file(given: ClusterConfig, path: Path, flags: Collection[str]) -> ClusterConfig:
    """The configuration with what the file sets and no flag does. `flags`: fields given as flags.

    Raises InvalidArgument for a file that cannot be used.
    """
    settings = {_SETTINGS.get(name, name) for name in flags}
    file = ClusterFile.read(path, settings)
    if given.etcd is None and (other := file.other_etcd()):
        say(f"{path}: the etcd of services, {other}, is not dialled: this cluster has its own (see --etcd)")
    by_flag = set(flags)
    if given.tls is not None:  # services read the file's name
        by_flag.add("tls")
        given = replace(given, tls=replace(given.tls, server_name=file.tls_server_name()))
    values = {name: value for name, value in file.config_values().items() if name not in by_flag}
    from_file = file.names() - settings - file.unused
    return replace(given, **values, config_file=file.path, from_file=from_file, unused=file.unused)


def with_server_name(config: ClusterConfig, name: str) -> ClusterConfig:
    """The configuration with the name of --tls-server-name, where it is given. Raises InvalidArgument."""
    if not name:
        return config
    if config.tls is None:
        raise InvalidArgument("--tls-server-name", "needs --tls-ca, --tls-certificate and --tls-key")
    return replace(config, tls=replace(config.tls, server_name=name))


def check_counts(config: ClusterConfig) -> None:
    """Raises InvalidArgument for numbers of processes that cannot serve."""
    if not config.decode and config.etcd is None:  # without prefill workers, decode workers compute prompts
        raise InvalidArgument("--decode", "0 needs --etcd of a cluster that has such workers")
    if config.pool is not None and not config.kvstores and config.etcd is None:
        raise InvalidArgument("--pool", "needs at least one KV store, and --kvstore is 0")
    if config.pool is None and config.pool_masters != 1:
        raise InvalidArgument("--pool-masters", "needs --pool mooncake")


def with_fitting_draft_model(config: ClusterConfig) -> ClusterConfig:
    """The shipped head fits the shipped model only, and `--drafter 0` alone means that nothing drafts."""
    if config.draft_model != DEFAULT_DRAFT_MODEL:
        return config
    drafts = config.drafters != 0 or config.drafts_from == LOCAL
    fits = os.path.realpath(config.model) == str(DEFAULT_MODEL) and drafts  # also of links without an end
    return config if fits else replace(config, draft_model=None)


async def run_cluster(config: ClusterConfig) -> int:
    """Run until SIGINT or SIGTERM; a second one kills at once. Returns the exit code."""
    cluster = ClusterSupervisor(config, say=say)
    running = asyncio.create_task(_run(cluster))

    def on_signal() -> None:
        if running.cancelling():
            say("killing everything")
            cluster.kill_now()
        else:
            say("stopping; once more to kill at once")
            running.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    try:
        await running
    except asyncio.CancelledError:
        say("stopped")
    return 0


async def _run(cluster: ClusterSupervisor) -> None:
    async with cluster:
        record = cluster.record()
        memory_mb = cluster.rss_bytes() / 1e6
        say(f"ready in {cluster.ready_s:.1f} s, {memory_mb:.0f} MB; logs in {record.run_dir}/logs")
        if console := record.console_url():
            say(f"console {console}")
        say(f"gRPC {record.router_grpc}, HTTP {record.http_url}; Ctrl-C stops")
        await asyncio.Event().wait()
