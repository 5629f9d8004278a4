"""What a replay of a step shows: operations, values, errors, and where they come from."""
