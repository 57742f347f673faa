"""`python -m models.train`: makes the shipped model and its EAGLE-3 head from a seed alone.

Stages, in order: tokenizer, base, export, eagle, export-eagle, evaluate. Each stage continues from its
checkpoint in the run directory; a complete stage takes seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from libs.text.chat_template import render_chat
from libs.text.tokenizer import Tokenizer
from models.bpe import train_tokenizer
from models.evaluate import evaluate
from models.helpdesk.dialogues import generate_dialogues
from models.networks.copy_circuit import write_copy_circuit
from models.networks.export import load_network, write_head, write_model
from models.networks.network import Network
from models.settings import BASE_DIR, EAGLE_DIR, RUN_DIR, TrainingSettings, quick_settings
from models.training.base_train import train_base
from models.training.eagle_train import make_head, train_eagle
from models.training.run_state import load_run, without_prefix

STAGES = ("tokenizer", "base", "export", "eagle", "export-eagle", "evaluate")


def make_tokenizer(settings: TrainingSettings, model_dir: Path) -> Tokenizer:
    """Train the vocabulary on generated dialogues, as rendered by the chat template, and write it."""
    texts = [
        segment.text
        for dialogue in generate_dialogues(settings.seed, settings.tokenizer.dialogues)
        for segment in render_chat(dialogue.messages, dialogue.tools, add_generation_prompt=False)
        if not segment.control
    ]
    sizes = settings.tokenizer
    train_tokenizer(texts, model_dir, vocab_size=sizes.vocab_size, led_words=sizes.led_words)
    return Tokenizer.from_dir(model_dir)


def make_network(settings: TrainingSettings) -> Network:
    """A new network, which depends only on the seed."""
    torch.manual_seed(settings.seed)
    network = Network(settings.base.architecture)
    write_copy_circuit(network)
    return network


def run_stage(stage: str, settings: TrainingSettings, run_dir: Path, base_dir: Path, eagle_dir: Path) -> None:
    """Run one stage and print its progress."""
    if stage == "tokenizer":
        make_tokenizer(settings, base_dir)
        return
    tokenizer = Tokenizer.from_dir(base_dir)
    if stage == "base":
        network = make_network(settings)
        train_base(network, tokenizer, settings.base, settings.seed, run_dir / "base.safetensors", log)
    elif stage == "export":
        network = make_network(settings)
        saved = load_run(run_dir / "base.safetensors")
        network.load_state_dict(without_prefix("network.", saved))
        write_model(network, tokenizer, base_dir)
    elif stage == "eagle":
        target = load_network(base_dir)
        train_eagle(target, tokenizer, settings.eagle, settings.seed, run_dir / "eagle.safetensors", log)
    elif stage == "export-eagle":
        head = make_head(load_network(base_dir), settings.eagle, settings.seed)
        saved = load_run(run_dir / "eagle.safetensors")
        head.load_state_dict(without_prefix("head.", saved))
        write_head(head, tokenizer, eagle_dir)
    elif stage == "evaluate":
        report = evaluate(base_dir, eagle_dir, dialogues=settings.evaluation_dialogues)
        log(json.dumps(report.as_dict()))


def log(line: str) -> None:
    """Print one line of progress with the time of day."""
    print(time.strftime("%H:%M:%S"), line, flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m models.train", description=__doc__)
    parser.add_argument("--stage", action="append", choices=STAGES, help="only this stage (may be repeated)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: every stage in a few minutes")
    parser.add_argument("--run-dir", type=Path, default=RUN_DIR, help="checkpoints (default: %(default)s)")
    parser.add_argument("--base-dir", type=Path, default=BASE_DIR, help="model (default: %(default)s)")
    parser.add_argument("--eagle-dir", type=Path, default=EAGLE_DIR, help="head (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1), help="CPU threads")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    settings = quick_settings() if options.quick else TrainingSettings()
    for stage in options.stage or STAGES:
        log(f"stage {stage}")
        run_stage(stage, settings, options.run_dir, options.base_dir, options.eagle_dir)


if __name__ == "__main__":
    main()
