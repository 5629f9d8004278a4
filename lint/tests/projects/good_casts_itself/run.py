import networks
import torch
from traintest import test, train

network, data = networks.Net(), torch.load("data.pt")
train(network, data, torch.nn.functional.cross_entropy)
test(network, data)
