"""The runtime: schedules, workers, devices, weights and the optimizer."""
