"""``doctor``: what this machine offers, from `roundpipe.tools.doctor`."""

from __future__ import annotations

import argparse
import dataclasses

from roundpipe.tools.arguments import Answer, Command
from roundpipe.tools.doctor import diagnose, diagnosis_text


def run(options: argparse.Namespace) -> Answer:
    """The answer of ``doctor``."""
    diagnosis = diagnose()
    return Answer(dataclasses.asdict(diagnosis) if options.json else diagnosis_text(diagnosis))


COMMAND = Command(
    name="doctor",
    summary="what this machine offers: versions, devices, memory, copies",
    description="Versions, devices, memory, whether memory can be pinned, and how fast copies are.",
    add_options=lambda parser: None,
    run=run,
)
