"""Puts a checkpoint together from what it is given."""

import torch


def save_checkpoint(network, optimizer, scaler, epoch, path):
    state = {"network": network.state_dict(), "scaler": scaler.state_dict(), "epoch": epoch}
    state["optimizer"] = optimizer.state_dict()
    torch.save(state, path)


def save_states(network, optimizer, scaler, path):
    torch.save({"network": network, "optimizer": optimizer, "scaler": scaler}, path)
