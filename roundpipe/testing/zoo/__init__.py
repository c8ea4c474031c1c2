"""Tiny models of other packages, compiled and compared with eager PyTorch; ``python -m roundpipe.testing.zoo``."""
