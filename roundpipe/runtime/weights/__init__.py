"""Weights: on the host, on devices, as the optimizer's copies, and who may touch them when.

May use: device.
Start reading: `host_weights`.
"""
