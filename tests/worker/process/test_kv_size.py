"""The default KV cache of a worker, by dtype and memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from libs.common.runtime.loading import load_settings
from libs.engine.core.build import EngineOptions, build_engine
from libs.engine.eagle.head_memory import read_head_memory
from libs.engine.kernels import device
from libs.engine.parallel.sizes import parse_sizes
from libs.engine.step.load_progress import LoadProgress
from libs.engine.step.types import Engine
from libs.planner.cards import parse_cards
from libs.planner.cuts import Cut
from libs.planner.decode_room import DecodeStepRoom
from libs.planner.fit import IN_BF16, CardMemory, HostMemory, Staging, fit_memory
from libs.planner.kv_cache import cut_of
from libs.planner.plan import make_plan
from libs.planner.shapes.model_shape import ModelShape
from libs.planner.shapes.read_shape import read_shape
from libs.worker.process import kv_size
from libs.worker.process.kv_size import kv_cache_size, worker_memory
from libs.worker.process.model_unusable import ModelUnusable
from libs.worker.process.settings import DecodeStepsName, engine_builder
from services.decode.settings import DecodeSettings
from slipstream.errors import InvalidArgument
from tests.engine.model.release_configs import DEEPSEEK_V3, MOONLIGHT
from tests.engine.random_head import RandomHead, write_random_head
from tests.planner.shapes import KIMI_CONFIG
from tests.support.random_checkpoint import RandomCheckpoint, write_random_checkpoint

BIG = HostMemory(8 << 30)
BIG_HOST = HostMemory(200 << 30)
MODELS = {
    "K2.5": json.loads((KIMI_CONFIG / "config.json").read_text()),
    "V3": DEEPSEEK_V3,
    "Moonlight": MOONLIGHT,
}


def size(
    model_dir: Path,
    memory: CardMemory | HostMemory,
    *,
    weight_dtype: str = "auto",
    kv_dtype: str = "auto",
    max_batch: int = 2,
    parallel: str = "tp=1",
    max_context_tokens: int | None = None,
) -> int:
    return kv_cache_size(
        model_dir,
        memory,
        max_batch=max_batch,
        weight_dtype=weight_dtype,
        kv_dtype=kv_dtype,
        sizes=parse_sizes(parallel),
        max_context_tokens=max_context_tokens,
    )


def test_the_cache_holds_two_whole_contexts_in_its_dtype(tmp_path: Path) -> None:
    config = write_random_checkpoint(tmp_path, RandomCheckpoint())
    values = 2 * config.max_position_tokens * config.n_layers * config.latent_width
    assert size(tmp_path, BIG) == 2 * values
    assert size(tmp_path, BIG, kv_dtype="float32") == 4 * values
    assert size(tmp_path, BIG, weight_dtype="float32") == 4 * values


def test_a_stated_cache_leaves_a_device_room_for_its_steps(tmp_path: Path) -> None:
    """The most that works is what the plan leaves; the engine checks a stated size on the host."""
    (tmp_path / "config.json").write_text(json.dumps(MODELS["Moonlight"]))
    memory, steps = CardMemory(60 << 30), DecodeStepRoom(max_batch=512)

    def stated(n_bytes: int, memory: CardMemory | HostMemory = memory) -> int:
        return kv_cache_size(
            tmp_path,
            memory,
            max_batch=1 << 16,
            weight_dtype="auto",
            kv_dtype="auto",
            decode_steps=steps,
            stated_bytes=n_bytes,
        )

    with pytest.raises(InvalidArgument, match="the most that works is") as refusal:
        stated(60 << 30)
    most = int(refusal.value.message.rsplit(" ", 1)[1])
    assert stated(most) == most and stated(1 << 20) == 1 << 20
    with pytest.raises(InvalidArgument, match="kv_memory_bytes"):
        stated(most + 1)
    assert stated(60 << 30, HostMemory(1)) == 60 << 30
    shape = loaded_shape(tmp_path)
    tight = CardMemory(shape.weights_bytes + memory.overhead_bytes + steps.n_bytes(shape) + (2 << 20))
    assert stated(1 << 20, tight) == 1 << 20, "fewer tokens than a worker takes by itself"


def memory_of(
    monkeypatch: pytest.MonkeyPatch, *, free: int | None = None, **given: Any
) -> CardMemory | HostMemory:
    """What the settings of a worker come to, on a machine with `free` bytes on its device."""
    taken: list[CardMemory | HostMemory] = []

    def take(model_dir: Path, memory: CardMemory | HostMemory, **_: object) -> int:
        taken.append(memory)
        raise InvalidArgument("stop", "here")

    monkeypatch.setattr(device, "free_device_bytes", lambda name: free)
    monkeypatch.setattr(kv_size, "kv_cache_size", take)
    with pytest.raises(ModelUnusable, match="stop"):
        engine_builder(DecodeSettings(instance="d", model=Path("m"), **given), LoadProgress())()
    return taken[0]


def test_memory_is_the_hosts_or_that_of_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Staged copies are in the host's memory, wherever the pages are."""
    monkeypatch.setattr(kv_size, "memory_limit_bytes", lambda: 200)
    assert memory_of(monkeypatch) == HostMemory(100)
    assert memory_of(monkeypatch, memory_bytes=150, kv_staging_bytes=9) == HostMemory(150, Staging(1.0, 9))
    assert memory_of(monkeypatch, kv_registration="direct") == HostMemory(100, Staging(0.0, 0))
    assert memory_of(monkeypatch, device="cuda", free=70) == CardMemory(70, int(2.5 * 2**30))
    stated = memory_of(
        monkeypatch, device="cuda:1", free=70, memory_bytes=50, device_overhead_bytes=3, kv_staging_bytes=9
    )
    assert stated == CardMemory(50, 3)


def loaded_shape(model_dir: Path) -> ModelShape:
    """What a worker loads: the plan of a whole model counts its vision tower, too."""
    return replace(read_shape(model_dir), vision_bytes=0)


@pytest.mark.parametrize(
    "memory", [HostMemory(700 << 30), CardMemory(81_559 << 20)], ids=["host", "8 devices"]
)
def test_a_vision_tower_takes_no_room_of_the_cache(tmp_path: Path, memory: CardMemory | HostMemory) -> None:
    kimi, parallel = MODELS["K2.5"], "tp=1" if isinstance(memory, HostMemory) else "tp=8"
    assert read_shape(KIMI_CONFIG).vision_bytes > 1e8
    sizes = []
    for name, config in (("whole", kimi), ("text", {**kimi, "vision_config": None})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        sizes.append(size(tmp_path / name, memory, max_batch=1 << 16, parallel=parallel))
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize(
    ("model", "cards", "overhead_gib"),
    [
        ("K2.5", "8xh100-80", 2.5),
        ("K2.5", "8xh100-80", 3.5),
        ("K2.5", "8xh200", 2.5),
        ("V3", "16xh200", 2.5),
        ("Moonlight", "1xh100", 2.5),
        ("Moonlight", "2xa100", 1.0),
    ],
)
def test_a_worker_on_devices_takes_the_tokens_of_the_plan(
    tmp_path: Path, model: str, cards: str, overhead_gib: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the flags that the plan prints, for each cut that it prints."""
    (tmp_path / "config.json").write_text(json.dumps(MODELS[model]))
    shape, (n_cards, card) = loaded_shape(tmp_path), parse_cards(cards)
    plan = make_plan(shape, n_cards, card, overhead_bytes=int(overhead_gib * 2**30))
    fitting = [each for each in plan.candidates if each.fit.kv_tokens > 4096]
    assert plan.chosen in fitting
    for candidate in fitting:
        flags = replace(plan, candidates=(candidate,)).worker_arguments()
        given = load_settings(
            DecodeSettings,
            section="decode",
            program="p",
            description="",
            arguments=["--instance", "d", *(f"--{name}={value}" for name, value in flags.items())],
            environment={},
        )
        memory = worker_memory(
            given.memory_bytes,
            free_device_bytes=1,
            device_overhead_bytes=given.device_overhead_bytes,
            staging_bytes=None,
            is_staged=True,
        )
        kv = size(
            tmp_path,
            memory,
            max_batch=1 << 16,
            parallel=given.parallel or "",
            weight_dtype=given.weight_dtype,
            kv_dtype=given.kv_dtype,
        )
        assert kv == min(candidate.fit.kv_tokens, (1 << 16) * shape.max_context_tokens) * shape.kv_token_bytes


def test_the_cache_leaves_room_for_decode_steps_as_graphs(tmp_path: Path) -> None:
    """As the plan counts them; in the memory of a host there are none."""
    (tmp_path / "config.json").write_text(json.dumps(MODELS["Moonlight"]))
    shape, (n_cards, card) = loaded_shape(tmp_path), parse_cards("1xh100")
    room = DecodeStepRoom(max_batch=1 << 9)
    plan = make_plan(shape, n_cards, card, decode_steps=room)
    memory = CardMemory(card.visible_bytes)

    def kv_bytes(memory: CardMemory | HostMemory, steps: DecodeStepRoom | None) -> int:
        return kv_cache_size(
            tmp_path, memory, max_batch=1 << 9, weight_dtype="auto", kv_dtype="auto", decode_steps=steps
        )

    assert kv_bytes(memory, room) == plan.chosen.fit.kv_bytes
    assert kv_bytes(memory, None) - kv_bytes(memory, room) == pytest.approx(plan.decode_steps_bytes, rel=1e-3)
    assert kv_bytes(BIG_HOST, room) == kv_bytes(BIG_HOST, None)
    with pytest.raises(InvalidArgument, match=f"{plan.decode_steps_bytes} of decode steps"):
        kv_bytes(CardMemory(30 << 30), room)


def test_the_cache_leaves_room_for_a_draft_head_on_the_device(tmp_path: Path) -> None:
    """On the CPU a head is in the half of the host that a worker leaves."""
    (tmp_path / "config.json").write_text(json.dumps(MODELS["Moonlight"]))

    def kv_bytes(memory: CardMemory | HostMemory, head_bytes: int) -> int:
        return kv_cache_size(
            tmp_path, memory, max_batch=512, weight_dtype="auto", kv_dtype="auto", draft_head_bytes=head_bytes
        )

    memory = CardMemory(60 << 30)
    assert kv_bytes(memory, 0) - kv_bytes(memory, 3 << 30) == pytest.approx(3 << 30, rel=1e-3)
    assert kv_bytes(BIG_HOST, 0) == kv_bytes(BIG_HOST, 3 << 30)
    with pytest.raises(InvalidArgument, match=f"{3 << 30} of the draft head"):
        kv_bytes(CardMemory(35 << 30), 3 << 30)


@pytest.mark.parametrize(("place", "name"), [("local", "cuda"), ("local", "cpu"), ("service", "cuda")])
def test_a_worker_states_the_room_of_a_local_head(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str, name: str
) -> None:
    """Contexts of two batches, whole; for a head that is elsewhere what makes its features."""
    stated: list[int] = []

    def take(*_: object, draft_head_bytes: int, **__: object) -> int:
        stated.append(draft_head_bytes)
        raise InvalidArgument("stop", "here")

    write_random_head(tmp_path, RandomHead())
    monkeypatch.setattr(device, "free_device_bytes", lambda name: 1 if name == "cuda" else None)
    monkeypatch.setattr(kv_size, "kv_cache_size", take)
    settings = DecodeSettings(
        instance="d", model=Path("m"), draft_model=tmp_path, device=name, max_batch=7, drafter=place
    )
    with pytest.raises(ModelUnusable, match="stop"):
        engine_builder(settings, LoadProgress(), has_local_head=place == "local")()
    memory = read_head_memory(tmp_path)
    wanted = {"local": memory.n_bytes(14) + memory.feature_bytes, "service": memory.feature_bytes}
    assert memory.feature_bytes > 0 and stated == [wanted[place] if name == "cuda" else 0]


@pytest.mark.parametrize("steps", ["plain", "graphs", "ahead"])
def test_a_worker_states_the_room_of_its_decode_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, steps: str
) -> None:
    stated: list[DecodeStepRoom | None] = []

    def take(*_: object, decode_steps: DecodeStepRoom | None, **__: object) -> int:
        stated.append(decode_steps)
        raise InvalidArgument("stop", "here")

    write_random_head(tmp_path, RandomHead())
    monkeypatch.setattr(device, "free_device_bytes", lambda name: 1)
    monkeypatch.setattr(kv_size, "kv_cache_size", take)
    settings = DecodeSettings(instance="d", model=Path("m"), draft_model=tmp_path, device="cuda", max_batch=7)
    name = cast(DecodeStepsName, steps)
    with pytest.raises(ModelUnusable, match="stop"):
        engine_builder(settings, LoadProgress(), decode_steps=name, max_draft_tokens=3)()
    assert stated == [None if steps == "plain" else DecodeStepRoom(7, 3, has_features=True, block_tokens=64)]


@pytest.mark.parametrize("parallel", ["tp=1", "tp=8", "tp=2,pp=4", "tp=2,kv=4", "tp=4,dp=2,ep=8"])
@pytest.mark.parametrize("model", MODELS)
def test_a_worker_on_the_cpu_takes_the_tokens_of_the_plan(tmp_path: Path, model: str, parallel: str) -> None:
    """One copy of the KV for all ranks, half of it again for copies, and what a cut copies of the weights."""
    (tmp_path / "config.json").write_text(json.dumps(MODELS[model]))
    shape, memory, cut = loaded_shape(tmp_path), HostMemory(1600 << 30), cut_of(parse_sizes(parallel))
    fit = fit_memory(shape, cut, memory)
    assert size(tmp_path, memory, max_batch=1 << 16, parallel=parallel) == min(
        fit.kv_bytes, (1 << 16) * shape.max_context_tokens * shape.kv_token_bytes
    )
    weights = IN_BF16.weight_bytes(shape, shape.weights_bytes)
    held = fit.kv_bytes + Staging().n_bytes(fit.kv_bytes) + cut.n_cards * (512 << 20)
    assert 0 <= memory.n_bytes - held - fit.card_weights_bytes < 2 * shape.kv_token_bytes
    assert fit.card_weights_bytes >= weights


def test_a_started_worker_has_the_pages_of_the_plan(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, RandomCheckpoint())
    memory = HostMemory((512 << 20) + (8 << 20))
    fit = fit_memory(read_shape(tmp_path), Cut(1), memory)
    options = DecodeSettings(
        instance="d", model=tmp_path, memory_bytes=memory.n_bytes, max_batch=1 << 10, packed_dir="off"
    )
    engine = engine_builder(options, LoadProgress())()
    assert 0 <= fit.kv_tokens - engine.info.n_pages * 64 < 64
    assert fit.kv_tokens > 4096


def test_a_worker_refuses_memory_that_does_not_hold_the_least_and_names_what_does(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, RandomCheckpoint())

    def build(n_bytes: int) -> Engine:
        options = DecodeSettings(instance="d", model=tmp_path, memory_bytes=n_bytes, packed_dir="off")
        return engine_builder(options, LoadProgress())()

    with pytest.raises(ModelUnusable, match="--memory-bytes: 100000000 bytes of the host do not") as refused:
        build(100_000_000)
    least = int(str(refused.value).rpartition(" ")[2])
    assert build(least).info.n_pages * 64 == 4096
    with pytest.raises(ModelUnusable, match=f"the least that works is {least}"):
        build(least - 1)


def test_an_engine_states_the_context_that_it_can_hold(tmp_path: Path) -> None:
    config = write_random_checkpoint(tmp_path, RandomCheckpoint())
    for n_pages in (3, 4096):
        engine = build_engine(tmp_path, EngineOptions(n_pages=n_pages, block_tokens=16, kernels="torch"))
        assert engine.info.max_context_tokens == min(16 * n_pages, config.max_position_tokens)


def test_a_stated_context_bounds_the_cache_and_what_the_engine_takes(tmp_path: Path) -> None:
    config = write_random_checkpoint(tmp_path, RandomCheckpoint())
    whole = size(tmp_path, BIG)
    short = size(tmp_path, BIG, max_context_tokens=config.max_position_tokens // 4)
    assert short == whole // 4
    options = EngineOptions(n_pages=5, block_tokens=16, kernels="torch", max_context_tokens=70)
    assert build_engine(tmp_path, options).info.max_context_tokens == 70


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [(81, r"81 tokens need a KV cache of .* GB are missing"), (10**6, r"is more than the model's 4096")],
)
def test_a_context_that_does_not_fit_is_refused_by_how_much(tmp_path: Path, tokens: int, reason: str) -> None:
    write_random_checkpoint(tmp_path, RandomCheckpoint())
    options = EngineOptions(n_pages=5, block_tokens=16, kernels="torch", max_context_tokens=tokens)
    with pytest.raises(InvalidArgument, match=reason) as refused:
        build_engine(tmp_path, options)
    assert refused.value.field == "max_context_tokens"
