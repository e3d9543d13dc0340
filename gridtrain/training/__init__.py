"""What a PyTorch training loop touches: optimizer wrapper, sampler, state transfer."""
