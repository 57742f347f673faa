"""Each section of the device report in miniature: on the CPU, in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import tests.engine.kernels.gpu.interpreted  # noqa: F401  (before the programs)
from bench import load
from bench.gpu.case import Bench, Ceilings, ReportCase, ReportSection
from bench.gpu.cases.kernel_cases import SCALE, SMALL, KernelCase, PreparedKernel, kernel_cases
from bench.gpu.cases.peers import PEERS
from bench.gpu.cases.random_weights import random_int4
from bench.gpu.counting.work import DeviceShape
from bench.gpu.section_process import TIME_IS_OVER, measure_section
from bench.gpu.sections import CEILINGS, SECTIONS
from libs.engine.kernels.gpu.grouped_gemm import grouped_gemm
from libs.engine.kernels.gpu.work_list import single_list

CPU = torch.device("cpu")
MINIATURE = Bench(CPU, 1, Ceilings(1e10, 1e10), is_miniature=True)
BY_NAME = {section.name: section for section in (CEILINGS, *SECTIONS)}


@cache
def measured(name: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    rows = list(measure_section(BY_NAME[name], MINIATURE, 600))
    figures = [row["figure"] for row in rows if "figure" in row]
    return figures, [row["left_out"] for row in rows if "left_out" in row]


@pytest.mark.parametrize(
    ("name", "time_key"),
    [
        ("kernels", "median_us"),
        ("sampling", "wall_us"),
        ("steps_moonlight", "wall_us"),
    ],
)
def test_every_case_has_a_time_and_its_shares(name: str, time_key: str) -> None:
    figures, left_out = measured(name)
    assert not left_out
    assert [f["name"] for f in figures] == [case.name for case in BY_NAME[name].cases(MINIATURE)]
    for figure in figures:
        seconds = figure[time_key] / 1e6
        assert figure["copy_share"] == pytest.approx(figure["n_bytes"] / seconds / 1e10)
        assert figure["matmul_share"] == pytest.approx(figure["flops"] / seconds / 1e10)


def test_a_step_is_set_beside_its_floor_and_counts_the_experts_that_it_read() -> None:
    """Both models take the same tiny one here."""
    names = [[case.setting for case in BY_NAME[name].cases(MINIATURE)] for name in BY_NAME if "steps" in name]
    assert len(names) == 2 and names[0] == names[1]
    figures, _ = measured("steps_moonlight")
    assert [f["name"] for f in figures] == [*["decode_step", "decode_graph", "decode_ahead"] * 2, "prefill"]
    for figure in figures:
        assert figure["floor_share"] == pytest.approx(figure["floor_us"] / figure["wall_us"])
        assert figure.get("busy_us") is None, "there is no device"
    one, two, prefill = figures[0], figures[3], figures[6]
    assert one["experts_a_layer"] == 2 and 2 <= two["experts_a_layer"] <= 4
    assert prefill["tokens_per_s"] == pytest.approx(12 / prefill["wall_us"] * 1e6)


def test_graphs_and_steps_ahead_are_set_beside_plain_steps() -> None:
    figures, _ = measured("steps_moonlight")
    for plain, graph, ahead in (figures[:3], figures[3:6]):
        assert graph["has_same_tokens"]
        for figure in (graph, ahead):
            assert figure["setting"] == plain["setting"]
            assert figure["n_bytes"] == plain["n_bytes"]
            assert figure["ratio"] == pytest.approx(plain["wall_us"] / figure["wall_us"])


def test_the_ceilings_are_measured() -> None:
    (figure,), left_out = measured("ceilings")
    assert figure["copy_bytes_per_s"] > 0 and figure["matmul_flops_per_s"] > 0 and not left_out


def test_logits_are_set_beside_those_of_transformers() -> None:
    pytest.importorskip("transformers")
    (figure,), left_out = measured("accuracy")
    assert not left_out
    assert 0 < figure["our_median_error"] < 1e-4, "fp32 in the interpreter"
    assert figure["our_median_error"] < figure["their_median_error"] < 0.3
    assert figure["our_same_best"] == 1.0 and 0 <= figure["our_mean_kl"] < figure["their_mean_kl"]


def test_the_boot_is_set_beside_reads_and_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[str] = []

    def in_this_process(
        model_dir: Path, packed_dir: Path | None = None, device: str = ""
    ) -> dict[str, float]:
        devices.append(device)
        return load.load_once(model_dir, packed_dir)

    monkeypatch.setattr(load, "_load_in_child", in_this_process)
    monkeypatch.setattr(load, "_COPY_BYTES", 4 << 20)
    (figure,), left_out = measured("boot")
    assert not left_out and "cpu" in devices
    assert 0 < figure["gb"] < 0.05
    assert figure["drive_ratio"] > 0 and figure["cache_ratio"] > 0


def test_missing_peers_are_named_and_others_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found(name) if name == "torch" else None)
    figures, left_out = measured("peers")
    assert {f["name"] for f in figures} == {"mla_prefill", "swiglu"}
    for figure in figures:
        assert figure["peer"] == "torch" and figure["difference"] < 1e-5
        assert figure["ratio"] == pytest.approx(figure["peer_us"] / figure["median_us"])
    reasons = {row["reason"].split(" (")[0] for row in left_out}
    assert reasons == {"flashinfer is not installed", "humming is not installed"}


class _PlainMla:
    """flashinfer's wrapper by its documentation, in torch."""

    def __init__(self, workspace: torch.Tensor, backend: str) -> None:
        assert workspace.nbytes >= 64 << 20 and backend == "auto"

    def plan(self, *arguments: Any) -> None:
        assert arguments[4:8] == (3, 20, 6, 64) and arguments[9:] == (SCALE, torch.float32, torch.float32)
        self._plan = arguments

    def run(
        self, q: torch.Tensor, q_rope: torch.Tensor, ckv: torch.Tensor, kpe: torch.Tensor
    ) -> torch.Tensor:
        starts, page_starts, pages, lengths, *_, causal, _, _, _ = self._plan
        out = torch.empty_like(q)
        for s, length in enumerate(lengths.tolist()):
            rows = slice(int(starts[s]), int(starts[s + 1]))
            own = pages[page_starts[s] : page_starts[s + 1]].long()
            latents, keys = (cache[own].flatten(0, 1)[:length] for cache in (ckv, kpe))
            scores = torch.einsum("rhl,cl->hrc", q[rows], latents)
            scores = SCALE * (scores + torch.einsum("rhl,cl->hrc", q_rope[rows], keys))
            if causal:
                n = scores.shape[1]
                unseen = torch.ones(n, length, dtype=torch.bool).tril_(length - n).logical_not()
                scores = scores.masked_fill(unseen, -torch.inf)
            out[rows] = torch.einsum("hrc,cl->rhl", scores.softmax(-1), latents)
        return out


def test_a_peer_gets_the_inputs_of_our_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    fake: Any = ModuleType("flashinfer")
    fake.__path__, fake.__spec__ = [], SimpleNamespace(name="flashinfer")
    mla: Any = ModuleType("flashinfer.mla")
    mla.BatchMLAPagedAttentionWrapper = _PlainMla
    monkeypatch.setitem(sys.modules, "flashinfer", fake)
    monkeypatch.setitem(sys.modules, "flashinfer.mla", mla)
    peer = next(each for each in PEERS if each.case == "mla_decode")
    for case in kernels("mla_decode"):
        ours = case.prepare(CPU)
        torch.testing.assert_close(peer.prepare(ours)(), ours.run(), rtol=1e-4, atol=1e-5)


def kernels(name: str) -> list[KernelCase]:
    return [case for case in kernel_cases(SMALL) if case.name == name]


def test_the_counted_bytes_are_those_of_the_tensors() -> None:
    """As if each value of activations and KV had two bytes, which it has on a device."""
    for case in kernels("mla_decode"):
        kernel = case.prepare(CPU)
        context = int(kernel.inputs["plan"].context_len.sum()) * kernel.inputs["pages"].shape[-1]
        queries = kernel.inputs["q_latent"].numel() + kernel.inputs["q_rope"].numel()
        assert kernel.work.n_bytes == 2 * (context + queries + kernel.run().numel())
    for case in kernels("mla_prefill"):
        kernel = case.prepare(CPU)
        read = sum(kernel.inputs[name].numel() for name in ("q", "latents", "kv_b"))
        assert kernel.work.n_bytes == 2 * read + kernel.run().nbytes
    for case in kernels("swiglu"):
        kernel = case.prepare(CPU)
        assert kernel.work.n_bytes == 2 * (kernel.inputs["joined"].numel() + kernel.run().numel())


def test_experts_of_a_case_are_counted_by_the_choices_of_its_tokens() -> None:
    def n_bytes(kernel: PreparedKernel) -> int:
        shape: DeviceShape = kernel.inputs["shape"]
        n_tokens: int = kernel.inputs["tokens"]
        weights = 3 * shape.hidden * shape.intermediate
        distinct = len(set(kernel.inputs["chosen"].flatten().tolist()))
        return distinct * weights * 9 // 16 + n_tokens * shape.hidden * 10

    for case in kernels("int4_experts"):
        kernel = case.prepare(CPU)
        assert kernel.work.n_bytes == n_bytes(kernel)


def test_random_experts_keep_the_size_of_their_inputs() -> None:
    weights = random_int4(CPU, 1, 256, 288, 32)
    assert weights.data.shape == (1, 256, 512 // 8) and not weights.scale[:, 9:].any()
    torch.manual_seed(0)
    x = torch.randn(4, 288)
    product = grouped_gemm(x, weights, single_list(4, CPU), out_dtype=torch.float32)
    assert 0.7 < float(product.std()) < 1.5


def test_a_case_that_fails_or_comes_too_late_is_left_out_with_its_reason() -> None:
    def fail() -> dict[str, Any]:
        raise RuntimeError("no such program\nand more")

    failing = ReportSection("one", 1, lambda _: [ReportCase("a", "x", fail), ReportCase("b", "y", dict)])
    rows = list(measure_section(failing, MINIATURE, 60))
    assert rows[0] == {"left_out": {"case": "a, x", "reason": "RuntimeError: no such program"}}
    assert rows[1] == {"figure": {"section": "one", "name": "b", "setting": "y"}}
    late = list(measure_section(failing, MINIATURE, 0))
    assert [row["left_out"]["reason"] for row in late] == [TIME_IS_OVER] * 2
