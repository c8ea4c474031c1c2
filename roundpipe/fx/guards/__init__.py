"""When a trace serves a call: what was assumed while tracing, checked for other arguments.

May use: the graph and fakes below; effects.
Start reading: `guards` (all that one trace assumed), then `model_guard` and `values`.
"""
