"""What torch does, as far as a rule may ask.

A function is a row of `functions.NAMES`, one of Python's own a row of `python_functions.FUNCTIONS`;
what a row leads to is in `precision`, `training` or `layers`, by what it is about.
A method is a case of its kind of value in `methods`, which leads to `networks`, `steps` (scalers,
optimizers, wrappers) and `tensor_methods`; `casts` makes things half. What autocast does to an
operation is said by the sets of `source.library`, and how results follow from inputs by `tensors`.
"""
