"""Devices behind one base class: accelerators, CPU workers, host memory and its pinning.

May use: core, planning (`stage_costs`).
Start reading: `backend`, what the runtime asks of a device.
"""
