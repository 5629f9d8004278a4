import torch

class Trainer:
    def __init__(self, opt):
        self.opt = opt

    def set_loader(self, loader):
        self.loader = loader

    def set_model(self, net):
        self.net = net
        self.optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)  # expect: AMP305
        self.scaler = torch.amp.GradScaler("cuda")
        self.decay = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.999)

    def fit(self):
        for x, y in self.loader:
            with torch.autocast("cuda"):
                loss = self.net(x, y)
            self.optimizer.zero_grad()
            self.scaler.scale(loss).backward()
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)  # expect: AMP101
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.decay.step()  # expect: AMP112
