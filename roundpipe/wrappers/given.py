"""Microbatches that the user has made, such as the batches of an accumulation, which differ in length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from roundpipe.core.errors import ConfigError
from roundpipe.runtime.config import RoundPipeRunConfig

GivenMicrobatches = list[tuple[tuple[Any, ...], dict[str, Any]]]


def given_microbatches(
    args: Any, kwargs: Sequence[dict[str, Any]], label: Any, options: RoundPipeRunConfig
) -> tuple[GivenMicrobatches, list[Any], RoundPipeRunConfig]:
    """Arguments and labels by microbatch, and the options that split nothing.

    Raises:
        ConfigError: the lists are not of one length, or empty.
    """
    number = len(kwargs)
    for name, given in (("input_args", args or None), ("label", label)):
        if given is not None and (not isinstance(given, list | tuple) or len(given) != number):
            what = f"{len(given)} items" if isinstance(given, list | tuple) else type(given).__name__
            raise ConfigError(
                f"input_kwargs is a list of {number} microbatches, and {name} is {what}; give a list of {number}"
            )
    if not number:
        raise ConfigError("input_kwargs is an empty list; give one dict per microbatch")
    all_args, all_kwargs = [tuple(each) for each in args or [()] * number], list(kwargs)
    labels = [None] * number if label is None else list(label)
    options = replace(
        options,
        num_microbatch=number,
        split_input=lambda *_: (all_args, all_kwargs),
        split_label=lambda *_: labels,
    )
    return list(zip(all_args, all_kwargs, strict=True)), labels, options
