"""Where and why a precision fails, and what mends it: observe, explain, remedy."""
