import torch
from data import loader
from torch import nn
from trainer import Trainer

model = nn.Linear(8, 2)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
trainer = Trainer(model, optimizer, loader)
for epoch in range(90):
    trainer.train()
    trainer.save("last.pt")
