"""`slipstream plan`: every cut of a model over the cards of its nodes, and the chosen one with its reason."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from libs.common.worker_bounds import DEFAULT_BATCH
from libs.planner.cards import GIB, parse_cards
from libs.planner.cuts import Cut
from libs.planner.decode_room import DecodeStepRoom, DraftHeadRoom, read_draft_head
from libs.planner.fit import IN_BF16, Fit
from libs.planner.plan import Candidate, Plan, make_plan
from libs.planner.shapes.read_shape import read_shape
from libs.planner.times import EFFICIENCY
from libs.planner.traffic import Traffic
from slipstream.errors import InvalidArgument

_MOST_ROWS = 20
LOCAL, SERVICE = "local", "service"  # of `--drafter`
_HEADINGS = (
    "",
    "cut",
    "runs",
    "layers",
    "weights GiB",
    "free GiB",
    "KV tokens",
    "at once",
    "step ms",
    "token ms",
    "prefill ms",
    "requests/s",
    "tokens/s",
)


def show_plan(
    model: Path,
    gpus: str,
    *,
    traffic: Traffic,
    max_token_s: float,
    overhead_bytes: int,
    decode_steps: str,
    max_batch: int,
    draft_model: Path | None,
    drafter: str,
    kv_bytes: int | None,
    as_json: bool,
) -> None:
    """Print the plan. Raises InvalidArgument for what cannot be read, and when no cut fits.

    Where no cut has room for a request, the printed cuts say why, and then it raises InvalidArgument, too.
    """
    n_cards, card = parse_cards(gpus)
    shape = read_shape(model)
    head = None
    if draft_model is not None:
        head = read_draft_head(draft_model, shape, is_local=drafter == LOCAL, max_batch=max_batch)
    plan = make_plan(
        shape,
        n_cards,
        card,
        traffic=traffic,
        overhead_bytes=overhead_bytes,
        decode_steps=None if decode_steps == "plain" else DecodeStepRoom(max_batch),
        draft_head=head,
        max_token_s=max_token_s,
    )
    if as_json:
        print(json.dumps(plan_document(plan, kv_bytes, decode_steps), indent=2))
    else:
        console = Console(width=200, highlight=False, soft_wrap=True)
        console.print(_heading(plan), markup=False)
        console.print(_table(plan))
        console.print(_conclusion(plan, kv_bytes, decode_steps), markup=False)
    if plan.chosen.capacity is None:
        raise _no_request_room(plan)


def _no_request_room(plan: Plan) -> InvalidArgument:
    best = max((candidate.fit for candidate in plan.candidates), key=lambda fit: fit.kv_tokens)
    n_tokens = plan.traffic.prompt_tokens + plan.traffic.output_tokens
    return InvalidArgument(
        "--gpus",
        f"{plan.reason}: it has {n_tokens:,.0f} tokens, and a worker of {best.cut.group_name}, the cut with "
        f"the most room, holds {best.kv_tokens:,}",
    )


def plan_document(plan: Plan, kv_bytes: int | None, decode_steps: str = "plain") -> dict[str, Any]:
    """The plan as JSON. Bytes, seconds and tokens are exact; `kv_gib_tokens` answers --kv-gib."""
    model = plan.model
    return {
        "model": model.name,
        "weights_bytes": model.weights_bytes,
        "held_weights_bytes": _held_bytes(plan),
        "kv_token_bytes": model.kv_token_bytes,
        "kv_window_bytes": model.kv_window_bytes,
        "max_context_tokens": model.max_context_tokens,
        "cards": plan.n_cards,
        "card": plan.card.name,
        "card_visible_bytes": plan.card.visible_bytes,
        "card_overhead_bytes": plan.overhead_bytes,
        "card_decode_steps_bytes": plan.decode_steps_bytes,
        "draft_head": _head_document(plan.draft_head),
        "node_free_bytes": _node_free_bytes(plan),
        "host_bytes": plan.chosen.fit.host_bytes,
        "efficiency": EFFICIENCY,
        "traffic": {
            "prompt_tokens": plan.traffic.prompt_tokens,
            "cached_tokens": plan.traffic.cached_tokens,
            "output_tokens": plan.traffic.output_tokens,
            "rate_per_s": plan.traffic.rate_per_s,
        },
        "cuts": [_cut_document(plan, candidate) for candidate in plan.candidates],
        "cuts_of_other_engines": [_cut_document(plan, Candidate(fit, None)) for fit in plan.references],
        "chosen": plan.chosen.fit.cut.name,
        "reason": plan.reason,
        "worker_arguments": plan.worker_arguments(),
        "decode_worker_arguments": decode_arguments(plan, decode_steps),
        "pod_resources": plan.pod_resources(),
        "worker_refusals": _refusals(plan, plan.chosen.fit.cut),
        "runnable": _runnable_document(plan),
        "kv_gib_tokens": None if kv_bytes is None else kv_bytes // model.kv_token_bytes,
    }


def decode_arguments(plan: Plan, decode_steps: str) -> dict[str, str]:
    """The flags that a decode worker takes besides, for steps and a head whose memory the plan counts."""
    flags: dict[str, str] = {}
    if plan.decode_steps is not None:
        flags |= {"decode-steps": decode_steps, "max-batch": str(plan.decode_steps.max_batch)}
    if plan.draft_head is not None:
        flags |= {"drafter": LOCAL if plan.draft_head.is_local else SERVICE}
        flags |= {"max-batch": str(plan.draft_head.max_batch)}
    return flags


def _head_document(head: DraftHeadRoom | None) -> dict[str, Any] | None:
    """`card_bytes`: of the card of rank 0 of each decode worker, in its last stage."""
    if head is None:
        return None
    return {
        "name": head.name,
        "drafter": LOCAL if head.is_local else SERVICE,
        "weights_bytes": head.memory.weight_bytes,
        "contexts": head.contexts,
        "contexts_bytes": head.contexts * head.memory.context_bytes,
        "proposals_bytes": head.memory.pass_bytes,
        "features_bytes": head.memory.feature_bytes,
        "card_bytes": head.card_bytes,
        "drafter_bytes": 0 if head.is_local else head.head_bytes,
    }


def _cut_document(plan: Plan, candidate: Candidate) -> dict[str, Any]:
    fit, capacity = candidate.fit, candidate.capacity
    document: dict[str, Any] = {
        "cut": fit.cut.name,
        "replicas": fit.cut.replicas,
        "refusals": _refusals(plan, fit.cut),
        "stage_layers": [len(stage.layers) for stage in fit.stages],
        "card_weights_bytes": fit.card_weights_bytes,
        "card_free_bytes": fit.card_free_bytes,
        "fits": fit.fits,
        "kv_tokens": fit.all_kv_tokens,
        "kv_bytes": fit.cut.replicas * fit.kv_bytes,
    }
    if capacity is not None:
        document |= {
            "sequences": capacity.n_sequences,
            "step_ms": capacity.step_s * 1e3,
            "token_ms": capacity.token_s * 1e3,
            "prefill_ms": capacity.prefill_s * 1e3,
            "requests_per_s": capacity.requests_per_s,
            "output_tokens_per_s": capacity.output_tokens_per_s,
            "prefill_share": capacity.prefill_share,
            "bound": capacity.bound,
        }
    return document


def _refusals(plan: Plan, cut: Cut) -> list[dict[str, str]]:
    """Why this version starts no worker of a cut; empty: it starts one."""
    return [{"flag": f"--{each.field}", "reason": each.reason} for each in plan.refusals(cut)]


def _runnable_document(plan: Plan) -> dict[str, Any] | None:
    """The best cut that this version runs; None: none that serves a request."""
    best = plan.runnable
    if best is None:
        return None
    return {
        "cut": best.fit.cut.name,
        "worker_arguments": plan.worker_arguments(best),
        "pod_resources": plan.pod_resources(best),
    }


def _node_free_bytes(plan: Plan) -> int:
    """What all cards have beside weights and draft head, stored once, the overhead and decode steps."""
    room = plan.card.visible_bytes - plan.overhead_bytes - plan.decode_steps_bytes
    return plan.n_cards * room - _held_bytes(plan) - plan.draft_head_bytes


def _held_bytes(plan: Plan) -> int:
    """The bytes of the weights in the memory of the cards, stored once."""
    return IN_BF16.weight_bytes(plan.model, plan.model.weights_bytes)


def _heading(plan: Plan) -> str:
    model, card, traffic = plan.model, plan.card, plan.traffic
    window = (
        f", {model.kv_window_bytes / GIB:.3f} GiB a sequence for windows" if model.kv_window_bytes else ""
    )
    widened = f" (in bf16 {_held_bytes(plan) / GIB:.2f} GiB)" * (_held_bytes(plan) != model.weights_bytes)
    return (
        f"{model.name}: {model.weights_bytes / 1e9:.2f} GB ({model.weights_bytes / GIB:.2f} GiB) of weights"
        f"{widened}, "
        f"{model.kv_token_bytes:,} bytes of KV a token{window}\n"
        f"{plan.n_cards} x {card.name}: {card.visible_bytes / GIB:.2f} GiB each, of it "
        f"{plan.overhead_bytes / GIB:.2f} for context, communication and activations{_steps(plan)}; "
        f"{_node_free_bytes(plan) / GIB:.1f} GiB of all are left beside one copy of the weights\n"
        f"{_head_line(plan)}"
        f"request: {traffic.prompt_tokens:,.0f} tokens ({traffic.cached_tokens:,.0f} cached), "
        f"{traffic.output_tokens:,.0f} tokens of answer; times at {EFFICIENCY:.2f} of the card's ceilings\n"
    )


def _steps(plan: Plan) -> str:
    """What decode steps take as graphs, where they are graphs."""
    if plan.decode_steps is None:
        return ""
    room, gib = plan.decode_steps, plan.decode_steps_bytes / GIB
    sizes = f"{room.max_batch} sequences with up to {room.max_draft_tokens} drafts"
    return f" and, by estimate, {gib:.2f} for decode steps as graphs ({sizes})"


def _head_line(plan: Plan) -> str:
    """What a draft head takes, and where; times and rates count no drafts."""
    head = plan.draft_head
    if head is None:
        return ""
    memory = head.memory
    features = f"{memory.feature_bytes / GIB:.2f} GiB to make its features"
    parts = (
        f"{head.head_bytes / GIB:.2f} GiB ({memory.weight_bytes / GIB:.2f} of weights, "
        f"{head.contexts * memory.context_bytes / GIB:.2f} of {head.contexts:,} contexts, "
        f"{memory.pass_bytes / GIB:.2f} of proposals)"
    )
    place = "on the first card of each decode worker's last stage"
    where = (
        f"{parts} and {features} {place}" if head.is_local else f"{features} {place}; a drafter takes {parts}"
    )
    return f"draft head {head.name}, by estimate: {where}; the rates count no drafts\n"


def _table(plan: Plan) -> Table:
    table = Table(box=None, pad_edge=False)
    for index, heading in enumerate(_HEADINGS):
        table.add_column(heading, justify="left" if index < 4 else "right", no_wrap=True)
    for index, candidate in enumerate(shown_cuts(plan)):
        fit, capacity = candidate.fit, candidate.capacity
        row = ["*" if index == 0 and capacity else "", *_memory_columns(plan, fit)]
        if capacity is not None:
            row += [
                str(capacity.n_sequences),
                f"{capacity.step_s * 1e3:.1f}",
                f"{capacity.token_s * 1e3:.1f}",
                f"{capacity.prefill_s * 1e3:.0f}",
                f"{capacity.requests_per_s:.2f}",
                f"{capacity.output_tokens_per_s:.0f}",
            ]
        table.add_row(*row)
    for fit in plan.references:
        table.add_row("", *_memory_columns(plan, fit), "not run by this engine")
    return table


def shown_cuts(plan: Plan) -> list[Candidate]:
    """The best rows of the table. Of cuts that differ in the parts of experts only, the best one."""
    best: dict[Cut, Candidate] = {}
    for candidate in plan.candidates:
        best.setdefault(replace(candidate.fit.cut, ep=1), candidate)
    return list(best.values())[:_MOST_ROWS]


def _memory_columns(plan: Plan, fit: Fit) -> list[str]:
    return [
        fit.cut.name,
        "no" if plan.refusals(fit.cut) else "yes",
        _layer_counts([len(stage.layers) for stage in fit.stages]),
        f"{fit.card_weights_bytes / GIB:.2f}",
        f"{fit.card_free_bytes / GIB:.2f}",
        f"{fit.all_kv_tokens:,}" if fit.fits else "does not fit",
    ]


def _layer_counts(counts: list[int]) -> str:
    return ",".join(map(str, counts)) if len(counts) <= 8 else f"{len(counts)} x {min(counts)}-{max(counts)}"


def _others(plan: Plan) -> str:
    """How many cuts the table leaves out."""
    shown = {id(candidate) for candidate in shown_cuts(plan)}
    others = [candidate.fit for candidate in plan.candidates if id(candidate) not in shown]
    if not others:
        return ""
    missing = sum(not fit.fits for fit in others)
    return f"\n{len(others)} other cuts: {missing} do not fit, none serves more (--json has them)\n"


def _conclusion(plan: Plan, kv_bytes: int | None, decode_steps: str) -> str:
    lines = [_others(plan), plan.reason]
    capacity = plan.chosen.capacity
    if capacity is not None and 0 < capacity.prefill_share < 1:
        ratio = capacity.prefill_share / (1 - capacity.prefill_share)
        lines.append(
            f"Prefill takes {capacity.prefill_share:.0%} of the time: "
            f"with separate tiers, {ratio:.2f} prefill groups for each decode group"
        )
        rate = plan.traffic.rate_per_s
        if rate:
            ratio = rate / capacity.requests_per_s
            lines.append(f"The trace's {rate:.2f} requests/s need {ratio:.1f} times these cards")
    if kv_bytes is not None:
        tokens = kv_bytes // plan.model.kv_token_bytes
        lines.append(f"{kv_bytes / GIB:g} GiB of KV hold {tokens:,} tokens, each stored once")
    replicas = plan.chosen.fit.cut.replicas
    workers = f"each of {replicas} such workers" if replicas > 1 else "such a worker"
    lines.append(f"Flags of {workers}: {_flags(plan.worker_arguments())}")
    if more := decode_arguments(plan, decode_steps):
        lines.append(f"A decode worker also takes {_flags(more)}")
    lines += filter(None, (_batch_note(plan), _context_note(plan)))
    if refusals := plan.worker_refusals():
        reasons = "; ".join(f"--{each.field}: {each.reason}" for each in refusals)
        lines.append(f"This version refuses these flags: {reasons}")
        lines.append(_best_that_runs(plan))
    pod = plan.chosen if not plan.worker_refusals() else plan.runnable or plan.chosen
    host = pod.fit.host_bytes / GIB
    lines.append(f"Its processes, pages and staged copies take {host:.1f} GiB of the host, beside page cache")
    resources = ", ".join(f"{name} {amount}" for name, amount in plan.pod_resources(pod).items())
    lines.append(f"Resources of its pod, page cache for one copy of the weights included: {resources}")
    return "\n".join(lines)


def _best_that_runs(plan: Plan) -> str:
    """The line beside a choice that this version refuses."""
    best = plan.runnable
    if best is None or best.capacity is None:
        return "This version runs no cut of these cards that serves such a request"
    replicas = best.fit.cut.replicas
    cards = best.fit.cut.group_cards
    each = f"; of each of {replicas} workers, cards a worker: {cards}" if replicas > 1 else ""
    return (
        f"Best that this version runs: {best.fit.cut.name}, {best.capacity.requests_per_s:.2f} requests/s"
        f"{each}: {_flags(plan.worker_arguments(best))}"
    )


def _flags(arguments: Mapping[str, str]) -> str:
    return " ".join(f"--{name}={value}" for name, value in arguments.items())


def _context_note(plan: Plan) -> str:
    """Where the mean request is longer than any that a worker of this model takes."""
    n_tokens, most = plan.traffic.prompt_tokens + plan.traffic.output_tokens, plan.model.max_context_tokens
    if n_tokens <= most:
        return ""
    return f"Workers refuse requests of {n_tokens:,.0f} tokens: the model's context has {most:,}"


def _batch_note(plan: Plan) -> str:
    """Where a worker with these flags runs fewer sequences in a step than the plan counts."""
    capacity = plan.chosen.capacity
    room = plan.decode_steps or plan.draft_head
    batch = DEFAULT_BATCH if room is None else room.max_batch
    n_sequences = 0 if capacity is None else -(-capacity.n_sequences // plan.chosen.fit.cut.replicas)
    if n_sequences <= batch:
        return ""
    return f"Its rates count {n_sequences:,} sequences in a step; these flags run {batch} (--max-batch)"
