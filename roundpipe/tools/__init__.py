"""The command line and what stands behind it: explain, forecast, comparison, diagnosis of the machine.

    command_line     main, and the table of commands: their options, and how they are run

May use: everything below.
Start reading: `command_line`.
"""
