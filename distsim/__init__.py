"""distsim: one torch.distributed program, run for real or simulated."""
