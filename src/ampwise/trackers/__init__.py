"""Experiment trackers, one a file, imported when started."""
