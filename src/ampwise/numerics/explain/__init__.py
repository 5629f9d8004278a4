"""Why it broke: a cause, in a file each or with its family."""
