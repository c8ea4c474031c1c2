"""Runs a step: stages times microbatches, on the workers.

May use: everything else in runtime.
Start reading: `step` (what runs), `engine` (who waits), `worker` (who runs), `runner` (one task), `stage` (compute).
"""
