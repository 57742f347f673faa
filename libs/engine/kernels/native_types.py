"""The C structs and functions of the compiled kernels for ctypes. Mirrors the headers in csrc/."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p


class MATRIX(ctypes.Structure):
    """matrix_t of matrix.h."""

    _fields_ = [
        ("data", c_void_p),
        ("scale", c_void_p),
        ("rows", c_int64),
        ("cols", c_int64),
        ("kind", c_int32),
        ("scale_kind", c_int32),
        ("group", c_int32),
        ("unused", c_int32),
    ]


class MLP(ctypes.Structure):
    """mlp_t of ops.h."""

    _fields_ = [("gate", c_void_p), ("up", c_void_p), ("down", c_void_p)]


class MOE(ctypes.Structure):
    """moe_t of ops.h."""

    _fields_ = [
        ("router", c_void_p),
        ("correction_bias", c_void_p),
        ("n_experts", c_int64),
        ("n_chosen", c_int64),
        ("n_group", c_int64),
        ("topk_group", c_int64),
        ("norm_topk_prob", c_int64),
        ("gate", c_void_p),
        ("up", c_void_p),
        ("down", c_void_p),
        ("shared", MLP),
        ("routed_scaling_factor", c_float),
    ]


class ATTENTION(ctypes.Structure):
    """attention_t of attention.h."""

    _fields_ = [
        ("q", c_void_p),
        ("q_stride", c_int64),
        ("n_heads", c_int64),
        ("nope", c_int64),
        ("rope", c_int64),
        ("lora", c_int64),
        ("v", c_int64),
        ("uk", c_void_p),
        ("uv", c_void_p),
        ("layer_base", c_void_p),
        ("page_bytes", c_int64),
        ("block_tokens", c_int64),
        ("is_bf16", c_int64),
        ("query_start", c_void_p),
        ("context_len", c_void_p),
        ("visible", c_void_p),
        ("page_table", c_void_p),
        ("table_stride", c_int64),
        ("sequences", c_void_p),
        ("n_sequences", c_int64),
        ("out", c_void_p),
        ("log_sums", c_void_p),
        ("scale", c_float),
    ]


class SLOTS(ctypes.Structure):
    """slots_t of ops.h."""

    _fields_ = [
        ("n_rows", c_int64),
        ("lora", c_int64),
        ("rope", c_int64),
        ("cos_sin", c_void_p),
        ("page_of_row", c_void_p),
        ("offset_of_row", c_void_p),
        ("page_bytes", c_int64),
        ("is_bf16", c_int64),
    ]


class LAYER(ctypes.Structure):
    """layer_t of stack.c."""

    _fields_ = [
        ("input_norm", c_void_p),
        ("q_norm", c_void_p),
        ("kv_norm", c_void_p),
        ("post_norm", c_void_p),
        ("a_proj", c_void_p),
        ("q_b", c_void_p),
        ("uk", c_void_p),
        ("uv", c_void_p),
        ("o_proj", c_void_p),
        ("mlp", c_void_p),
        ("moe", c_void_p),
    ]


class STACK(ctypes.Structure):
    """stack_t of stack.c."""

    _fields_ = [
        ("layers", c_void_p),
        ("n_layers", c_int64),
        ("hidden", c_int64),
        ("eps", c_float),
        ("latent_eps", c_float),
    ]


class STEP(ctypes.Structure):
    """step_t of stack.c."""

    _fields_ = [
        ("slots", SLOTS),
        ("absorbed", ATTENTION),
        ("expanded", ATTENTION),
        ("cache", c_void_p),
        ("captured_of", c_void_p),
        ("captured", c_void_p),
        ("x", c_void_p),
        ("stop", c_void_p),
    ]


class DRAFT_HEAD(ctypes.Structure):
    """draft_head_t of draft_chain.c."""

    _fields_ = [
        ("hidden", c_int64),
        ("n_heads", c_int64),
        ("n_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("embedding_is_bf16", c_int64),
        ("norm_before_residual", c_int64),
        ("norm_output", c_int64),
        ("eps", c_float),
        ("scale", c_float),
        ("input_norm", c_void_p),
        ("hidden_norm", c_void_p),
        ("post_norm", c_void_p),
        ("norm", c_void_p),
        ("embedding", c_void_p),
        ("target_ids", c_void_p),
        ("qkv", c_void_p),
        ("o_proj", c_void_p),
        ("lm_head", c_void_p),
        ("mlp", c_void_p),
    ]


class DRAFT_CONTEXT(ctypes.Structure):
    """draft_context_t of draft_chain.c."""

    _fields_ = [
        ("keys", c_void_p),
        ("values", c_void_p),
        ("kv_stride", c_int64),
        ("n_rows", c_int64),
        ("residual", c_void_p),
        ("q", c_void_p),
        ("cos_sin", c_void_p),
        ("tokens", c_void_p),
        ("n_tokens", c_int64),
    ]


_POINTER, _LONG, _INT, _FLOAT = c_void_p, c_int64, c_int32, c_float

_PROTOTYPES: dict[str, tuple[object, tuple[object, ...]]] = {
    "ss_context_new": (_POINTER, (_INT,)),
    "ss_context_free": (None, (_POINTER,)),
    "ss_pack_f32": (_INT, (_POINTER, _LONG, _LONG, _POINTER, _INT)),
    "ss_pack_bf16": (_INT, (_POINTER, _LONG, _LONG, _POINTER, _INT)),
    "ss_pack_int4": (None, (_POINTER, _LONG, _LONG, _POINTER)),
    "ss_widen_fp8": (_INT, (_POINTER, *(_LONG,) * 4, _POINTER, *(_LONG,) * 3, _POINTER, _POINTER)),
    "ss_pack_fp8": (_INT, (_POINTER, *(_LONG,) * 4, _POINTER, *(_LONG,) * 3, _POINTER, _INT)),
    "ss_merge_shares": (None, (_POINTER, _POINTER, _LONG, _LONG, _LONG, _POINTER)),
    "ss_linear": (_INT, (_POINTER, _POINTER, _LONG, _LONG, _POINTER, _POINTER, _INT)),
    "ss_rms_norm": (None, (_POINTER, _POINTER, _LONG, _POINTER, _LONG, _LONG, _FLOAT, _POINTER)),
    "ss_rotate_queries": (None, (_POINTER, _POINTER, _LONG, _LONG, _LONG, _LONG, _LONG, _POINTER)),
    "ss_store_latent": (_INT, (_POINTER, _POINTER, _POINTER, _LONG, _POINTER, _FLOAT, _POINTER)),
    "ss_attend_absorbed": (_INT, (_POINTER, _POINTER)),
    "ss_attend_expanded": (_INT, (_POINTER, _POINTER)),
    "ss_mlp": (_INT, (_POINTER, _POINTER, _POINTER, _LONG, _POINTER)),
    "ss_moe": (_INT, (_POINTER, _POINTER, _POINTER, _LONG, _POINTER)),
    "ss_run_stack": (_INT, (_POINTER, _POINTER, _POINTER)),
    "ss_draft_chain": (_INT, (_POINTER, _POINTER, _POINTER, _LONG, _LONG, _FLOAT)),
}


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Set the prototype of every function."""
    for name, (result, arguments) in _PROTOTYPES.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library
