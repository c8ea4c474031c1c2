"""One model and one call to a graph of modules and glue, by running the model's Python on fakes.

May use: guards, and the graph and fakes below.
Start reading: `tracer` (the loop), `decisions` (which modules stay whole, and what attempts find out), `attempt` (one
run), then `recorder` (torch functions) and `runner` (modules).
"""
