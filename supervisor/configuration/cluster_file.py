"""The configuration file of a cluster as `slipstream up` reads it: its own section, and what services take.

Services read the file themselves. The supervisor needs some of their settings too, such as certificates. The
file may be that of another place, such as the manifests'. docs/configuration.md says what `up` sets by itself
whatever the file says, and `_unused` which paths of the file no setting takes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libs.common.cluster.worker_record import Role
from libs.common.runtime.config_file import (
    COMMON,
    UP,
    PathUnusable,
    Sections,
    check_names,
    file_values,
    read_sections,
)
from libs.common.runtime.settings import check_peers, rows, setting
from libs.common.worker_bounds import KILL_AFTER_S, MAX_PROCESS_WAIT_S
from libs.worker.process.settings import EngineSettings, WorkerSettings
from services.decode.settings import DecodeSettings
from services.kvstore.settings import NodeSettings
from services.router.settings import RouterSettings
from slipstream.errors import InvalidArgument
from slipstream.rpc.tls import TlsFiles
from supervisor.configuration.plan import DRAFTERS, ETCD_ACCESS
from supervisor.logs import LOG_FILES, MAX_LOG_BYTES

# The settings of each service.
SETTINGS: Mapping[Role, type[Any]] = {
    Role.ROUTER: RouterSettings,
    Role.PREFILL: EngineSettings,
    Role.DECODE: DecodeSettings,
    Role.KVSTORE: NodeSettings,
    Role.DRAFTER: WorkerSettings,
}
# Two processes of one machine cannot share these.
_OF_ONE_PROCESS = (
    "advertise",
    "admin_advertise",
    "admin_http_advertise",
    "kv_listen",
    "kv_advertise",
    "disk",
)
# Each process has these from `up`, whatever the file says.
_OF_UP = ("etcd", "cluster_secret_file", "run_dir", "data_dir")
_FLAG = "--config"


@dataclass(frozen=True)
class UpSettings:
    """The section [up]: what concerns the local cluster and no service."""

    router: int = setting("number of routers", default=1, least=1)
    prefill: int = setting("number of prefill workers", default=2)
    decode: int = setting("number of decode workers", default=2)
    kvstore: int = setting("number of KV stores", default=1)
    drafter: int | None = setting(
        "number of drafters", default=None, default_text="1 where drafters draft, else 0"
    )
    etcd: str | None = setting(
        "HOST:PORT[,HOST:PORT..] of an etcd that runs already, with etcd_* of [common]; none = an own one",
        default=None,
        check=check_peers,
    )
    drafts_from: str = setting("where the draft head runs", default="auto", choices=DRAFTERS)
    pool_masters: int = setting("masters of the pool; one leads, the others stand by", default=1, least=1)
    ready_timeout_s: float = setting(
        "seconds until the start fails", default=90.0, least=0.1, most=MAX_PROCESS_WAIT_S
    )
    grace_s: float = setting(
        "seconds from the end of a process's drain to SIGKILL", default=KILL_AFTER_S, most=MAX_PROCESS_WAIT_S
    )
    log_max_bytes: int = setting("size at which a log file is rotated", default=MAX_LOG_BYTES, least=4096)
    log_files: int = setting("files kept of each log, the current one included", default=LOG_FILES, least=1)


# The field of ClusterConfig for each key of [up] that has another name there.
_UP_FIELDS = {"router": "routers", "kvstore": "kvstores", "drafter": "drafters"}
# Settings of services that the supervisor needs as well, by the service whose value counts.
_NEEDED: Mapping[Role, tuple[str, ...]] = {
    Role.ROUTER: (
        *("model", "served_model_name", "api_keys", "shared_prefix", "allowed_hosts", "cors_origins"),
        *(
            "prices",
            "access_log",
            "allow_requested_prefill",
            "tls_client_ca",
            "log_level",
            "log_format",
            "drain_s",
        ),
        *("http", *ETCD_ACCESS),
    ),
    Role.DECODE: ("draft_model", "drafts", "transport", "block_tokens", "decode_steps"),
    Role.KVSTORE: ("disk_bytes", "pool"),
}


@dataclass(frozen=True, slots=True)
class ClusterFile:
    """A file whose sections are all right for this machine."""

    path: Path
    up: Mapping[str, Any]
    services: Mapping[Role, Mapping[str, Any]]  # the values of each service that the file sets
    unused: frozenset[str] = frozenset()  # settings of the file that no process of this cluster has

    @classmethod
    def read(cls, path: Path, flags: Collection[str] = ()) -> ClusterFile:
        """`flags`: settings that flags of `up` state; nothing is asked of the file's paths for them.

        Raises InvalidArgument for a section, a key or a value that cannot be used.
        """
        try:
            sections = read_sections(path)
            unused = _unused(sections, flags)
            up, services = sections_values(sections, checks_files=True, overridden={*flags, *unused, *_OF_UP})
        except PathUnusable as error:
            flag = f"--{error.name.replace('_', '-')}"
            raise InvalidArgument(_FLAG, f"{path}: {error}; {flag} names another") from None
        except ValueError as error:
            raise InvalidArgument(_FLAG, f"{path}: {without_path(path, str(error))}") from None
        file = cls(path.resolve(), up, services, unused)
        file._check_shareable()
        return file

    def config_values(self) -> dict[str, Any]:
        """The fields of ClusterConfig that the file sets."""
        found = {_UP_FIELDS.get(name, name): value for name, value in self.up.items()}
        for role, names in _NEEDED.items():
            values = self.services[role]
            found.update({name: values[name] for name in names if name in values.keys() - self.unused})
        router = self.services[Role.ROUTER]
        if "listen" in router:
            found["grpc"] = router["listen"]
        if tls := _tls_of(router):
            found["tls"] = tls
        found["plain_http"] = tuple(
            role for role, values in self.services.items() if values.get("http_tls") is False
        )
        sized = {role: self.services[role] for role in (Role.PREFILL, Role.DECODE, Role.DRAFTER)}
        for name in ("memory_bytes", "device", "parallel"):
            stated = {role: values[name] for role, values in sized.items() if name in values}
            found[f"file_{name}"] = stated
        found["file_drain_s"] = {
            r: values["drain_s"] for r, values in self.services.items() if "drain_s" in values
        }
        return found

    def tls_server_name(self) -> str:
        """The name in the certificates of services; "" = the host that is dialled."""
        name: str = self.services[Role.ROUTER].get("tls_server_name", "")
        return name

    def names(self) -> frozenset[str]:
        """The settings that the file has for some service."""
        return frozenset(name for values in self.services.values() for name in values)

    def other_etcd(self) -> str:
        """The etcd of services elsewhere, which `up` does not dial; "" where the file names none."""
        name: str = self.services[Role.ROUTER].get("etcd", "")
        return name if "etcd" not in self.up else ""

    def _check_shareable(self) -> None:
        for role, values in self.services.items():
            for name in _OF_ONE_PROCESS:
                if name in values:
                    why = f"[{role}] {name}: each process of this machine needs another one; leave it out"
                    raise InvalidArgument(_FLAG, f"{self.path}: {why}")


def sections_values(
    sections: Sections, *, checks_files: bool, overridden: Collection[str] = ()
) -> tuple[dict[str, Any], dict[Role, dict[str, Any]]]:
    """(values of [up], values of each service). Raises ValueError for the first wrong one.

    `overridden`: settings whose paths nothing uses.
    """
    known = [name for name, row in rows(UpSettings).items() if not row.described.is_hidden]
    check_names(UP, sections.get(UP, {}), known)

    def read(kind: type[Any], section: str, *taken: str) -> dict[str, Any]:
        found = file_values(kind, sections, section, checks_files=checks_files, overridden=overridden)
        return {name: value for name, (value, source) in found.items() if source in taken}

    services = {role: read(kind, role, COMMON, role) for role, kind in SETTINGS.items()}
    return read(UpSettings, UP, UP), services  # etcd of [common] is another setting


def _unused(sections: Sections, flags: Collection[str]) -> frozenset[str]:
    """Settings that no process takes: of an etcd that is not dialled, and the head of another model."""
    stated = {name for values in sections.values() for name in values}
    unused: set[str] = set()
    if "etcd" not in flags and "etcd" not in sections.get(UP, {}):
        unused.update(ETCD_ACCESS)
    if {"model", "draft_model"} <= stated and "model" in flags and "draft_model" not in flags:
        unused.add("draft_model")
    return frozenset(unused & stated)


def _tls_of(values: Mapping[str, Any]) -> TlsFiles | None:
    names = ("tls_ca", "tls_certificate", "tls_key")
    given: list[Path] = [values[name] for name in names if name in values]
    if not given:
        return None
    if len(given) < len(names):
        raise InvalidArgument(_FLAG, "tls_ca, tls_certificate and tls_key go together")
    ca, certificate, key = given
    return TlsFiles(ca, certificate, key, values.get("tls_server_name", ""))


def without_path(path: Path, text: str) -> str:
    """The text of an error without the path that it begins with."""
    return text.removeprefix(f"{path}: ").removeprefix(f"{path} ")
