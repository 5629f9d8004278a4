"""What names can stand for, and what can happen, as far as the source says."""
