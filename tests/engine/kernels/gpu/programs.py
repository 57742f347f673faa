"""The Triton programs under one name. Whether they are compiled or interpreted is decided by this import."""

from libs.engine.kernels.gpu.device_plan import upload
from libs.engine.kernels.gpu.expert_weights import stack_experts
from libs.engine.kernels.gpu.grouped_gemm import combine, grouped_gemm
from libs.engine.kernels.gpu.kv_splits import upload_splits
from libs.engine.kernels.gpu.mla_decode import mla_decode
from libs.engine.kernels.gpu.mla_prefill import mla_prefill
from libs.engine.kernels.gpu.norm import rms_norm, swiglu
from libs.engine.kernels.gpu.rope import rotate_queries, store_latent
from libs.engine.kernels.gpu.router import choose_experts
from libs.engine.kernels.gpu.sampling_cut import cut_rows
from libs.engine.kernels.gpu.triton_kernels import TritonKernels
from libs.engine.kernels.gpu.work_list import build_work_list, single_list

__all__ = [
    "TritonKernels",
    "build_work_list",
    "choose_experts",
    "combine",
    "cut_rows",
    "grouped_gemm",
    "mla_decode",
    "mla_prefill",
    "rms_norm",
    "rotate_queries",
    "single_list",
    "stack_experts",
    "store_latent",
    "swiglu",
    "upload",
    "upload_splits",
]
