"""Everything that talks to `torch.distributed`: who is there, what is summed, who differs."""
