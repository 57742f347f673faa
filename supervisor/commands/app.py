"""Commands that run and inspect the local cluster: the server's part of the `slipstream` command.

Each is an entry point of the group `slipstream.commands`. What it does is imported when it runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from libs.common.worker_bounds import MAX_BATCH
from slipstream.cli.access import OperatorAccess, takes_access, with_flags
from slipstream.cli.options import (
    DRAIN_S,
    UNDRAIN_S,
    AsJson,
    DrainTimeoutS,
    Instance,
    RestartTimeoutS,
    Rolling,
    RunDir,
    StatusInstance,
    UndrainTimeoutS,
    check_endpoints,
    check_one_process,
    check_which,
)
from slipstream.cli.run_async import run_async
from slipstream.errors import InvalidArgument
from supervisor.configuration.cluster_options import ClusterOptions, flags_of, path_value


def _up(
    context: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option(
            parser=path_value,
            help="TOML file of the cluster or directory of them (docs/configuration.md); flags go before it.",
        ),
    ] = None,
    *,
    options: Mapping[str, Any],
) -> None:
    """Run a local cluster until Ctrl-C or `slipstream down`.

    Services get these settings and those of --config only: SLIPSTREAM_ variables of the shell do not reach
    them.
    """
    from supervisor.commands.up import checked_config, run_cluster

    given = frozenset(name for name in context.params if _is_flag(context.get_parameter_source(name)))
    raise SystemExit(run_async(run_cluster(checked_config(options, config, given))))


up = with_flags(_up, "options", flags_of(ClusterOptions), dict)


def _is_flag(source: Any) -> bool:
    """Whether a parameter was given on the command line. Typer does not export the class of sources."""
    return getattr(source, "name", "") == "COMMANDLINE"


def down(
    run_dir: RunDir = Path(".run"),
    timeout_s: DrainTimeoutS = 240.0,
) -> None:
    """Stop the cluster that runs in the run directory."""
    from supervisor.commands.down import stop_cluster

    stop_cluster(run_dir, timeout_s=timeout_s)


@takes_access
def status(
    instance: StatusInstance = None,
    endpoint: Annotated[
        list[str] | None,
        typer.Option(
            help="host:port of any process (a router's admin port), instead of a cluster; repeatable."
        ),
    ] = None,
    as_json: AsJson = False,
    *,
    access: OperatorAccess,
) -> None:
    """Show every process, its load, and where each session's KV lives.

    With --router, the processes that a router of any cluster sees.
    """
    if instance is not None:
        from supervisor.commands.status import show_named

        check_one_process(endpoint)
        run_async(show_named(access, instance, as_json=as_json))
    elif endpoint:
        from slipstream.cli.status import show_endpoints

        check_endpoints(endpoint)
        run_async(show_endpoints(endpoint, as_json=as_json, dial=access.dial()))
    elif access.routers:
        from slipstream.cli.status import show_fleet

        run_async(show_fleet(access.fleet_client(), as_json=as_json))
    else:
        from supervisor.commands.status import show_status

        run_async(show_status(access.run_dir, as_json=as_json, dial=access.dial()))


def kill(instance: Instance, run_dir: RunDir = Path(".run")) -> None:
    """Kill one process (SIGKILL); the supervisor starts it again."""
    from supervisor.commands.down import kill_process

    kill_process(run_dir, instance)


@takes_access
def drain(instance: Instance, timeout_s: DrainTimeoutS = DRAIN_S, *, access: OperatorAccess) -> None:
    """Move the work of one process elsewhere and end the process.

    It stays ended until `slipstream undrain` or `slipstream restart`. With --router, of any cluster: the
    process runs on and takes no work.
    """
    if access.routers:
        from slipstream.cli.fleet import drains

        run_async(drains.drain(access.fleet_client(), instance, timeout_s=timeout_s))
        return
    from supervisor.commands.drain import drain_process

    drain_process(access.run_dir, instance, timeout_s=timeout_s)


@takes_access
def undrain(instance: Instance, timeout_s: UndrainTimeoutS = UNDRAIN_S, *, access: OperatorAccess) -> None:
    """Let a drained process take work again.

    It starts one that has ended, and calls Undrain of one that still runs.
    """
    if access.routers:
        from slipstream.cli.fleet import drains

        run_async(drains.undrain(access.fleet_client(), instance, timeout_s=timeout_s))
        return
    from supervisor.commands.drain import undrain_process

    undrain_process(access.run_dir, instance, timeout_s=timeout_s, dial=access.dial())


@takes_access
def restart(
    instance: Annotated[
        str | None, typer.Argument(help="Name of a process, such as decode-0; or --rolling.")
    ] = None,
    rolling: Rolling = False,
    timeout_s: RestartTimeoutS = 180.0,
    *,
    access: OperatorAccess,
) -> None:
    """Drain one process, or all in turn, and start it again.

    A drained process starts again by its name, and not by --rolling. With --router, of any cluster: the
    process ends, and its process manager starts it again.
    """
    check_which(instance, rolling=rolling)
    if access.routers:
        from slipstream.cli.fleet import drains

        run_async(drains.restart(access.fleet_client(), instance, timeout_s=timeout_s))
        return
    from supervisor.commands.drain import restart_all, restart_process

    if instance is not None:
        restart_process(access.run_dir, instance, timeout_s=timeout_s)
    else:
        restart_all(access.run_dir, timeout_s=timeout_s, dial=access.dial())


def route(
    fleet: Annotated[
        Path, typer.Option(help="JSON: prefill, decode and stores, as docs/examples/fleet.json.")
    ],
    request: Annotated[
        Path, typer.Option(help="JSON: the prompt's length and holders, as docs/examples/request.json.")
    ],
    as_json: AsJson = False,
) -> None:
    """Explain where a request would run in a fleet.

    Prints the candidates, their predicted milliseconds and the choice. Needs no cluster.
    """
    from supervisor.commands.route import show_route

    show_route(fleet, request, as_json=as_json)


_MOST_TOKENS = 10**9  # of the mean request of a plan; more have no room on any cards
_DecodeSteps = Annotated[
    str, typer.Option(help="As of decode workers: plain, or graphs and ahead, which take memory.")
]
_MaxBatch = Annotated[
    int,
    typer.Option(
        min=1, max=MAX_BATCH, help="Sequences in one of those steps; a local head has contexts for two."
    ),
]
_DraftModel = Annotated[
    Path | None, typer.Option(help="A draft head's config.json, or its directory: its memory counts.")
]
_Drafter = Annotated[
    str, typer.Option(help="As of decode workers: service, or local on the first card of the last stage.")
]
_KvGib = Annotated[
    float | None, typer.Option(min=0, max=1e6, help="Also print how many tokens so much KV memory holds.")
]


def plan(
    model: Annotated[Path, typer.Option(help="A config.json, or the directory of a checkpoint.")],
    gpus: Annotated[str, typer.Option(help="The cards, such as 8xh100-80, 8xh200 or 2xa100.")],
    traffic: Annotated[
        Path | None,
        typer.Option(help="A trace (JSON lines: timestamp, input_length, output_length, hash_ids)."),
    ] = None,
    prompt_tokens: Annotated[
        int, typer.Option(min=1, max=_MOST_TOKENS, help="Mean prompt, without --traffic.")
    ] = 8192,
    cached_tokens: Annotated[int, typer.Option(min=0, help="Of them cached, without --traffic.")] = 0,
    output_tokens: Annotated[
        int, typer.Option(min=1, max=_MOST_TOKENS, help="Mean answer, without --traffic.")
    ] = 1024,
    max_token_ms: Annotated[
        float,
        typer.Option(min=0.1, max=1e9, help="What a token may take, prefills of other requests included."),
    ] = 50.0,
    overhead_gib: Annotated[
        float, typer.Option(min=0, max=1e6, help="Of each card: context, communication, activations.")
    ] = 2.5,
    decode_steps: _DecodeSteps = "plain",
    max_batch: _MaxBatch = 64,
    draft_model: _DraftModel = None,
    drafter: _Drafter = "service",
    kv_gib: _KvGib = None,
    as_json: AsJson = False,
) -> None:
    """Choose how to cut a model over the cards of its nodes, by arithmetic from its config.json alone.

    Prints memory, KV tokens, step and prefill times of each cut, and why one is chosen.
    """
    from libs.planner.traffic import Traffic, read_trace
    from supervisor.commands.plan import show_plan

    if decode_steps not in ("plain", "graphs", "ahead"):
        raise InvalidArgument("--decode-steps", f"must be plain, graphs or ahead, not {decode_steps!r}")
    if drafter not in ("local", "service"):
        raise InvalidArgument("--drafter", f"must be local or service, not {drafter!r}")
    if drafter == "local" and draft_model is None:
        raise InvalidArgument("--drafter", "local needs --draft-model, whose memory counts")
    if cached_tokens >= prompt_tokens:
        raise InvalidArgument("--cached-tokens", "must be fewer than --prompt-tokens")
    stated = Traffic(prompt_tokens, cached_tokens, output_tokens)
    show_plan(
        model,
        gpus,
        traffic=stated if traffic is None else read_trace(traffic),
        max_token_s=max_token_ms / 1e3,
        overhead_bytes=int(overhead_gib * 2**30),
        decode_steps=decode_steps,
        max_batch=max_batch,
        draft_model=draft_model,
        drafter=drafter,
        kv_bytes=None if kv_gib is None else int(kv_gib * 2**30),
        as_json=as_json,
    )
