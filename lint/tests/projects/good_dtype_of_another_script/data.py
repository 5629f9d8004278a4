import torch


def decoded(frames):
    """The frames are stored in half precision, and computed with in float32."""
    return torch.frombuffer(frames, dtype=torch.float16).float()
