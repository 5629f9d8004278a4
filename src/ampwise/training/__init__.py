"""The training loop around a step: epochs, evaluation, checkpoints, resume."""
