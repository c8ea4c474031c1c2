"""The graph of a traced model: its form, its grammar, how data flows through it, how it is run and printed.

May use: sizes, operations, core.
Start reading: `traced`, then `nodes`.
"""
