"""Training loops of model and draft head: batches, optimizer, parallel gradients, checkpoints of a run."""
