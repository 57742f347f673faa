"""Every size, seed and step count of the training, in one place."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from models.networks.architecture import Architecture

MODELS_DIR = Path(__file__).resolve().parent
BASE_DIR = MODELS_DIR / "slipstream-mini"
EAGLE_DIR = MODELS_DIR / "slipstream-mini-eagle3"
RUN_DIR = MODELS_DIR.parent / ".cache" / "train"

TRAIN_SEED = 1
HELD_OUT_SEED = 2_000_003
"""Dialogues of this seed are never trained on; the evaluation and the benchmarks use them."""


@dataclass(frozen=True, slots=True)
class TokenizerSettings:
    """Vocabulary: base ranks plus 256 special ids."""

    vocab_size: int = 1536
    dialogues: int = 3000
    # The most words with a token that includes the space or mark before them.
    led_words: int = 240


@dataclass(frozen=True, slots=True)
class BaseSettings:
    """Language model. A step is one batch of about `step_tokens` (padded) or one long dialogue."""

    architecture: Architecture
    steps: int = 1400
    warmup_steps: int = 40
    decay_steps: int = 1000
    # The learning rate stays full before this step.
    decay_from_step: int = 450
    step_tokens: int = 4096
    # One step in this many is a dialogue near the full context length.
    long_every: int = 10
    long_max_tokens: int = 8192
    # From this step on the routed experts are rounded to INT4.
    quantize_from_step: int = 300
    context_loss_weight: float = 0.05
    muon_lr: float = 0.02
    muon_momentum: float = 0.95
    adam_lr: float = 0.003
    adam_betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.01
    # The learning-rate factor of the copy circuit, and the higher one once the formats are learnt.
    circuit_lr_factor: float = 0.05
    freer_from_step: int = 350
    freer_lr_factor: float = 0.25
    # How far a step of the aux-loss-free balance moves a bias against its expert's load.
    balance_rate: float = 0.01
    validate_every: int = 100
    validation_dialogues: int = 64
    checkpoint_every: int = 50


@dataclass(frozen=True, slots=True)
class EagleSettings:
    """EAGLE-3 head: sizes, and the unrolled training."""

    output_layer_ids: tuple[int, int, int] = (0, 2, 3)
    num_attention_heads: int = 4
    head_dim: int = 64
    intermediate_size: int = 768
    rope_theta: float = 1000000.0
    unroll_steps: int = 4
    # The weight of unrolled step s is this to the power s.
    step_decay: float = 0.8
    steps: int = 300
    warmup_steps: int = 20
    decay_steps: int = 120
    step_dialogues: int = 6
    # The tokens of a sequence that the drafter keeps, in training too.
    window_tokens: int = 512
    # The first of the head's dialogues in the endless training sequence, in chunks of 64.
    first_chunk: int = 1000
    validation_dialogues: int = 24
    muon_lr: float = 0.015
    muon_momentum: float = 0.95
    adam_lr: float = 0.002
    adam_betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.01
    validate_every: int = 100
    checkpoint_every: int = 50


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """The whole run."""

    seed: int = TRAIN_SEED
    tokenizer: TokenizerSettings = field(default_factory=TokenizerSettings)
    base: BaseSettings = field(default_factory=lambda: BaseSettings(Architecture(vocab_size=1536)))
    eagle: EagleSettings = field(default_factory=EagleSettings)
    evaluation_dialogues: int = 500


def quick_settings() -> TrainingSettings:
    """A run of a few minutes that exercises every stage. Its model is useless."""
    architecture = Architecture(
        vocab_size=1024,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        q_lora_rank=32,
        kv_lora_rank=48,
        qk_nope_head_dim=16,
        v_head_dim=24,
        intermediate_size=256,
        moe_intermediate_size=32,
    )
    base = BaseSettings(
        architecture=architecture,
        steps=40,
        warmup_steps=5,
        decay_steps=10,
        decay_from_step=0,
        step_tokens=2048,
        long_every=20,
        long_max_tokens=1024,
        quantize_from_step=20,
        validate_every=20,
        validation_dialogues=8,
        checkpoint_every=20,
    )
    eagle = EagleSettings(
        num_attention_heads=2,
        intermediate_size=128,
        steps=20,
        warmup_steps=5,
        decay_steps=10,
        step_dialogues=2,
        validation_dialogues=4,
        validate_every=10,
        checkpoint_every=10,
    )
    tokenizer = TokenizerSettings(vocab_size=1024, dialogues=300, led_words=100)
    return TrainingSettings(tokenizer=tokenizer, base=base, eagle=eagle, evaluation_dialogues=6)


def step_lr_scale(
    step: int, *, steps: int, warmup_steps: int, decay_steps: int, decay_from_step: int = 0
) -> float:
    """The share of the full learning rate at `step`: warm-up, a plateau, then linear decay to 0.

    The line of the decay begins `decay_steps` before the end, but the rate is full before `decay_from_step`.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if step < decay_from_step:
        return 1.0
    left = steps - step
    return min(1.0, left / decay_steps)
