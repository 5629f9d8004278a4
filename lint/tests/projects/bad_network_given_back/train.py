import torch
from amp import AmpOptimizer
from settings import Settings
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from trainer import Trainer


def main():
    args = Settings().parse_args(known_only=True)
    loader, val_loader = args.loaders()
    network = args.compile_model(nn.Linear(64, 16).cuda(), args.fast)
    wrapped = DistributedDataParallel(network, device_ids=[0])
    adam = torch.optim.AdamW(network.parameters(), fused=True)
    trainer = Trainer(wrapped, network, AmpOptimizer(adam, list(network.parameters())))
    for _ in range(args.epochs):
        trainer.fit(loader)
        print(trainer.evaluate(val_loader))


if __name__ == "__main__":
    main()
