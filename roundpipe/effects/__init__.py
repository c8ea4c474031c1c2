"""What running a user's code does beside returning a value: state that it changes, reads and asks for.

    snapshot             what modules and their code held at one moment: what changed since, and the way back
    reach, places        where Python code can keep something, and how each such place is read and put back
    uses                 what code reads, sets and may look up, told without running it
    run_once             which modules must run once, on the host

May use: core.
Start reading: `snapshot`.
"""
