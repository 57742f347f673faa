"""Verbs and their flags. What a verb does is imported when it runs, so that `--help` is quick."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli import cluster_options as flags
from slipstream.cli.kv import kv_app
from slipstream.cli.tls import TlsCa, TlsCertificate, TlsKey, tls_from
from slipstream.errors import InvalidArgument, SlipstreamError

app = typer.Typer(
    name="slipstream",
    help="Run and inspect a local Slipstream cluster.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(kv_app, name="kv")

RunDir = Annotated[Path, typer.Option(help="Directory of the cluster's state, logs and data.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def run() -> None:
    """Run the verb of the command line; errors of ours end it with one line and exit code 1."""
    try:
        app()
    except SlipstreamError as error:
        print(f"slipstream: {error.message}", file=sys.stderr)
        raise SystemExit(1) from None


@app.command()
def up(
    run_dir: RunDir = Path(".run"),
    model: flags.Model = None,
    draft_model: flags.DraftModel = None,
    routers: flags.Routers = 1,
    prefill: flags.PrefillWorkers = 2,
    decode: flags.DecodeWorkers = 2,
    kvstores: flags.Kvstores = 1,
    drafters: flags.Drafters = 1,
    drafts: flags.Drafts = "auto",
    etcd: flags.Etcd = None,
    http: flags.Http = "127.0.0.1:8000",
    grpc: flags.Grpc = "127.0.0.1:7000",
    transport: flags.Transport = "auto",
    pool: flags.Pool = None,
    pool_masters: flags.PoolMasters = 1,
    log_level: flags.LogLevel = "info",
    ready_timeout_s: flags.ReadyTimeoutS = 90.0,
    grace_s: flags.GraceS = 10.0,
) -> None:
    """Start the cluster and keep it running until Ctrl-C or `slipstream down`."""
    from slipstream.cli.up import run_cluster
    from slipstream.supervisor.plan import DEFAULT_DRAFT_MODEL, DEFAULT_MODEL, ClusterConfig

    for tier, count in (("prefill", prefill), ("decode", decode)):
        if not count and etcd is None:
            raise InvalidArgument(
                f"--{tier}", "a cluster needs one; 0 is for workers that another --etcd knows"
            )
    # The shipped head fits the shipped model only.
    default_draft = DEFAULT_DRAFT_MODEL if model is None and drafters else None
    config = ClusterConfig(
        run_dir=run_dir,
        model=model or DEFAULT_MODEL,
        draft_model=draft_model or default_draft,
        routers=routers,
        prefill=prefill,
        decode=decode,
        kvstores=kvstores,
        drafters=drafters,
        drafts=drafts,
        etcd=etcd,
        http=None if http == flags.ANY_PORT else http,
        grpc=None if grpc == flags.ANY_PORT else grpc,
        transport=transport,
        pool=pool,
        pool_masters=pool_masters,
        log_level=log_level,
        ready_timeout_s=ready_timeout_s,
        grace_s=grace_s,
    )
    raise SystemExit(asyncio.run(run_cluster(config)))


@app.command()
def down(
    run_dir: RunDir = Path(".run"),
    timeout_s: Annotated[float, typer.Option(min=0, help="Give up when it has not ended by then.")] = 60.0,
) -> None:
    """Stop the cluster that runs in the run directory."""
    from slipstream.cli.down import stop_cluster

    stop_cluster(run_dir, timeout_s=timeout_s)


@app.command()
def status(
    run_dir: RunDir = Path(".run"),
    as_json: AsJson = False,
    tls_ca: TlsCa = None,
    tls_certificate: TlsCertificate = None,
    tls_key: TlsKey = None,
) -> None:
    """Show every process, its load, and where each session's KV lives."""
    from slipstream.cli.status import show_status

    tls = tls_from(tls_ca, tls_certificate, tls_key)
    asyncio.run(show_status(run_dir, as_json=as_json, tls=tls))


@app.command()
def chat(
    run_dir: RunDir = Path(".run"),
    endpoint: Annotated[
        str | None, typer.Option(help="host:port of a router; default: the local one.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    tools: Annotated[Path | None, typer.Option(help="JSON file: a list of tools, OpenAI-shaped.")] = None,
    thinking: Annotated[bool, typer.Option(help="Let the model reason first.")] = False,
    temperature: Annotated[float | None, typer.Option(help="0 = always the likeliest token.")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same answers.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 512,
    api_key: Annotated[str | None, typer.Option(envvar="SLIPSTREAM_API_KEY", help="Key of a tenant.")] = None,
    tls_ca: TlsCa = None,
    tls_certificate: TlsCertificate = None,
    tls_key: TlsKey = None,
) -> None:
    """Talk to the cluster."""
    from slipstream.cli.chat import ChatOptions, chat, read_tools
    from slipstream.requests import ChatArguments

    arguments: ChatArguments = {"max_tokens": max_tokens, "thinking": thinking}
    if temperature is not None:
        arguments["temperature"] = temperature
    if seed is not None:
        arguments["seed"] = seed
    declared = read_tools(tools) if tools is not None else []
    tls = tls_from(tls_ca, tls_certificate, tls_key)
    chat(ChatOptions(run_dir, endpoint, system, declared, arguments, api_key, tls))


@app.command()
def kill(
    instance: Annotated[str, typer.Argument(help="Name of a process, such as drafter-0.")],
    run_dir: RunDir = Path(".run"),
) -> None:
    """Kill one process (SIGKILL); the supervisor starts it again."""
    from slipstream.cli.down import kill_process

    kill_process(run_dir, instance)


@app.command()
def drain(
    instance: Annotated[str, typer.Argument(help="Name of a process, such as decode-0.")],
    run_dir: RunDir = Path(".run"),
    timeout_s: Annotated[float, typer.Option(min=0, help="Give up when it has not ended by then.")] = 30.0,
) -> None:
    """Take one process out of service: its work moves elsewhere, then it ends and stays away."""
    from slipstream.cli.drain import drain_process

    drain_process(run_dir, instance, timeout_s=timeout_s)


@app.command()
def restart(
    instance: Annotated[str | None, typer.Argument(help="Name of a process, such as decode-0.")] = None,
    run_dir: RunDir = Path(".run"),
    rolling: Annotated[bool, typer.Option(help="Every process of the cluster, one after the other.")] = False,
    timeout_s: Annotated[float, typer.Option(min=0, help="Give up when one is not back by then.")] = 90.0,
) -> None:
    """Drain one process, or all in turn, and start it again; brings drained ones back."""
    from slipstream.cli.drain import restart_processes

    restart_processes(run_dir, instance, rolling=rolling, timeout_s=timeout_s)


@app.command()
def route(
    fleet: Annotated[Path, typer.Option(help="JSON: prefill, decode and stores, as placement sees them.")],
    request: Annotated[Path, typer.Option(help="JSON: prompt_tokens and who holds what of the prompt.")],
    as_json: AsJson = False,
) -> None:
    """Show where a request would run in a fleet: candidates, predicted milliseconds, the choice."""
    from slipstream.cli.route import show_route

    show_route(fleet, request, as_json=as_json)
