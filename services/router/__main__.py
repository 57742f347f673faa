"""python -m services.router: one router, or several processes on its ports."""

from __future__ import annotations

from libs.common.runtime.signals import end_at_stop_signals
from slipstream.credentials.bounded_file import read_bounded_text

if __name__ == "__main__":
    end_at_stop_signals()  # The imports take a second, and several on a busy machine.

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from libs.common.block_hash import SALT_LABEL
from libs.common.cluster.discovery import Discovery, EtcdDiscovery, InMemoryDiscovery
from libs.common.cluster.exit_reports import EtcdExitReports, ExitReports, NoExitReports
from libs.common.cluster.placements import EtcdPlacements, InMemoryPlacements, Placements
from libs.common.cluster.worker_record import Role
from libs.common.etcd.access import EtcdAccess
from libs.common.runtime import heap
from libs.common.runtime.extras import missing_package
from libs.common.runtime.grpc_loop import GrpcLoop
from libs.common.runtime.loading import load_settings
from libs.common.runtime.malloc import keep_freed_memory, use_large_pages
from libs.common.runtime.open_files import raise_file_limit
from libs.common.runtime.parent_death import end_with_parent
from libs.common.runtime.settings import parse_endpoints
from libs.common.telemetry.logs import configure_logging, log_loop_errors
from libs.common.telemetry.otlp import export_metrics
from libs.common.telemetry.tracing import configure_tracing
from libs.database.database import open_database
from services.router.jobs.webhooks.policy import parse_webhook_hosts
from services.router.settings import RouterSettings, parse_names, parse_origins, parse_region_ms
from slipstream.errors import InvalidArgument, SlipstreamError
from slipstream.logs.lines import LineFormat

try:
    from services.router.api.access_log import AccessLog, open_access_log
    from services.router.api.api_keys import ApiKeys, follow_keys
    from services.router.autoscale.settings import policy_of
    from services.router.metering.key_limits import check_limits
    from services.router.multiprocess import run_processes
    from services.router.options import RouterOptions
    from services.router.request.model_card import ModelCard, load_model_card
    from services.router.request.prompt_salts import PromptSalts, system_prompt_ids
    from services.router.server import RouterServer
except ModuleNotFoundError as missing:  # of aiohttp and the like, which only the router's extra installs
    raise SystemExit(f"router: {missing_package(missing, Role.ROUTER)}") from None

log = logging.getLogger(__name__)

# Messages of long prompts are made, copied and freed all the time.
_KEPT_HEAP_BYTES = 64 << 20


PROGRAM = "python -m services.router"
DESCRIPTION = "Serves the gRPC and HTTP APIs, and places each request on workers."


def parse_options(arguments: list[str] | None = None) -> RouterSettings:
    """The settings of this process."""
    return load_settings(
        RouterSettings,
        section=Role.ROUTER,
        program=PROGRAM,
        description=DESCRIPTION,
        arguments=arguments,
    )


@contextlib.contextmanager
def _naming(flag: str) -> Iterator[None]:
    """A file that cannot be read is InvalidArgument of its flag."""
    try:
        yield
    except OSError as error:
        raise InvalidArgument(flag, f"{error.filename}: {error.strerror}") from None


def _shared_prefix(path: Path) -> str:
    """The text of the file. Raises InvalidArgument."""
    try:
        text = read_bounded_text(path).strip("\n")
    except ValueError as error:
        raise InvalidArgument("--shared-prefix", str(error)) from None
    if not text.strip():
        raise InvalidArgument("--shared-prefix", f"{path} is empty")
    return text


def _access_log(options: RouterSettings) -> AccessLog:
    if options.access_log == "off":
        return AccessLog()
    return open_access_log(LineFormat(Role.ROUTER, options.instance, options.log_format == "json"))


def _salts(options: RouterSettings, card: ModelCard) -> PromptSalts:
    """The salts of this cluster. Without a secret they are no secret either: docs/block-hash.md."""
    secret = options.cluster_secret()
    key = secret.derive(SALT_LABEL) if secret is not None else b""
    if options.shared_prefix is None:
        return PromptSalts(key)
    return PromptSalts(key, system_prompt_ids(card.tokenizer, _shared_prefix(options.shared_prefix)))


def _router_options(options: RouterSettings, card: ModelCard, keys: ApiKeys) -> RouterOptions:
    """The options of a router by its settings; opens the database."""
    return RouterOptions(
        instance=options.instance,
        region_ms=parse_region_ms(options.region_ms),
        listen=options.listen,
        advertise=options.advertise,
        http=options.http,
        admin=options.admin,
        admin_advertise=options.admin_advertise,
        admin_http=options.admin_http,
        admin_http_advertise=options.admin_http_advertise,
        tls=options.tls(),
        http_tls=options.http_tls,
        allowed_hosts=parse_names(options.allowed_hosts),
        cors_origins=parse_origins(options.cors_origins),
        access_log=_access_log(options),
        client_tls=options.client_tls(),
        secret=options.cluster_secret(),
        server_names=parse_endpoints(options.server_names),
        keys=keys,
        salts=_salts(options, card),
        max_requests=options.max_requests,
        allow_requested_prefill=options.allow_requested_prefill,
        share_ports=bool(options.child_of),
        autoscale=policy_of(options.autoscale_limits, options.autoscale_aims),
        scaler_is_public=options.scaler_is_public,
        database=None if options.database is None else open_database(options.database),
        jobs_beside_live=options.jobs_beside_live,
        jobs_longest_wait_s=options.jobs_longest_wait_s,
        webhook_hosts=parse_webhook_hosts(options.webhook_hosts),
        response_ttl_s=options.response_ttl_s,
        prices=options.prices,
    )


async def serve(options: RouterSettings) -> None:
    """Serve until SIGTERM or SIGINT."""
    log_loop_errors()
    with _naming("--model"):
        card = await asyncio.to_thread(
            load_model_card, options.model, names=options.model_names(), thinks=options.thinks()
        )
    keys = ApiKeys()
    check = partial(check_limits, has_prices=bool(options.prices), has_database=bool(options.database))
    followed_keys = None if options.api_keys is None else follow_keys(options.api_keys, keys, check=check)
    router_options = _router_options(options, card, keys)
    async with contextlib.AsyncExitStack() as stack:
        if router_options.database is not None:
            stack.push_async_callback(router_options.database.close)
        if followed_keys is not None:
            stack.callback(asyncio.create_task(followed_keys.run(), name="api-keys").cancel)
        discovery: Discovery = InMemoryDiscovery()
        placements: Placements = InMemoryPlacements()
        exit_reports: ExitReports = NoExitReports()
        if options.etcd:
            client = EtcdAccess.of(options).open()
            stack.push_async_callback(client.close)
            etcd_placements = EtcdPlacements(client, session_ttl_s=options.session_ttl_s)
            await etcd_placements.start()
            stack.push_async_callback(etcd_placements.close)
            discovery, placements, exit_reports = (
                EtcdDiscovery(client),
                etcd_placements,
                EtcdExitReports(client),
            )
            stack.push_async_callback(discovery.close)  # revokes its lease, so before the client closes
        router = RouterServer(card, discovery, placements, router_options, exit_reports=exit_reports)
        await router.start()
        await stack.enter_async_context(export_metrics(router.metrics, instance=options.instance))
        heap.freeze_heap()
        use_large_pages()
        stack.push_async_callback(router.stop, grace_s=options.drain_s)
        await router.host.wait_for_stop()
        log.info("%s stops", options.instance)


def main() -> int:
    """Parse the command line and serve."""
    options = parse_options()
    configure_logging(Role.ROUTER, options.instance, level=options.log_level, form=options.log_format)
    configure_tracing(Role.ROUTER, options.instance)
    if not options.child_of:
        options.warn_of_exposed_secrets()
    try:
        keep_freed_memory(_KEPT_HEAP_BYTES)
        raise_file_limit()
        if options.child_of:
            end_with_parent(options.child_of, by=signal.SIGTERM)
        if options.processes > 1:
            return asyncio.run(run_processes(sys.argv[1:], options))
        with asyncio.Runner(loop_factory=GrpcLoop) as runner:
            runner.run(serve(options))
    except SlipstreamError as error:
        log.error("%s ends: %s", options.instance, options.named(error))
        return 1
    except (OSError, ValueError) as error:
        log.error("%s ends: %s", options.instance, error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
