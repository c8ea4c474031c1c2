"""When a trace serves a call: what was assumed while tracing, checked for other arguments.

May use: the graph and fakes below; effects.
Start reading: `guards`.
"""
