"""When a trace serves a call: what was assumed while tracing, checked for other arguments.

    guards        all that one trace assumed
    model_guard   the model: its modules, weights, attributes, and whatever Python its code reads
    values        data that the model's code read

May use: the graph and fakes below; effects.
Start reading: `guards`.
"""
