"""Every option of the command line with texts that it can't take: one line that names it, and exit code 2."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from roundpipe.tools import command_line as cli

NO_NUMBER = ("", "x", "nan", "inf", "-1", "0", "1e400", "9" * 400, "9" * 5000, "None", "1,5", "--")
NO_PATH = ("", "no/such/folder/file.json", "x" * 5000, "--")
WRONG = {
    "count": (*NO_NUMBER, "1.5"),
    "quantity": (*NO_NUMBER, "GiB", "1e-300", "5 apples", "24"),
    "share": (*NO_NUMBER, "2", "1.0001"),
    "choice": ("", "x", "None", "--", "x" * 5000),
    "--costs": NO_PATH,
    "plan --machine": NO_PATH,
    "doctor --machine": ("", ".", "x" * 5000, "--"),
    "--timeline": (*NO_PATH, "run.txt", "."),
    "--graph": (*NO_PATH, "graph.txt", "."),
    "--sweep": ("", "x", "batch,,lora", "--"),
    "--device-profile": ("", "x", "x" * 5000, "--"),
    "target": ("", "x", "no/such/folder", "x" * 5000),
}
"""By kind of option, or by name: texts that are refused."""

OTHERS = {
    ("plan", ""): ("torch.nn:Identity",),
    ("plan", "--costs"): (),
    ("explain", ""): ("torch.nn:Identity",),
    ("doctor", ""): ("--bench",),
}
"""By command, and by option where that matters: what else is given."""


def options_of(command: str) -> list[argparse.Action]:
    parser = argparse.ArgumentParser()
    cli.COMMANDS[command].add_options(parser)
    # argparse lists its options nowhere else
    return [each for each in parser._actions if not isinstance(each, argparse._StoreTrueAction | argparse._HelpAction)]


def wrong_texts(command: str, option: argparse.Action) -> tuple[str, ...]:
    """A new option of a kind that is not there yet has to be named in `WRONG`."""
    kind = "choice" if option.choices else getattr(option.type, "__qualname__", "").partition(".")[0]
    named = [kind, f"{command} {_name(option)}", _name(option)]
    return next(WRONG[name] for name in named if name in WRONG)


def _name(option: argparse.Action) -> str:
    return option.option_strings[0] if option.option_strings else option.dest


CASES = [(command, option) for command in cli.COMMANDS for option in options_of(command)]


@pytest.mark.parametrize(("command", "option"), CASES, ids=[f"{command} {_name(one)}" for command, one in CASES])
def test_an_option_of_the_command_line(
    command: str,
    option: argparse.Action,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    name, wrong = _name(option), []
    for text in wrong_texts(command, option):
        arguments = (
            [text] if name == "target" else [f"{name}={text}", *OTHERS.get((command, name), OTHERS[command, ""])]
        )
        try:
            code = cli.main([command, *arguments])
        except SystemExit as exit:
            code = int(exit.code or 0)
        printed = capsys.readouterr()
        is_named = re.search(rf"{option.metavar if name == 'target' else name}\b", printed.err)
        if (code, printed.out, printed.err.count("\n")) != (2, "", 1) or not is_named:
            wrong.append(f"{text[:20]!r}: {code}, {printed.out[:100]!r}, {printed.err[-300:]!r}")
    assert not wrong, "\n".join(wrong)
