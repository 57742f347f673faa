"""Bounds of prefill, decode and drafter workers, for docs/bounds.md."""

from __future__ import annotations

# A checkpoint's config.json has a few KiB; the index of Kimi-K2.5 names 208,550 tensors in 23 MB.
MAX_CONFIG_BYTES = 4 << 20
MAX_CHECKPOINT_INDEX_BYTES = 256 << 20
# Processes of one worker on one machine.
MAX_PARALLEL_RANKS = 64
MAX_THREADS = 1024
# Sequences and rows of one step: their buffers are made at the start.
MAX_BATCH = 65_536
MAX_STEP_TOKENS = 1 << 20
# Prompts whose draft features are on their way at once. A slot has 512 rows.
MAX_PROMPT_FEATURES = 64

ROWS = (
    ("`config.json` of a model or a draft head", f"{MAX_CONFIG_BYTES} bytes", "refused by name"),
    ("`model.safetensors.index.json`", f"{MAX_CHECKPOINT_INDEX_BYTES} bytes", "refused by name"),
    ("Weights and KV cache of a worker", "the machine's memory", "refused before a tensor is read"),
    ("Ranks of one worker (`--parallel`)", f"{MAX_PARALLEL_RANKS}", "refused by name"),
    ("Threads of one worker (`--threads`)", f"{MAX_THREADS}", "refused by name"),
    (
        "Sequences / rows of one step (`--max-batch`, `--step-tokens`)",
        f"{MAX_BATCH} / {MAX_STEP_TOKENS}",
        "refused by name",
    ),
    (
        "Prompts whose draft features are on their way, at each end",
        f"{MAX_PROMPT_FEATURES}",
        "the request begins without drafts",
    ),
)
