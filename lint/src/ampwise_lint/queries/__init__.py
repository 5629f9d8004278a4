"""Questions several rules ask of a file."""
