"""Why it broke: a file for each cause, which tells it from others and proposes what may mend it."""
