"""The smallest set of modules that must stay in float32, and the fastest policy that holds."""
