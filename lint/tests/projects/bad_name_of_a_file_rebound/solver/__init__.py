from .make_optimizer import make_optimizer
