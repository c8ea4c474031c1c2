"""The compiler: a model's Python code to a graph, its costs, its cuts, its generated layers.

May use: effects, core; never runtime, which runs what is generated here.
Start reading: `source`, which answers each call with a chain of layers.
"""
