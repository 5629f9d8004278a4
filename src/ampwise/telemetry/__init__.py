"""What happened in training: on the device, in the run folder, by name."""
