"""Devices behind one protocol: accelerators, CPU workers, host memory and its pinning.

May use: core.
Start reading: `backend`, the protocol.
"""
