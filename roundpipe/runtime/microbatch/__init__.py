"""A batch of arguments in microbatches, and their outputs as one again.

May use: config, device (its events).
Start reading: `split`.
"""
