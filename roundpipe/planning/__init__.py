"""Costs to plans: which layers make a stage, what a plan will take, schedules to compare with.

May use: reports, core. Knows no device and no module.
Start reading: `planner`.
"""
