"""``ampwise lint``: mixed-precision mistakes in training code, found without running it.

    files -> source -> project (modules, imports) -> model (values, events on each path)
          -> rules (one file each) -> findings -> edits

`model` interprets the code over abstract values and writes down, for each path through a training
loop, what happens in which order: `model.events`. Rules read those events. Nothing in this package
imports torch or executes what it reads.
"""

__version__ = "0.1.0"
