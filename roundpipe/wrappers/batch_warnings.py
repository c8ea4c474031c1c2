"""Says, once per wrapper, where the pieces of a batch don't make up the whole: arguments whose dimension 0 is time,
models that mix samples, scalars that are averaged, tensors that are concatenated though their first dimension is not
that of the samples.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import nn

from roundpipe.core import trees
from roundpipe.core.caller import warn
from roundpipe.core.errors import OnlyWholeError, TraceCause
from roundpipe.core.layers import LayerChain, Mixing
from roundpipe.core.module_tree import puts_time_first
from roundpipe.effects.places import is_layer_of_torch
from roundpipe.fx.passes.sample_dependence import ONE_SAMPLE_ALONE
from roundpipe.fx.passes.sample_dimensions import NO_SAMPLES
from roundpipe.runtime.config import ResolvedConfig
from roundpipe.runtime.microbatch.lists import unclear_list, uncuttable_samples
from roundpipe.runtime.microbatch.merge import is_function
from roundpipe.runtime.microbatch.split import Split, batch_size
from roundpipe.wrappers.whole_warnings import warn_of_whole

MOST_READ = 3
"""Calls whose outputs on a device are looked at: each look waits for the device."""


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_Subject = Literal["buffers", "entries", "evaluation", "lists", "mixing", "rows", "scalars", "sizes"]
_CHANGES = "its forward changes what it computes with, and does so for each microbatch"
_WHY_WHOLE: dict[TraceCause | None, str] = {
    TraceCause.ACTIVATION_DATA: "its forward decides by an activation, and each microbatch decides by its own",
    TraceCause.ARGUMENT_DATA: "its forward does something else for each batch's data, and each microbatch has its own",
    TraceCause.AUTOGRAD: "its forward makes gradients, and each microbatch would make them of its own samples",
    TraceCause.BUFFER_CREATED: _CHANGES,
    TraceCause.BUFFER_DATA: _CHANGES,
    TraceCause.PARAMETER_REPLACED: _CHANGES,
    TraceCause.STATE: _CHANGES,
    TraceCause.WEIGHT_WRITTEN: _CHANGES,
}

_LEFT_IN: dict[TraceCause | None, tuple[str, str]] = {
    TraceCause.ACTIVATION_LEFT: ("its forward leaves an activation in an attribute", "the attribute has"),
    TraceCause.ACTIVATION_HOOKED: ("a forward hook keeps an activation", "what it keeps is"),
}
"""What of a forward's others may read, and where."""


_HOW_MIXED: dict[Mixing | None, str] = {
    "compares samples": "compares samples with each other, or with a statistic over them",
    "not linear": "has products or other functions of means over the batch, as the load balancing of experts has",
}
"""A scalar among the outputs."""


def _may_take_time_first(module: nn.Module) -> bool:
    return is_layer_of_torch(type(module)) and puts_time_first(module)


class BatchWarnings:
    """Looks at the calls of one model."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._has_warned_of: set[_Subject] = set()
        self._runs_whole = False
        """Whether the model could not run a piece of a batch, whatever its size."""
        self._too_few = 0
        """Samples of the largest piece that was too small to run."""
        self._most_cut = 0
        """Samples of the largest piece of a batch that was cut."""
        self._is_unclear = False
        """Whether nothing tells if the model's code mixes samples."""
        self._has_looked_at_norms = False
        self._num_read = 0
        """Calls whose scalars were read from a device."""

    def whole_if_unclear(self, config: ResolvedConfig, args: Any, kwargs: Any, label: Any = None) -> ResolvedConfig:
        """The config for a call, which by default cuts no list whose entries may be the samples."""
        is_whole = config.num_microbatch == 1 and not config.auto
        if is_whole or config.split_input is not None:
            return config
        if config.leaves_cut_open and (name := uncuttable_samples(args, kwargs, label)):
            self._warn_once(
                "lists",
                f"{name} is sparse or nested, and can't be cut. So the batch runs as one microbatch. If its rows are "
                "samples, give split_input or split_label a function that cuts it",
            )
            return config.in_one_piece()
        if (found := unclear_list(args, kwargs, label)) is None:
            return config
        how = "give split_input a function that cuts the list"
        tensors = f"{found.name} is a list of {found.length}, and nothing but it tells the number of samples"
        if config.leaves_cut_open:
            self._warn_once(
                "lists",
                f"{tensors}. They may be its entries, or lie along dimension 0 of each ({found.size}). So the batch is "
                f"not cut but runs as one microbatch. If dimension 0 counts the samples, give num_microbatch; if not, "
                f"{how}",
            )
            return config.in_one_piece()
        if found.has_fellow:
            self._warn_once(
                "lists",
                f"{tensors}. Each entry is cut along dimension 0 ({found.size}), although another list has as many "
                f"entries, as if they were the samples. Use num_microbatch=1, or {how}",
            )
        return config

    def whole_if_listed(self, config: ResolvedConfig, pieces: Split) -> bool:
        """Whether a batch by default runs whole since its pieces would get the same entries of lists; warns of it."""
        if not pieces.lists or pieces.num_microbatches == 1 or not config.leaves_cut_open:
            return False
        self._warn_once(
            "entries",
            f"{', '.join(pieces.lists)}: a list or array of as many entries as the batch has samples, which may be "
            "theirs, and only tensors are split. So the batch is not cut but runs as one microbatch. If the entries "
            "belong to the samples, give split_input or split_label a function that splits the list; if they don't, "
            "give num_microbatch",
        )
        return True

    def whole_if_odd(
        self, config: ResolvedConfig, pieces: Split, chains: Iterable[LayerChain], *, is_merged: bool
    ) -> bool:
        """Whether a batch by default runs whole since outputs of its pieces would not make up that of it; warns of it.

        That is where a list has an output for each sample, if outputs are merged; and where an argument seems to be a
        batch of another size, of which every piece would give all outputs.
        """
        is_given = config.merge_output is not None and config.merge_output is not True
        if pieces.num_microbatches == 1 or is_given or not config.leaves_cut_open:
            return False
        odd = {path: why for chain in chains for path, why in chain.odd_outputs.items()}
        single = [path for path, why in odd.items() if why == ONE_SAMPLE_ALONE and is_merged]
        if single:
            self._warn_once(
                "rows",
                f"output{trees.path_string(min(single, key=str))} is of one sample alone, as where a list has an "
                "output for each sample, and microbatches' lists are not joined. So the batch is not cut but runs as "
                "one microbatch; merge_output can say how they are merged, and num_microbatch cuts it",
            )
            return True
        without = [path for path, why in odd.items() if why == NO_SAMPLES]
        if without and pieces.others:
            self._warn_once(
                "sizes",
                f"{', '.join(pieces.others)} may be a batch of another size, of which every microbatch would get all "
                f"samples, and output{trees.path_string(without[0])} has not those of the first. So the batch is not "
                "cut but runs as one microbatch. If all samples share it, give num_microbatch; if not, split_input can "
                "say how it is split",
            )
            return True
        return False

    def in_one_piece(self, config: ResolvedConfig, chain: LayerChain | None) -> ResolvedConfig:
        """The config for a call, which cuts nothing where the pieces of a batch would not give what the whole does.

        That is where a module of the chain takes dimension 0 as time. Where the model mixes samples, or could not run
        a piece, a number of microbatches that somebody has given stays.
        """
        is_whole = config.num_microbatch == 1 and not config.auto
        if config.split_input is not None or is_whole:
            return config
        if self._runs_whole and config.leaves_cut_open:
            return config.in_one_piece()
        if chain is None:
            return config
        if who := chain.takes_samples_as_time:
            self._warn_once(
                "mixing",
                f"{who} takes dimension 0 of the batch as time, so that the batch is not cut there but "
                "runs as one microbatch. If the samples are in another dimension, say so: "
                "split_input=((TensorChunkSpec(1),), None), split_label and merge_output, or make the model with "
                "batch_first=True",
            )
        elif not chain.mixes_samples:
            if buffer := chain.changed_buffer:
                self._warn_once(
                    "buffers",
                    f"its forward changes the buffer {buffer}, and does so for each microbatch, as plain PyTorch does "
                    "where it accumulates gradients: unless that comes to the same, as a running maximum does, the "
                    "buffer ends with another value than after one batch. With num_microbatch=1 it does not",
                )
            return config
        else:
            self._warn_of_mixing(config, chain.mixes_samples)
            if config.is_number_given:
                return config
        return config.in_one_piece()

    def whole_if_small(self, config: ResolvedConfig, args: Any, kwargs: Any) -> ResolvedConfig:
        """The config for a call, which by default cuts no batch into pieces that are too small to run."""
        if self._too_few and config.leaves_cut_open and (size := batch_size(args, kwargs, config)) is not None:
            if size // min(config.num_microbatch, size) <= self._too_few:
                return config.in_one_piece()
        return config

    def _warn_of_mixing(self, config: ResolvedConfig, where: str) -> None:
        if config.is_number_given:
            text = (
                f"Each of the {config.num_microbatch} microbatches has only its own samples there, so that outputs, "
                "losses and gradients differ from those of the whole batch; with num_microbatch=1 they don't"
            )
        else:
            text = (
                "So the batch is not cut but runs as one microbatch. If each microbatch may be mixed by itself, as in "
                "a batch norm, give num_microbatch"
            )
        self._warn_once("mixing", f"the model mixes the samples of a batch: {where}. {text}")

    def whole_if_needed(
        self, config: ResolvedConfig, cause: TraceCause | None, *, has_loss: bool = False
    ) -> ResolvedConfig:
        """The config for a call of a model that runs in parts, which by default cuts no batch whose pieces differ.

        Args:
            cause: why the model can't be traced.
            has_loss: whether each microbatch has its loss, so that what it leaves in attributes is not for others.
        """
        is_whole = config.num_microbatch == 1 and not config.auto
        left = _LEFT_IN.get(cause)
        is_cut_by_data = cause is TraceCause.ARGUMENT_DATA and is_function(config.split_input)  # as it was in layers
        if is_whole or is_cut_by_data or left is not None and has_loss:
            return config
        given = not config.leaves_cut_open
        if left is not None:
            (words, place), given = left, given or not config.requires_grad
            is_cut = "that of the last microbatch alone; with num_microbatch=1 that of the batch"
            text = is_cut if given else "that of the batch, which is not cut in such calls; num_microbatch cuts it"
            self._warn_once(
                "mixing" if config.requires_grad else "evaluation",
                f"{words}. Behind a call without a loss_fn {place} {text}. "
                "forward_backward cuts batches in any case, and runs loss_fn for each microbatch with its own",
            )
        elif why := _WHY_WHOLE.get(cause):
            if given:
                text = ", so that outputs, losses and gradients may differ from those of the batch; with "
                text += "num_microbatch=1 they don't"
            else:
                text = ". So the batch is not cut but runs as one microbatch; num_microbatch cuts it"
            self._warn_once("mixing", f"{why}{text}")
        else:
            return config
        return config if given else config.in_one_piece()

    def whole_if_mixed(
        self, config: ResolvedConfig, find: Callable[[], str | None], model: nn.Module
    ) -> ResolvedConfig:
        """The same where its code mixes samples, which ``find`` tells in words, if it does; None: nothing tells.

        Then a batch is whole if some module may take dimension 0 as time; else `note_cut` warns.
        """
        if config.split_input is not None or config.num_microbatch == 1 and not config.auto:
            return config
        where, may_choose = find(), config.leaves_cut_open
        if where:
            self._warn_of_mixing(config, where)
            return config.in_one_piece() if may_choose else config
        if where is None and (who := next(filter(_may_take_time_first, model.modules()), None)) is not None:
            text = "The batch is cut along dimension 0 all the same; with num_microbatch=1 it is not"
            if may_choose:
                text = "So the batch is not cut but runs as one microbatch. If dimension 0 counts the samples, give "
                text += "num_microbatch"
            self._warn_once(
                "mixing",
                f"a {type(who).__name__} has batch_first=False, and nothing tells whether dimension 0 of the batch is "
                f"its time, since the forward can't be tried out. {text}",
            )
            return config.in_one_piece() if may_choose else config
        self._is_unclear = where is None and may_choose
        return config

    def run_whole(self, error: OnlyWholeError, sizes: Sequence[int] | None) -> None:
        """Have batches run in one piece from now on, since a piece has raised this, of so many samples each.

        Only those with pieces as small, if that may be why: it has one sample, or larger ones have run.
        """
        number, most = error.num_samples, max([self._most_cut, *(sizes or ())])
        if number is not None and (number == 1 or number < most):
            self._too_few = max(self._too_few, number)
            warn_of_whole(self._name, error, "", is_small=True)
            return
        self._runs_whole = True
        warn_of_whole(self._name, error, "If it can be cut in another way, split_input can say how", is_small=False)

    def look_at_norms(self, model: nn.Module, config: ResolvedConfig, number: int) -> None:
        """Before the first batch that is cut in training, into a number of pieces that nobody has given."""
        if self._has_looked_at_norms or number == 1 or not model.training or not config.leaves_cut_open:
            return
        self._has_looked_at_norms = True
        if any(isinstance(module, _BATCH_NORMS) and module.training for module in model.modules()):
            warn(
                f"{self._name}: its BatchNorm layers take their statistics over each of {number} microbatches, as "
                "where gradients are accumulated, and not over the batch. num_microbatch=1 takes them over the batch; "
                "a number that you give says that microbatches are meant"
            )

    def note_cut(self, sizes: Sequence[int] | None) -> None:
        """Take note that the pieces of a batch, of so many samples each, can run by themselves."""
        self._most_cut = max([self._most_cut, *(sizes or ())])
        if self._is_unclear:
            self._warn_once(
                "mixing",
                "nothing tells whether its code mixes the samples of a batch, as a mean over the batch does, since it "
                "can't be tried out. The batch is cut all the same. If it does, set num_microbatch=1; if it does not, "
                "give the number of microbatches, and this is not said",
            )

    def _warn_once(self, subject: _Subject, text: str) -> None:
        if subject not in self._has_warned_of:
            self._has_warned_of.add(subject)
            warn(f"{self._name}: {text}")

    def look(
        self,
        outputs: Sequence[Any],
        config: ResolvedConfig,
        known: Collection[trees.Path] = (),
        odd: Mapping[trees.Path, str] = MappingProxyType({}),
        mixing: Mapping[trees.Path, Mixing] = MappingProxyType({}),
        *,
        has_loss: bool = False,
    ) -> None:
        """Before the outputs of microbatches are merged.

        ``known`` are places of scalars that are made one rightly; ``odd`` tensors without rows, and why; ``mixing``
        scalars that mix samples, and how. Of a call that ``has_loss`` beside its outputs, means among these are
        nobody's loss.
        """
        if len(outputs) > 1 and (config.merge_output is True or config.merge_output is None):
            self._look_at_rows(outputs, odd)
            self._look_at_scalars(outputs, known, mixing, has_loss)

    def _look_at_rows(self, outputs: Sequence[Any], odd: Mapping[trees.Path, str]) -> None:
        if odd:
            places = [f"output{trees.path_string(path)} {why}" for path, why in odd.items()]
            more = f", and {len(places) - 3} more such" if len(places) > 3 else ""
            self._warn_once(
                "rows",
                f"{'; '.join(places[:3])}{more}. The pieces of the {len(outputs)} microbatches are "
                "concatenated along dimension 0 all the same, which is not what the whole batch gives: say by "
                "merge_output how they are merged, or use num_microbatch=1",
            )

    def _look_at_scalars(
        self,
        outputs: Sequence[Any],
        known: Collection[trees.Path],
        mixing: Mapping[trees.Path, Mixing],
        has_loss: bool,
    ) -> None:
        if "scalars" in self._has_warned_of:
            return
        scalars = {path: value for path, value in trees.walk(outputs[0]) if _is_scalar(value) and path not in known}
        if has_loss:
            scalars = {path: value for path, value in scalars.items() if not value.is_floating_point()}
        is_read = any(value.device.type != "cpu" for value in scalars.values())
        if is_read and self._num_read == MOST_READ:
            return
        self._num_read += is_read
        differing = [path for path in scalars if len({_number(each, path) for each in outputs}) > 1]
        if not differing:
            return
        self._has_warned_of.add("scalars")
        average = f"is the average over the {len(outputs)} microbatches"
        if (kind := mixing.get(differing[0])) in _HOW_MIXED:
            text = f"{_HOW_MIXED[kind]}, and {average}, which is not that of the whole batch: use num_microbatch=1"
        elif scalars[differing[0]].is_floating_point():
            text = (
                f"is a scalar, and nothing tells how it comes from the samples: it {average}. A loss over tokens with "
                "padding, or of microbatches of different sizes, differs from that of the whole batch: use "
                "forward_backward or forward_loss with (loss, number of targets), num_microbatch=1, or say by "
                "merge_output how it is merged"
            )
        else:
            text = (
                f"is a whole number or a truth value, and {average}, which is neither their sum nor whether all or any "
                "are true: say by merge_output how it is merged, or use num_microbatch=1"
            )
        warn(f"output{trees.path_string(differing[0])} of {self._name} {text}")


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.ndim and not value.is_complex() and not value.is_meta


def _number(output: Any, path: trees.Path) -> Any:
    value = dict(trees.walk(output)).get(path)
    return float(value.detach()) if isinstance(value, torch.Tensor) and not value.ndim else None
