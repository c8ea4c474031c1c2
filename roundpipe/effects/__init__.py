"""What running a user's code does beside returning a value: state that it changes, reads and asks for.

May use: core.
Start reading: `python_state`.
"""
