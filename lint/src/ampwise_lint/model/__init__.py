"""What the training loops of a module do: values, events and the paths through the code."""
