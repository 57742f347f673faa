"""The flags of `slipstream up` about the cluster: one field each, with its help and limits.

This is imported for every command, so it imports no service and no library that is slow to load.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from libs.common.runtime.settings import checked_value, rows
from libs.common.worker_bounds import KILL_AFTER_S, MAX_PROCESS_WAIT_S
from slipstream.cli.options import seconds_option
from slipstream.errors import InvalidArgument
from supervisor.forking.starts import FORK
from supervisor.logs import LOG_FILES, MAX_LOG_BYTES

if TYPE_CHECKING:
    from slipstream.rpc.tls import TlsFiles

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_MODEL = ROOT / "models" / "slipstream-mini"
DEFAULT_DRAFT_MODEL = ROOT / "models" / "slipstream-mini-eagle3"
ANY_PORT = "any"
_FLAG, _FLAGS = "flag", "flags"


def option(
    help: str,
    *names: str,
    default: Any = None,
    unstated: Any = ...,
    least: float | None = None,
    is_shown: bool = True,
) -> Any:
    """A field that a flag states.

    names     of the flag, where they do not follow from the field's
    unstated  the flag's default, where it is not the field's
    is_shown  whether the help has the default
    """
    declared = typer.Option(*names, help=help, min=least, show_default=is_shown)
    return field(default=default, metadata={_FLAG: (declared, default if unstated is ... else unstated)})


def _seconds(help: str, *, default_s: float, least_s: float = 0.0) -> Any:
    """A field whose flag takes a time."""
    declared = seconds_option(help, least_s=least_s, most_s=MAX_PROCESS_WAIT_S)
    return field(default=default_s, metadata={_FLAG: (declared, default_s)})


def _options(kind: type[Any], *, default_factory: Callable[[], Any]) -> Any:
    """A field whose value is made of the flags of a class."""
    return field(default_factory=default_factory, metadata={_FLAGS: kind})


def text_value(text: str) -> str:
    """The value of a flag. Raises BadParameter for one that looks like the next flag, as where it is missing.

    A service would take it as a flag, too.
    """
    if text.startswith("-"):
        raise typer.BadParameter(f"needs a value, and {text!r} begins with - as a flag does")
    return text


def path_value(text: str | Path) -> Path:
    """The path of a flag, or its default: ./-x is one, and -x is refused as `text_value` does."""
    return Path(text_value(str(text)))


def flags_of(kind: type[Any]) -> dict[str, tuple[Any, Any]]:
    """Annotation and default of each flag of a class by its field, in the order of the help."""
    hints = typing.get_type_hints(kind, localns={"TlsFiles": object})  # which is slow to import
    found: dict[str, tuple[Any, Any]] = {}
    for each in fields(kind):
        if _FLAGS in each.metadata:
            found |= flags_of(each.metadata[_FLAGS])
        elif _FLAG in each.metadata:
            declared, default = each.metadata[_FLAG]
            types = {hints[each.name], *typing.get_args(hints[each.name])}
            declared.parser = path_value if Path in types else text_value if str in types else None
            found[each.name] = (Annotated[hints[each.name], declared], default)
    return found


@dataclass(frozen=True, slots=True)
class WorkerSizes:
    """The settings of EngineSettings with these names; None: the worker's default (docs/planner.md)."""

    device: str | None = option(
        "Where prefill and decode workers run, with local draft heads: cpu, cuda or cuda:N (docs/gpu.md); "
        "default: cpu. The ten below are of these workers, too (docs/planner.md)."
    )
    memory_bytes: int | None = option(
        "What each worker may take of the host, or of its device; default: equal parts of three "
        "quarters of the host, or what is free on the device.",
        least=1,
    )
    kv_memory_bytes: int | None = option(
        "Size of the KV cache; default: what --memory-bytes leaves.", least=1
    )
    weight_dtype: str | None = option(
        "Weights in memory: auto, float32 or bfloat16; default: the checkpoint's."
    )
    kv_dtype: str | None = option("KV cache: auto, float32 or bfloat16; default: the weights'.")
    compute_dtype: str | None = option(
        "Activations in products: auto, avx512_bf16 or float32; default: bf16 where the CPU has it."
    )
    threads: int | None = option("CPU threads; default: half of the cores.", least=1)
    max_batch: int | None = option("Sequences in one step; default: 64.", least=1)
    step_tokens: int | None = option("Rows of one step, prefill chunks included; default: 512.", least=1)
    max_context_tokens: int | None = option(
        "Longest prompt and answer; default: what the KV cache holds.", least=2
    )
    packed_dir: str | None = option(
        "Where workers share packed weights; off = nowhere; default: packed in --run-dir."
    )

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> WorkerSizes:
        """The sizes that flags state. Raises InvalidArgument for a value no worker takes."""
        from libs.worker.process.settings import EngineSettings

        settings = rows(EngineSettings)
        found = {each.name: values[each.name] for each in fields(cls)}
        for name, value in found.items():
            if value is not None:
                try:
                    checked_value(settings[name], settings[name].flag, value)
                except ValueError as error:
                    flag, _, reason = str(error).partition(": ")
                    raise InvalidArgument(flag, reason) from None
        return cls(**found)

    def arguments(self) -> list[str]:
        """The flags of a worker."""
        found: list[str] = []
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None:
                found += [f"--{each.name.replace('_', '-')}", str(value)]
        return found


@dataclass(frozen=True, slots=True)
class _TlsOptions:
    """The files of mutual TLS. No variable states them: those of a shell are for its clients."""

    tls_ca: Path | None = option("PEM of the CA; with the two below: mTLS of all services.")
    tls_certificate: Path | None = option("PEM of the services' certificate.")
    tls_key: Path | None = option("PEM of its key.")
    tls_server_name: str = option(
        "Name in that certificate, by which services dial each other; default: the host dialled. HTTPS "
        "clients that dial it need --allowed-hosts.",
        default="",
    )


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """The cluster as its flags state it. Addresses are "host:port"; None: any free loopback port."""

    run_dir: Path = option("Directory of the cluster's state, logs and data.", default=Path(".run"))
    model: Path = option(
        "Checkpoint directory; default: the shipped one.", default=DEFAULT_MODEL, is_shown=False
    )
    draft_model: Path | None = option(
        "EAGLE-3 head; default: the shipped one with the shipped model.",
        default=DEFAULT_DRAFT_MODEL,
        is_shown=False,
    )
    routers: int = option(
        "Number of routers; --http and --grpc are of the first.", "--router", default=1, least=1
    )
    prefill: int = option("Number of prefill workers.", default=2, least=0)
    decode: int = option("Number of decode workers.", default=2, least=0)
    kvstores: int = option("Number of KV stores.", "--kvstore", default=1, least=0)
    drafters: int | None = option(
        "Number of drafters; default: 1 where they draft, else 0. A stated 0: no drafts with auto.",
        "--drafter",
        least=0,
    )
    drafts: str = option("on, off, or auto: use drafts where they are measured to save time.", default="auto")
    drafts_from: str = option(
        "remote: drafters run the draft head; local: each decode worker runs it; auto: local, unless "
        "--drafter asks for drafters, or decode workers have devices or several ranks.",
        default="auto",
    )
    prefill_parallel: str | None = option("Ranks of each prefill worker: tp=2,pp=2 (docs/parallelism.md).")
    decode_parallel: str | None = option("The same of each decode worker: tp=2,kv=2.")
    sizes: WorkerSizes = _options(WorkerSizes, default_factory=WorkerSizes)
    etcd: str | None = option("host:port[,host:port] of an etcd that runs already; default: `up` starts one.")
    etcd_ca: Path | None = option("PEM of the CA of that etcd: TLS to it.")
    etcd_certificate: Path | None = option("PEM of a certificate, where it asks for one.")
    etcd_key: Path | None = option("PEM of its key.")
    etcd_user: str = option("User of that etcd.", default="")
    etcd_password_file: Path | None = option("File with the password of that user.")
    http: str | None = option(
        f"host:port of the HTTP API, or '{ANY_PORT}' for a free port.", unstated="127.0.0.1:8000"
    )
    grpc: str | None = option(
        f"host:port of the gRPC API, or '{ANY_PORT}' for a free port.", unstated="127.0.0.1:7000"
    )
    served_model_name: str | None = option("Name that clients use; default: the model directory's.")
    api_keys: Path | None = option("File of API keys (`slipstream keys`); default: no keys.")
    shared_prefix: Path | None = option("File with a system prompt whose KV all tenants share.")
    prices: Path | None = option("File of prices (docs/metering.md); default: no costs.")
    allowed_hosts: str | None = option(
        "NAME[,NAME..] that HTTP's Host header may have beside addresses and localhost."
    )
    cors_origins: str | None = option("ORIGIN[,ORIGIN..] of web pages that may call over HTTP; * = any.")
    access_log: str | None = option("Whether each call has a line in the log: on or off.")
    allow_requested_prefill: bool = option(
        "A request may name its prefill worker: x-slipstream-prefill.",
        "--allow-requested-prefill",
        default=False,
    )
    tls: TlsFiles | None = _options(_TlsOptions, default_factory=lambda: None)
    tls_client_ca: Path | None = option("PEM of the CA of clients, for the routers' public gRPC port only.")
    disk_bytes: int | None = option(
        "Bytes on disk of each KV store; 0 = memory only; default: 1 GiB.", least=0
    )
    transport: str = option("KV transport: auto, mooncake, socket, rdma[:DEVICE,..].", default="auto")
    pool: str | None = option("mooncake: the KV stores share memory through Mooncake Store.")
    pool_masters: int = option("Masters of --pool; one leads, the others stand by.", default=1, least=1)
    start: str = option(
        "How services begin: fork of a process that has imported them, or spawn of a new one.", default=FORK
    )
    log_level: str = option("debug, info, warning or error.", default="info")
    log_format: str = option("Form of log lines: text or json.", default="text")
    ready_timeout_s: float = _seconds("Seconds until the start fails.", default_s=90.0, least_s=0.1)
    log_max_bytes: int = option("Size at which a log file is rotated.", default=MAX_LOG_BYTES, least=4096)
    log_files: int = option("Files kept of each log, the current one included.", default=LOG_FILES, least=1)
    drain_s: float = _seconds("Seconds that a router which stops has for running requests.", default_s=120.0)
    grace_s: float = _seconds("Seconds from the end of a process's drain to SIGKILL.", default_s=KILL_AFTER_S)
