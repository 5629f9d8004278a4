import torch
from tap import Tap


class Settings(Tap):
    epochs: int = 10
    fast: bool = False

    def compile_model(self, model, fast):
        return torch.compile(model) if fast else model
