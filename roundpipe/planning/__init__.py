"""Costs of layers to plans: which layers make a stage, and what a plan will take.

    planner           chooses: by `search` among `candidates`, or by the simplest method
    stage_costs       what stages and plans take by the recurrence (`step_times`): seconds, device memory
    simulator         what plans take with links, host memory and the optimizer: `replay` on a `machine`
    static_schedules  GPipe and 1F1B, for comparison

May use: reports, core. Knows no device and no module.
Start reading: `planner`, then `stage_costs`.
"""
