import torch
from epoch import fit_epoch
from torch import nn

if __name__ == "__main__":
    fp16 = False
    model = nn.Linear(64, 16).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cuda") if fp16 else None
    for _ in range(10):
        fit_epoch(model, optimizer, [], [], fp16, scaler)
