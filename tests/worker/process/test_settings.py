"""The worker's flags that decide what the engine is built on."""

from __future__ import annotations

import json
import mmap
import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from libs.common.cluster.worker_record import Role
from libs.common.runtime.exit_codes import MODEL_UNUSABLE
from libs.common.runtime.loading import load_settings
from libs.engine.core.fake import build_fake_engine
from libs.engine.step.load_progress import LoadProgress
from libs.worker.process.engine_app import EngineApp
from libs.worker.process.model_unusable import ModelUnusable, unusable_sizes
from libs.worker.process.process import run_worker
from libs.worker.process.settings import (
    EngineSettings,
    WorkerSettings,
    engine_builder,
    load_local_head,
    packed_dir,
)
from services.decode.app import DecodeApp
from services.decode.settings import DecodeSettings
from services.drafter.app import DrafterApp
from services.prefill.app import PrefillApp
from slipstream.errors import FailedPrecondition
from tests.support.random_checkpoint import RandomCheckpoint, write_config, write_random_checkpoint


@pytest.mark.parametrize("kv_memory_bytes", [None, 1 << 20])
def test_a_worker_refuses_a_device_that_the_machine_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kv_memory_bytes: int | None
) -> None:
    """Before it reads weights, and with the reason; the supervisor does not start it again."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    write_random_checkpoint(tmp_path, RandomCheckpoint())
    progress = LoadProgress()
    settings = DecodeSettings(instance="d0", model=tmp_path, device="cuda:1", kv_memory_bytes=kv_memory_bytes)
    build = engine_builder(settings, progress)
    with pytest.raises(ModelUnusable, match="device cuda:1: no CUDA device here"):
        build()
    assert progress.done_bytes == 0


def test_a_draft_head_that_cannot_load_is_unusable_for_every_process_that_loads_it(tmp_path: Path) -> None:
    """By the exit code that the supervisor does not try again and again."""
    write_random_checkpoint(tmp_path, RandomCheckpoint())
    (tmp_path / "head").mkdir()
    settings = DecodeSettings(instance="d0", model=tmp_path, draft_model=tmp_path / "head")
    with pytest.raises(ModelUnusable, match=r"config\.json"):
        load_local_head(settings, build_fake_engine())
    drafter = DrafterApp(WorkerSettings(instance="d0", model=tmp_path, draft_model=tmp_path / "head"))
    with pytest.raises(ModelUnusable, match=r"config\.json"):
        drafter._load_head()


@pytest.mark.parametrize(
    ("available", "n_devices", "reason"),
    [(False, 0, "device cuda:1: no CUDA device here"), (True, 1, "device cuda:1: this machine has 1 CUDA")],
)
def test_a_drafter_refuses_a_device_that_the_machine_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, available: bool, n_devices: int, reason: str
) -> None:
    """With the error of a worker, and before it reads a file of the head: there is none."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: n_devices)
    settings = WorkerSettings(instance="d0", model=tmp_path, draft_model=tmp_path, device="cuda:1")
    with pytest.raises(ModelUnusable, match=reason):
        DrafterApp(settings)._load_head()


@pytest.mark.parametrize(
    ("flags", "environment", "file", "name"),
    [
        (["--max-context-tokens", "99999"], {}, "", "--max-context-tokens"),
        (["--max-context-tokens", "99999"], {}, "max_context_tokens = 9", "--max-context-tokens"),
        ([], {"SLIPSTREAM_MAX_CONTEXT_TOKENS": "99999"}, "", "SLIPSTREAM_MAX_CONTEXT_TOKENS"),
        ([], {}, "max_context_tokens = 99999", "[decode] max_context_tokens"),
    ],
)
def test_a_refused_setting_is_named_as_the_user_gave_it(
    tmp_path: Path, flags: list[str], environment: dict[str, str], file: str, name: str
) -> None:
    write_random_checkpoint(tmp_path, RandomCheckpoint())
    (tmp_path / "c.toml").write_text(f"[decode]\n{file}\n")
    given = ["--instance", "d0", "--model", str(tmp_path), "--config", str(tmp_path / "c.toml"), *flags]
    settings = load_settings(
        DecodeSettings,
        section="decode",
        program="p",
        description="",
        arguments=given,
        environment=environment,
    )
    with pytest.raises(ModelUnusable, match=f"^{re.escape(name)}: 99999 is more than the model's"):
        engine_builder(settings, LoadProgress())()


@pytest.mark.parametrize("is_nested", [False, True])
def test_the_fake_engine_has_the_vocabulary_of_the_model_it_stands_in_for(
    tmp_path: Path, is_nested: bool
) -> None:
    """Kimi-K2.5 states it in `text_config`."""
    config = write_config(tmp_path, RandomCheckpoint())
    if is_nested:
        raw = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({"text_config": raw}))
    settings = DecodeSettings(instance="d0", model=tmp_path, engine="fake")
    assert engine_builder(settings, LoadProgress())().info.vocab_size == config.vocab_size


def test_a_fake_engine_names_what_a_model_lacks(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    settings = DecodeSettings(instance="d0", model=tmp_path, engine="fake")
    with pytest.raises(ModelUnusable, match="vocab_size"):
        engine_builder(settings, LoadProgress())()


def test_a_cut_that_cannot_be_is_refused_by_the_name_of_its_flag(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = DecodeSettings(instance="d0", parallel="tp=0", model=Path("m"))
    for name in ("configure_logging", "configure_tracing"):  # those of the tests stay
        monkeypatch.setattr(f"libs.worker.process.process.{name}", lambda *given, **named: None)

    def make_app() -> NoReturn:
        engine_builder(settings, LoadProgress())
        raise AssertionError("the cut was taken")

    assert run_worker(Role.DECODE, settings, make_app) == 1
    assert "d0 cannot start: --parallel: every size is at least 1" in caplog.text


@pytest.mark.parametrize(
    ("app", "options", "refusal"),
    [
        (DecodeApp, {"parallel": "kv=2"}, "--parallel: kv=2: the triton kernels do not split KV by position"),
        (PrefillApp, {"parallel": "dp=2"}, "--parallel: dp=2 moves sequences between ranks, whose KV pages"),
        (DecodeApp, {"parallel": "tp=2", "decode_steps": "graphs"}, "--decode-steps: 'graphs' captures"),
        (DecodeApp, {"parallel": "pp=2", "decode_steps": "ahead"}, "--decode-steps: 'ahead' captures"),
        (DecodeApp, {"parallel": "kv=3", "device": "cpu"}, "--parallel: kv=3 does not divide the 64 tokens"),
    ],
)
def test_ranks_that_no_worker_runs_are_refused_at_once(
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    app: type[EngineApp],
    options: dict[str, Any],
    refusal: str,
) -> None:
    """By the flag, before the model is read or the device is opened: neither is there."""
    for name in ("configure_logging", "configure_tracing"):  # those of the tests stay
        monkeypatch.setattr(f"libs.worker.process.process.{name}", lambda *given, **named: None)
    kind = DecodeSettings if app is DecodeApp else EngineSettings
    settings = kind(instance="d0", model=Path("no/model"), **{"device": "cuda:1"} | options)
    assert run_worker(Role.DECODE, settings, lambda: app(settings)) == MODEL_UNUSABLE
    [line] = caplog.messages
    assert line.startswith(f"d0 cannot start: {refusal}")


@pytest.mark.parametrize(
    ("given", "folder"), [(None, Path("run/packed")), ("off", None), ("/var/cache/p", Path("/var/cache/p"))]
)
def test_packed_weights_are_in_the_run_directory_unless_a_flag_says_otherwise(
    given: str | None, folder: Path | None
) -> None:
    assert packed_dir(DecodeSettings(instance="d0", run_dir=Path("run"), packed_dir=given)) == folder


def test_a_kv_cache_that_the_host_has_no_memory_for_is_refused_by_its_flag(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, RandomCheckpoint())
    settings = EngineSettings(instance="d0", model=tmp_path, memory_bytes=1 << 52, kv_memory_bytes=1 << 50)
    with pytest.raises(ModelUnusable, match=r"^--kv-memory-bytes: \d+ bytes cannot be allocated"):
        engine_builder(settings, LoadProgress())()


@pytest.mark.parametrize(
    ("allocate", "what"),
    [
        (lambda: bytearray(1 << 62), "no memory in <lambda>"),
        (
            lambda: torch.empty(1 << 60, dtype=torch.uint8),
            f".*you tried to allocate {1 << 60} bytes",
        ),
        (lambda: mmap.mmap(-1, 1 << 60), ".*Cannot allocate memory"),
    ],
)
def test_an_allocation_that_fails_amid_a_start_names_the_settings_of_memory(
    allocate: Callable[[], object], what: str
) -> None:
    flags_of = {EngineSettings: "--memory-bytes, --kv-memory-bytes", WorkerSettings: "--draft-model"}
    for kind, flags in flags_of.items():
        settings = kind(instance="w")
        with pytest.raises(ModelUnusable, match=f"^{flags}: {what}"), unusable_sizes(settings):
            allocate()


@pytest.mark.parametrize("limit", [resource.RLIM_INFINITY, 1 << 46])
def test_a_library_that_cannot_be_mapped_lacks_memory_only_where_memory_is_limited(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The linker has the same words for a directory whose file system is mounted noexec."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    expected: type[Exception] = ImportError if limit == resource.RLIM_INFINITY else ModelUnusable
    with (
        pytest.raises(expected, match="failed to map segment"),
        unusable_sizes(EngineSettings(instance="d0")),
    ):
        raise ImportError("cuda_utils.so: failed to map segment from shared object")


def test_other_errors_of_a_start_stay_what_they_are() -> None:
    for error in (RuntimeError("a size is wrong"), FileNotFoundError("x"), FailedPrecondition("no port")):
        with pytest.raises(type(error)) as raised, unusable_sizes(EngineSettings(instance="d0")):
            raise error
        assert raised.value is error
