"""Somebody's training script under observation: what its precision did, unchanged.

`script` runs it, `patches` puts what listens into torch and takes it out again, `session` knows
which step is open. Each other file is one thing that is observed. `run` puts them together.
"""
