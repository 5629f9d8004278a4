"""Puts a checkpoint together from what it is given."""

import torch


def save_checkpoint(network, optimizer, rate, epoch, path):
    state = {"network": network.state_dict(), "rate": rate, "epoch": epoch}
    state["optimizer"] = optimizer.state_dict()
    torch.save(state, path)


def save_states(network, optimizer, path):
    torch.save({"network": network, "optimizer": optimizer}, path)
