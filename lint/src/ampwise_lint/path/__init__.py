"""One path through the code: which way it goes, where it stands, what happened on it."""
