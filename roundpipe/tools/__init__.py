"""The command line and what stands behind it: explain, forecast, comparison, diagnosis of the machine.

May use: everything below.
Start reading: `command_line`.
"""
