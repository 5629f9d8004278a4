"""Evaluates code over abstract values, and follows calls and imports of the project."""
