"""Loaders, all of which pin memory."""

from torch.utils.data import DataLoader


def loaders(dataset, held_out):
    train = DataLoader(dataset, batch_size=8, num_workers=8, pin_memory=True)
    return train, DataLoader(held_out, batch_size=8, num_workers=8, pin_memory=True)
