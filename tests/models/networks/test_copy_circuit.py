"""The initial weights already copy; plain random weights do not."""

from __future__ import annotations

from pathlib import Path

import torch

from libs.text.tokenizer import Tokenizer
from models.networks.copy_circuit import write_copy_circuit
from models.networks.network import Network
from models.settings import TrainingSettings
from tests.models.networks.copy_drills import drill_batch

TOKENIZER = Path(__file__).parents[3] / "models" / "slipstream-mini"


@torch.no_grad()
def _copied_share(network: Network) -> float:
    batch = drill_batch(Tokenizer.from_dir(TOKENIZER), 1, 1, rows=4, row_tokens=128)
    best = network.logits(network(batch.token_ids).hidden[:, :-1]).argmax(-1)
    return float((best == batch.token_ids[:, 1:])[batch.generated[:, 1:]].float().mean())


def test_initial_weights_copy_before_training() -> None:
    torch.manual_seed(3)
    network = Network(TrainingSettings().base.architecture).eval()
    assert _copied_share(network) < 0.05
    write_copy_circuit(network)
    assert _copied_share(network) > 0.7
