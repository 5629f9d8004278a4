import torch

def each(func):
    def inner(v):
        if isinstance(v, (list, tuple)):
            return type(v)(inner(x) for x in v)
        if isinstance(v, dict):
            return {k: inner(x) for k, x in v.items()}
        return func(v)
    return inner

@each
def as_float(v):
    if isinstance(v, torch.Tensor):
        return v.detach().item()  # expect: AMP301
    return v
