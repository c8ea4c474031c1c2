"""A batch of arguments in microbatches, and their outputs as one again.

May use: core, config, device (its events).
Start reading: `split`.
"""
