"""What a user holds: `RoundPipe`, `AutoRoundPipe`, reports of a run, checkpoints.

May use: fx and runtime, and what is below them.
Start reading: `pipe`.
"""
