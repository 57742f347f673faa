"""Kernels of other projects on the inputs of ours: what a peer does, and what it leaves out, is stated.

A peer is optional: the report names those that are not installed. A failing one is a line of the report, too.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bench.gpu.cases.kernel_cases import SCALE, PreparedKernel

_WORKSPACE_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class KernelPeer:
    """`prepare` takes one of our kernels' inputs. `compares`: its result is that of ours."""

    package: str
    install: str
    case: str
    note: str
    prepare: Callable[[PreparedKernel], Callable[[], Any]]
    compares: bool = True


def _package(name: str) -> Any:
    return importlib.import_module(name)


def _flashinfer_decode(kernel: PreparedKernel) -> Callable[[], Any]:
    q_latent, q_rope = kernel.inputs["q_latent"], kernel.inputs["q_rope"]
    pages, plan = kernel.inputs["pages"], kernel.inputs["plan"]
    lora = q_latent.shape[2]
    batch, n_blocks = plan.page_table.shape
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.int8, device=pages.device)
    wrapper = _package("flashinfer.mla").BatchMLAPagedAttentionWrapper(workspace, backend="auto")
    wrapper.plan(
        plan.query_start,
        torch.arange(batch + 1, dtype=torch.int32, device=pages.device) * n_blocks,
        plan.page_table.flatten(),
        plan.context_len,
        q_latent.shape[1],
        lora,
        q_rope.shape[2],
        pages.shape[1],
        kernel.inputs["rows"] > 1,  # causal
        SCALE,
        q_latent.dtype,
        pages.dtype,
    )
    latents, keys = pages[..., :lora].contiguous(), pages[..., lora:].contiguous()
    return lambda: wrapper.run(q_latent, q_rope, latents, keys)


def _flashinfer_norm(kernel: PreparedKernel) -> Callable[[], Any]:
    delta, weight = kernel.inputs["delta"].clone(), kernel.inputs["weight"].to(kernel.inputs["delta"].dtype)
    residual = torch.randn_like(delta)
    norm = _package("flashinfer.norm").fused_add_rmsnorm
    return lambda: norm(delta, residual, weight, 1e-6)


def _flashinfer_swiglu(kernel: PreparedKernel) -> Callable[[], Any]:
    joined, multiply = kernel.inputs["joined"], _package("flashinfer.activation").silu_and_mul
    return lambda: multiply(joined)


def _torch_swiglu(kernel: PreparedKernel) -> Callable[[], Any]:
    gate, up = kernel.inputs["joined"].chunk(2, dim=1)
    return lambda: torch.nn.functional.silu(gate) * up


def _torch_prefill(kernel: PreparedKernel) -> Callable[[], Any]:
    q, latents, kv_b, shape = (kernel.inputs[name] for name in ("q", "latents", "kv_b", "shape"))
    mask = None
    if len(q) != len(latents):
        first = len(latents) - len(q)
        mask = torch.ones(len(q), len(latents), dtype=torch.bool, device=q.device).tril_(first)

    def run() -> torch.Tensor:
        keys = (latents[:, : shape.lora] @ kv_b.T).view(len(latents), shape.n_heads, -1)
        rope = latents[:, None, shape.lora :].expand(-1, shape.n_heads, -1)
        k = torch.cat((keys[..., : shape.nope], rope), dim=-1)
        q_heads, k_heads, v_heads = (x.transpose(0, 1)[None] for x in (q, k, keys[..., shape.nope :]))
        mixed = torch.nn.functional.scaled_dot_product_attention(
            q_heads, k_heads, v_heads, attn_mask=mask, is_causal=mask is None, scale=SCALE
        )
        return mixed[0].transpose(0, 1)

    return run


def _humming_experts(kernel: PreparedKernel) -> Callable[[], Any]:
    """Both products of its indexed form. Each draws another routing with as many pairs."""
    shape, n_experts = kernel.inputs["shape"], kernel.inputs["n_experts"]
    tokens, device = kernel.inputs["tokens"], kernel.inputs["chosen"].device
    gate_up = _humming_product(2 * shape.intermediate, shape.hidden, n_experts, tokens, shape, device, False)
    down = _humming_product(shape.hidden, shape.intermediate, n_experts, tokens, shape, device, True)

    def run() -> None:
        gate_up()
        down()

    return run


def _humming_product(
    rows: int, cols: int, n_experts: int, tokens: int, shape: Any, device: torch.device, is_down: bool
) -> Callable[[], Any]:
    config, testing = _package("humming.config"), _package("humming.utils.test")
    layer = (
        _package("humming.layer")
        .HummingLayer(
            shape_n=rows,
            shape_k=cols,
            num_experts=n_experts,
            weight_config={"dtype": "uint4", "group_size": shape.group, "scale_dtype": "bfloat16"},
            input_config={"dtype": "bfloat16", "group_size": 0},
            torch_dtype=torch.bfloat16,
        )
        .to(device)
    )
    for parameter in layer.parameters():
        testing.random_fill_tensor(parameter)
    layer.transform()
    indexed = config.GemmType.INDEXED
    tuning = _package("humming.tune").get_heuristics_config(meta=layer.humming_metas[""], gemm_type=indexed)
    n_pairs = tokens * shape.n_chosen
    block = next(c["block_shape"][0] for least, most, c in tuning if least < n_pairs <= most)
    _, layout, sorted_ids, expert_ids, padded = testing.generate_random_moe_tensors(
        shape_m=tokens,
        num_experts=n_experts,
        top_k=shape.n_chosen,
        gemm_type=indexed,
        block_size_config=block,
    )
    x = torch.randn(n_pairs if is_down else tokens, cols, dtype=torch.bfloat16, device=device)
    return lambda: layer(
        inputs=x,
        sorted_ids=sorted_ids,
        expert_ids=expert_ids,
        num_tokens_padded=padded,
        expert_layout=layout,
        compute_config={"gemm_type": indexed.value},
        tuning_config=tuning,
        top_k=1 if is_down else shape.n_chosen,
    )


_FLASHINFER = "pip install flashinfer-python"
PEERS = (
    KernelPeer("flashinfer", _FLASHINFER, "mla_decode", "planned before", _flashinfer_decode),
    KernelPeer(
        "humming",
        "pip install humming-kernels",
        "int4_experts",
        "two products; without sorting, SwiGLU and the sum of the experts",
        _humming_experts,
        compares=False,
    ),
    KernelPeer("torch", "", "mla_prefill", "SDPA behind a product and a copy", _torch_prefill),
    KernelPeer(
        "flashinfer",
        _FLASHINFER,
        "add_rms_norm",
        "bf16 residual stream; ours is fp32",
        _flashinfer_norm,
        compares=False,
    ),
    KernelPeer("flashinfer", _FLASHINFER, "swiglu", "", _flashinfer_swiglu),
    KernelPeer("torch", "", "swiglu", "two programs", _torch_swiglu),
)
