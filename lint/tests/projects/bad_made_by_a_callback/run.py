# The loop is another file's, and what it trains is made by functions it is handed.
import torch
from base import fit
from data import load
from losses import BothLosses
from torch import nn


def make_loader(config):
    return load(config)


def initialize(config):
    model = nn.Linear(64, 64).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=config["rate"])  # expect: AMP305
    return model, optimizer, BothLosses()


def training(config):
    return fit(config, make_loader, initialize)
