"""Microbatches that the user has made, such as the batches of an accumulation, which differ in length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from roundpipe.core.errors import ConfigError
from roundpipe.runtime.config import RoundPipeRunConfig
from roundpipe.runtime.microbatch.pieces import BatchPieces

GivenMicrobatches = list[tuple[tuple[Any, ...], dict[str, Any]]]


def given_microbatches(
    args: Any, kwargs: Sequence[dict[str, Any]], label: Any, options: RoundPipeRunConfig
) -> tuple[GivenMicrobatches, list[Any], RoundPipeRunConfig]:
    """Arguments and labels by microbatch, and the options that split nothing.

    Raises:
        ConfigError: the lists are not of one length, or empty.
    """
    number = len(kwargs)
    for name, given in (("input_args", None if isinstance(args, tuple) and not args else args), ("label", label)):
        if given is not None and (not isinstance(given, list | tuple) or len(given) != number):
            what = f"{len(given)} items" if isinstance(given, list | tuple) else type(given).__name__
            raise ConfigError(
                f"input_kwargs is a list of {number} microbatches, and {name} is {what}; give a list of {number}"
            )
    kinds = [type(each).__name__ for each in kwargs if not isinstance(each, dict)]
    if kinds or not number:
        what = f"a list with {kinds[0]}" if kinds else "an empty list"
        raise ConfigError(f"input_kwargs is {what}; give a dict of keyword arguments, or a list of them, one each")
    all_args, all_kwargs = (
        [tuple(each) for each in args or [()] * number],
        kwargs if isinstance(kwargs, BatchPieces) else list(kwargs),
    )
    labels = [None] * number if label is None else list(label)
    options = replace(
        options,
        num_microbatch=number,
        split_input=lambda *_: (all_args, all_kwargs),
        split_label=lambda *_: labels,
    )
    return list(zip(all_args, all_kwargs, strict=True)), labels, options
