"""A fuzz of what users do between calls: random sequences of actions, compared with eager PyTorch."""
