"""What a user holds: `RoundPipe`, `AutoRoundPipe`, reports of a run, checkpoints.

A wrapper has a `Session` (workers, weights, the optimizer's side) and a runner of its calls: a `ChainRunner` for a
model in layers, a `HostRunner` for one whose own forward runs on the host, around parts on the devices.

May use: fx and runtime, and what is below them.
Start reading: `pipe`, then `session` and `calls`; for models in parts `auto`, then `parts`.
"""
