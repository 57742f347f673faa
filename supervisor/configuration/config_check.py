"""The checks of a configuration before any process is started, each with the flag to blame."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
from collections.abc import Sequence
from pathlib import Path

from libs.common.cluster.worker_record import Role
from libs.common.etcd.access import EtcdAccess
from libs.common.runtime.settings import check_peers, checked_value, parse_endpoints, rows
from libs.common.transport.open import TransportChoice
from libs.common.worker_bounds import MAX_CONFIG_BYTES
from libs.engine.model_spec.config import load_config
from libs.engine.parallel.limits import CPU_KERNELS, group_refusals
from libs.engine.parallel.sizes import check_sizes, parse_sizes
from services.decode.settings import DecodeSettings
from services.router.metering.key_limits import check_limits
from services.router.metering.price_list import find_price, read_prices
from services.router.settings import RouterSettings, parse_model_names
from slipstream.credentials.api_key_file import read_key_file, read_keys
from slipstream.credentials.bounded_file import read_bounded, read_bounded_text
from slipstream.credentials.certificates import TlsFault, check_authority
from slipstream.credentials.secret_files import exposure
from slipstream.errors import InvalidArgument
from slipstream.logs.lines import LOG_FORMATS
from slipstream.rpc.hosts import host_of, is_loopback
from supervisor.configuration.plan import ACCESS_LOG, DRAFTERS, DRAFTS, ETCD, LOG_LEVELS, POOLS, ClusterConfig
from supervisor.forking.starts import STARTS
from supervisor.ports import require_free

# What Mooncake's engine and its master are linked to, by Debian's package.
_MOONCAKE_LIBRARIES = {
    "libibverbs1": "libibverbs.so.1",
    "libnuma1": "libnuma.so.1",
    "libcurl4": "libcurl.so.4",
}
_DECODE_STEPS = "--config, [decode] decode_steps"
# etcd preallocates its log in two files of 64 MB. Without that space it fails with a stack trace, at once or
# later. The rest is for logs and for the supervisor's records.
_ETCD_BYTES = 128_000_000
_NOTES_BYTES = 16_000_000


def check_config(config: ClusterConfig) -> None:
    """Nothing, or `InvalidArgument` that names the flag. Asks the machine: files, ports, libraries."""
    if config.routers < 1:
        raise InvalidArgument("--router", "a cluster needs at least one router")
    if config.etcd is not None:
        try:
            check_peers(config.etcd)
        except ValueError as error:
            raise InvalidArgument("--etcd", str(error)) from None
        if not parse_endpoints(config.etcd):
            raise InvalidArgument("--etcd", "names no HOST:PORT; without the flag, `up` starts an etcd")
    for flag, path in (("--model", config.model), ("--draft-model", config.draft_model)):
        if path is not None:
            _check_model(flag, path)
    _check_choice("--drafts", config.drafts, DRAFTS)
    _check_choice("--drafts-from", config.drafts_from, DRAFTERS)
    for role in (Role.PREFILL, Role.DECODE):
        _check_cut(role, config)
    _check_choice("--start", config.start, STARTS)
    _check_choice("--log-level", config.log_level, LOG_LEVELS)
    _check_choice("--log-format", config.log_format, LOG_FORMATS)
    if config.access_log is not None:
        _check_choice("--access-log", config.access_log, ACCESS_LOG)
    if config.pool is not None:
        _check_choice("--pool", config.pool, POOLS)
    for flag, address in (("--http", config.http), ("--grpc", config.grpc)):
        if address is not None:
            require_free(address, flag=flag)
    if config.http is not None and config.http == config.grpc:
        raise InvalidArgument("--grpc", f"is {config.http}, as --http: the two need different ports")
    _check_transport(config)
    _check_router_settings(config)
    _check_access(config)
    _check_open_ports(config)
    _check_space(config)


def why_no_mooncake() -> str | None:
    """The part that Mooncake lacks on this machine; None where it has all."""
    if importlib.util.find_spec("mooncake") is None:
        return "the package mooncake-transfer-engine is not installed"
    for package, library in _MOONCAKE_LIBRARIES.items():
        try:
            ctypes.CDLL(library)
        except OSError:
            return f"{library} does not load (Debian's package {package})"
    return None


def _check_model(flag: str, path: Path) -> None:
    try:
        config = json.loads(read_bounded(path / "config.json", max_bytes=MAX_CONFIG_BYTES))
    except OSError as error:
        missing = isinstance(error, (FileNotFoundError, NotADirectoryError))
        why = "is missing" if missing else f"cannot be read: {error.strerror}"
        raise InvalidArgument(flag, f"no model in {path}: config.json {why}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(flag, f"{path / 'config.json'} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise InvalidArgument(flag, f"{path / 'config.json'} holds no JSON object")


def _check_cut(role: Role, config: ClusterConfig) -> None:
    """Refuse what a worker would refuse as --parallel, on its device."""
    text, name = config.parallel(role), config.parallel_name(role)
    if text is None or not config.counts()[role]:
        return
    sizes = parse_sizes(text, name)
    refusals = group_refusals(
        sizes,
        device=config.device(role),
        kernels=CPU_KERNELS,
        block_tokens=config.block_tokens,
        decode_steps=config.decode_steps if role is Role.DECODE else DecodeSettings.decode_steps,
    )
    if refusals:
        is_of_steps = refusals[0].field == "decode_steps"
        raise InvalidArgument(_DECODE_STEPS if is_of_steps else name, refusals[0].reason)
    try:
        model = load_config(config.model)
    except InvalidArgument:
        return  # the workers name the model
    check_sizes(sizes, model, name)


def _check_space(config: ClusterConfig) -> None:
    """The kvstore looks after itself: its disk tier stays smaller where there is less room than asked for."""
    filesystem = os.statvfs(config.run_dir)
    free, needed, for_etcd = filesystem.f_bavail * filesystem.f_frsize, _NOTES_BYTES, ""
    if config.etcd is None:  # ours is made again at each start
        free += sum(path.lstat().st_blocks * 512 for path in (config.run_dir / ETCD).rglob("*"))
        needed, for_etcd = needed + _ETCD_BYTES, ", most of it for etcd's log"
    if free < needed:
        raise InvalidArgument(
            "--run-dir",
            f"{config.run_dir} has {free / 1e6:.0f} MB free, a cluster needs {needed / 1e6:.0f}{for_etcd}",
        )


def _check_transport(config: ClusterConfig) -> None:
    try:
        kind = TransportChoice.parse(config.transport).kind
    except ValueError as error:
        raise InvalidArgument("--transport", str(error).removeprefix("transport ")) from None
    wants = f"--transport {kind}" if kind in ("mooncake", "rdma") else ""
    if config.pool is not None:
        wants = f"--pool {config.pool}"
    if wants and (missing := why_no_mooncake()):
        raise InvalidArgument(wants, missing)


def _check_access(config: ClusterConfig) -> None:
    """Files of keys and certificates, and what they go together with."""
    _check_keys_and_prices(config)
    files = [("--etcd-ca", config.etcd_ca), ("--etcd-key", config.etcd_key)]
    files += [("--etcd-certificate", config.etcd_certificate), ("--tls-client-ca", config.tls_client_ca)]
    for flag, file in files:
        if file is not None and not os.access(file, os.R_OK):
            raise InvalidArgument(flag, f"{file} cannot be read")
    for flag, file in (
        ("--shared-prefix", config.shared_prefix),
        ("--etcd-password-file", config.etcd_password_file),
    ):
        if file is not None and not _read(file, flag).strip():
            raise InvalidArgument(flag, f"{file} is empty")
    if config.tls_client_ca is not None and config.tls is None:
        raise InvalidArgument("--tls-client-ca", "needs --tls-ca, --tls-certificate and --tls-key")
    try:
        if config.tls is not None:
            config.tls.check()
        if config.tls_client_ca is not None:
            check_authority(config.tls_client_ca, "client-ca")
    except TlsFault as fault:
        raise fault.as_argument("--tls-{}".format) from None
    if config.etcd is None and (config.etcd_ca is not None or config.etcd_user):
        raise InvalidArgument("--etcd-ca, --etcd-user", "need --etcd: the cluster's own etcd is plain")
    access = EtcdAccess.of(config)
    if config.pool is not None and not access.is_plain:
        raise InvalidArgument("--pool", "Mooncake reaches no etcd with TLS or a user")


def _check_keys_and_prices(config: ClusterConfig) -> None:
    """Refuse what a router would refuse. `up` gives each router a database."""
    keys, prices = config.api_keys, config.prices
    try:
        found = None if keys is None else read_key_file(keys)
    except ValueError as error:
        raise InvalidArgument("--api-keys", str(error)) from None
    try:
        if found is not None:
            check_limits(found, has_prices=prices is not None, has_database=True)
    except ValueError as error:
        raise InvalidArgument("--api-keys", f"{keys}: {error}") from None
    try:
        if prices is not None:
            find_price(read_prices(prices), _model_names(config))
    except ValueError as error:
        raise InvalidArgument("--prices", str(error)) from None


def _model_names(config: ClusterConfig) -> list[str]:
    """The names of the served model, as routers have them."""
    if config.served_model_name:
        return parse_model_names(config.served_model_name)
    return [Path(os.path.realpath(config.model)).name]


def _check_router_settings(config: ClusterConfig) -> None:
    """Refuse values that every router would refuse."""
    known = rows(RouterSettings)
    for name in ("served_model_name", "allowed_hosts", "cors_origins"):
        value = getattr(config, name)
        try:
            if value is not None:
                checked_value(known[name], known[name].flag, value)
        except ValueError as error:
            flag, _, reason = str(error).partition(": ")
            raise InvalidArgument(flag, reason) from None


def _check_open_ports(config: ClusterConfig) -> None:
    """Refuse what a router would refuse: ports of clients that other machines may use without a key."""
    if config.api_keys is not None:
        return
    ports = [("--http", config.http, "--api-keys")]
    if config.tls is None:
        ports.append(("--grpc", config.grpc, "--api-keys, or --tls-ca and its certificates"))
    for flag, address, needed in ports:
        if address is not None and not is_loopback(host_of(address)):
            reason = f"{address} is not a loopback address, and anyone could call: it needs {needed}"
            raise InvalidArgument(flag, reason)


def exposed_secrets(config: ClusterConfig) -> list[str]:
    """What to say of files of secrets that others may read; the services log the same of each."""
    files = [("--api-keys", config.api_keys), ("--etcd-key", config.etcd_key)]
    files += [("--etcd-password-file", config.etcd_password_file)]
    files += [("--tls-key", config.tls.key if config.tls is not None else None)]
    return [f"{flag}: {text}" for flag, file in files if file is not None and (text := exposure(file))]


def idle_drafters(config: ClusterConfig) -> list[str]:
    """What to say of drafters that no decode worker asks, of a device that no drafter takes, and of drafts
    that no head makes.

    With another etcd, workers of other clusters may ask.
    """
    if config.drafts == "on" and config.draft_model is None and "engine" not in config.from_file:
        return ["--drafts on has no effect: no worker has a draft head (--draft-model names one)"]
    if not config.counts()[Role.DRAFTER]:
        device = config.file_device.get(Role.DRAFTER)
        if device in (None, config.device(Role.DECODE)):  # of all workers, or where the head runs anyway
            return []
        return [f"[drafter] device = {device} has no effect: no drafter runs here (--drafter 1 starts one)"]
    if config.drafts != "off" or config.etcd is not None:
        return []
    return ["--drafter: drafters have no work with --drafts off"]


def keyless(config: ClusterConfig) -> list[str]:
    """What to say of a file without API keys, by which every call of a client is refused."""
    if config.api_keys is None or read_keys(config.api_keys):
        return []
    file = config.api_keys
    return [
        f"--api-keys: {file} has no keys, and every call that needs one is refused until "
        f"`slipstream keys new --file {file}` has made one"
    ]


def _check_choice(flag: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise InvalidArgument(flag, f"must be one of {', '.join(allowed)}, not {value!r}")


def _read(path: Path, flag: str) -> str:
    """The text of a small file. Raises InvalidArgument."""
    try:
        return read_bounded_text(path)
    except ValueError as error:
        raise InvalidArgument(flag, str(error)) from None
