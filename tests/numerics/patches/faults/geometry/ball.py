"""The Poincaré ball of curvature -1."""

import torch

MAX_NORM = 1 - 1e-5


def project(x):
    norm = x.norm(dim=-1, keepdim=True).clamp_min(1e-15)
    return torch.where(norm > MAX_NORM, x / norm * MAX_NORM, x)


def from_tangent(u):
    norm = u.norm(dim=-1, keepdim=True).clamp_min(1e-5)
    return project(torch.tanh(norm) * u / norm)


def depth(x):
    norm = x.norm(dim=-1).clamp(max=MAX_NORM)  # <-
    return 2 * torch.atanh(norm)
