"""Speed and memory of every precision, side by side, and what to conclude."""
