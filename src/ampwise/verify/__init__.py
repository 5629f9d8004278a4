"""Every requirement of mixed precision on a task, checked by running it."""
