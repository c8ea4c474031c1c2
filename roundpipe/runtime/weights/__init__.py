"""Weights: on the host, on devices, as the optimizer's copies, and who may touch them when.

May use: core, effects (`uses`), board, device.
Start reading: `layer_weights` and `host_weights` (the host's side), then `replica` and `residency` (the devices' side),
`master_weights` (the optimizer's) and `twins` (where weights live on a device).
"""
