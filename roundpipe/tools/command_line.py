"""The command line: ``python -m roundpipe plan | explain | doctor``.

A command is a module with a `Command`: its name, a function that adds its options, and one that runs it. To add one,
write such a module and name it in `COMMANDS`. This is the only file of the package that prints.

Invariant: exit code 0 for an answer, 1 for the answer that it doesn't fit or can't be cut, 2 with one line for
arguments that can't be used. With ``--json``, codes 0 and 1 come with JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import NoReturn

from roundpipe.core.errors import DeviceMemoryError, RoundPipeError
from roundpipe.tools import doctor, explain_command, plan_command
from roundpipe.tools.arguments import Command

COMMANDS: tuple[Command, ...] = (plan_command.COMMAND, explain_command.COMMAND, doctor.COMMAND)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (--help shows the options)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line, None: that of the process; returns the exit code."""
    parser = _Parser(prog="python -m roundpipe", description="Plan training runs, look into models and the machine.")
    parsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        added = parsers.add_parser(
            command.name, help=command.summary, description=command.description, epilog=command.epilog
        )
        added.add_argument("--json", action="store_true", help="print JSON")
        command.add_options(added)
        added.set_defaults(run=command.run)
    options = parser.parse_args(argv)
    try:
        answer = options.run(options)
    except RoundPipeError as error:
        message = " ".join(str(error).split())
        if isinstance(error, DeviceMemoryError) and options.json:
            print(json.dumps({"error": message}))
        print(f"{parser.prog} {options.command}: error: {message}", file=sys.stderr)
        return 1 if isinstance(error, DeviceMemoryError) else 2
    print(answer.output if isinstance(answer.output, str) else json.dumps(answer.output))
    return answer.exit_code
