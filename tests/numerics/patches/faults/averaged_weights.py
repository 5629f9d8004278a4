"""A teacher that follows its student more slowly than bfloat16 can move."""

import copy

import torch
from torch import nn

from ampwise import Task
from faulty import data

PRECISION = "bf16"


def pair():
    student = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    teacher = copy.deepcopy(student).to(torch.bfloat16).requires_grad_(False)
    return {"student": student, "teacher": teacher}


@torch.no_grad()
def follow(teacher, student, rate=0.002):
    for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
        slow.lerp_(fast.to(slow.dtype), rate)  # <- here


def distil(step, batch):
    student, teacher = step.model["student"], step.model["teacher"]
    with step.autocast():
        loss = (student(batch).float() - teacher(batch).float() - 1).pow(2).mean()
    step.backward(loss)
    step.update()
    follow(teacher, student)
    return loss


def task():
    batch = data(16, 8)
    return Task(
        model=pair,
        batches=lambda: [batch] * 12,
        loss=None,
        iteration=distil,
        optimizer=lambda m: torch.optim.Adam(m["student"].parameters()),
    )
