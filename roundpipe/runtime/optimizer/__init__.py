"""The optimizer's side: its thread, one step behind, and loss scaling.

May use: ranks, weights, profiling, device.
Start reading: `optimizer`.
"""
