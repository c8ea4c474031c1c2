"""Runs a round of stages on the workers.

May use: everything else in runtime.
Start reading: `engine`, then `stage`.
"""
