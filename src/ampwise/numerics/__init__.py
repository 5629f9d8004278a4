"""Where and why a precision fails, and what mends it: replay, origin, cause, fix, search."""
