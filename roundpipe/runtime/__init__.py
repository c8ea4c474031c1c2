"""Runs a chain of layers in rotation: devices, weights, workers, the optimizer.

May use: effects, planning, core; never fx, whose layers it runs.
Start reading: `engine`.
"""
