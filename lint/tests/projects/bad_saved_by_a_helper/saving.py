"""Writes what it is given."""

import torch


def save_checkpoint(state, path):
    torch.save(state, path)
