"""Costs of layers to plans: which layers make a stage, and what a plan will take.

    planner           chooses: `search` (with `candidates` and `packing`), or the simplest method, `greedy`
    evaluation        what a plan takes by the recurrence of `stage_costs`: seconds, device memory
    simulator         what it takes with links, host memory and the optimizer: `replay` on `discrete_events`
    static_schedules  GPipe and 1F1B, for comparison

May use: reports, core. Knows no device and no module.
Start reading: `planner`, then `stage_costs`.
"""
