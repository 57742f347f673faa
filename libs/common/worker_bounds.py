"""Bounds of prefill, decode and drafter workers, for docs/bounds.md."""

from __future__ import annotations

# A checkpoint's config.json has a few KiB; the index of Kimi-K2.5 names 208,550 tensors in 23 MB.
MAX_CONFIG_BYTES = 4 << 20
MAX_CHECKPOINT_INDEX_BYTES = 256 << 20
MAX_TOKENIZER_FILE_BYTES = 64 << 20  # Kimi's tiktoken.model has 2.8 MB
# Processes of one worker on one machine.
MAX_PARALLEL_RANKS = 64
MAX_THREADS = 1024
# Sequences and rows of one step: their buffers are made at the start.
DEFAULT_BATCH = 64
MAX_BATCH = 65_536
MAX_STEP_TOKENS = 1 << 20
# Prompts whose draft features are on their way at once. A slot has 512 rows.
MAX_PROMPT_FEATURES = 64
# From here on a read of features by the KV transport costs no more processor time than a message has. Steps
# of other sequences wait 0.8 of the time (`bench.draft_rows`).
LEAST_EXPORTED_BYTES = 1 << 20
# Such pieces of one decode worker that are not answered, and how long each waits for its answer: longer than
# a read can take.
MAX_EXPORTED_PIECES = MAX_PROMPT_FEATURES // 2
EXPORTED_ROWS_S = 10.0
# Features that one message to a drafter is about: far below gRPC's bound of a message.
MAX_DRAFT_MESSAGE_BYTES = 16 << 20
# What SIGTERM gives running work by default. What a worker takes at most beside that: to leave discovery, to
# close everything (of that its model's step), to end its lease, to send its last metrics, to end its port's
# calls, for threads whose work is done, and to send its last spans.
DEFAULT_DRAIN_S = 5.0
LEAVE_S = 1.0
CLOSE_S = 7.0
MODEL_STOP_S = 5.0
REVOKE_S = 1.0
LAST_METRICS_S = 1.0
STOP_GRACE_S = 1.0
THREADS_S = 2.0
LAST_SPANS_S = 1.0
END_S = LEAVE_S + CLOSE_S + REVOKE_S + LAST_METRICS_S + STOP_GRACE_S + THREADS_S + LAST_SPANS_S
# `slipstream up` kills a process that has not ended so long after its drain.
KILL_MARGIN_S = 5.0
KILL_AFTER_S = END_S + KILL_MARGIN_S
HUNG_STATUS = 70  # of a process that was to end in order, and a part of which did not end
# The most that a drain, the wait after it, and the start of `slipstream up` may be given.
MAX_PROCESS_WAIT_S = 86_400.0

ROWS = (
    ("`config.json` of a model or a draft head", f"{MAX_CONFIG_BYTES} bytes", "refused"),
    ("`model.safetensors.index.json`", f"{MAX_CHECKPOINT_INDEX_BYTES} bytes", "refused"),
    ("Each file of the tokenizer, `generation_config.json`", f"{MAX_TOKENIZER_FILE_BYTES} bytes", "refused"),
    ("Weights and KV cache of a worker", "the machine's memory", "refused before a tensor is read"),
    ("Ranks of one worker (`--parallel`)", f"{MAX_PARALLEL_RANKS}", "refused"),
    ("Threads of one worker (`--threads`)", f"{MAX_THREADS}", "refused"),
    (
        "Sequences / rows of one step (`--max-batch`, `--step-tokens`)",
        f"{MAX_BATCH} / {MAX_STEP_TOKENS}",
        "refused",
    ),
    (
        "Prompts whose draft features are on their way",
        f"{MAX_PROMPT_FEATURES}",
        "the request begins without drafts",
    ),
    (
        "Draft features of a sequence in a message",
        f"{LEAST_EXPORTED_BYTES} bytes",
        "the drafter reads them by the KV transport",
    ),
    (
        "Draft features read from one decode worker / the time until the answer",
        f"{MAX_EXPORTED_PIECES} / {EXPORTED_ROWS_S:g} s",
        "others go in messages / no drafts from them",
    ),
    ("Draft features in one message", f"{MAX_DRAFT_MESSAGE_BYTES} bytes", "others wait"),
    (
        "End of a hanging worker after its drain (`--drain-s`)",
        f"{END_S:g} s",
        f"it ends with status {HUNG_STATUS}",
    ),
    ("End of a process of `slipstream up` after its drain (`--grace-s`)", f"{KILL_AFTER_S:g} s", "killed"),
    ("`--drain-s`, `--grace-s` and `--ready-timeout-s`", f"{MAX_PROCESS_WAIT_S:,.0f} s", "refused"),
)
