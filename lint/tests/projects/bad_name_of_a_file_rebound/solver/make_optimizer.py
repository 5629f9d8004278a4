import torch


def make_optimizer(name, network):
    if name == "SGD":
        return getattr(torch.optim, name)(network.parameters(), lr=0.1, momentum=0.9, fused=True)
    return torch.optim.AdamW(network.parameters(), lr=1e-3, fused=True)
