"""The command line and what stands behind it: explain, forecast, comparison, diagnosis of the machine.

    command_line                          main, and the table of commands
    plan_command, explain_command, ...    one module per command: its options, and how it is run

May use: everything below.
Start reading: `command_line`.
"""
