"""What everything else stands on: errors, trees of tensors, layers and their costs, schedules, balancing.

May use: torch and the standard library, nothing of the package above it.
Start reading: `layers` (the contract between compiler and runtime), then `schedule`.
"""
