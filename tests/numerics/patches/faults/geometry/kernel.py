"""Similarities of the rows of a matrix."""


def gram(x):
    return x @ x.transpose(-1, -2)  # <-
