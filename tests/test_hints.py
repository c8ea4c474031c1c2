"""What a user who is nearly right is told: options in the wrong place, sizes as text, names and fields that show."""

import inspect
import pydoc
import re

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import Device, RoundPipeRunConfig
from roundpipe.core.caller import caller_name


@pytest.mark.parametrize(
    ("option", "advice"),
    [
        ("num_microbatch", "model_run_config=RoundPipeRunConfig(num_microbatch=...), or run_config="),
        ("loss_fn", "it is given as forward_backward(loss_fn=...)"),
        ("memory_bytes", "it is given as devices=[Device('cuda:0', memory_bytes=...)]"),
        ("is_async", "it is given as step(step_fn, is_async=...)"),
        ("device", "did you mean 'devices'?"),
        ("dtype", "there are "),
    ],
)
def test_an_option_in_the_wrong_place_gets_a_hint(option, advice):
    for function in (
        roundpipe.compile,
        roundpipe.wrap_model_to_roundpipe,
        roundpipe.RoundPipe,
        roundpipe.AutoRoundPipe,
    ):
        with pytest.raises(roundpipe.ConfigError, match=re.escape(advice)) as caught:
            function(nn.Linear(2, 2), **{option: 4})
        assert isinstance(caught.value, TypeError), "as Python's own is"


def test_options_of_calls_and_values_get_hints_too():
    with pytest.raises(TypeError, match="RoundPipeRunConfig has no option 'num_microbatches'; did you mean 'num_micro"):
        RoundPipeRunConfig(num_microbatches=2)
    with pytest.raises(TypeError, match="Device has no option 'num_microbatch'; it is given as model_run_config="):
        Device("cpu", num_microbatch=2)
    with roundpipe.RoundPipe(nn.Sequential(nn.Linear(3, 3)), devices="cpu") as piped:
        with pytest.raises(TypeError, match="forward_backward has no option 'labels'; did you mean 'label'"):
            piped.forward_backward(labels=1)
        with pytest.raises(TypeError, match="forward_loss has no option 'devices'; it is given as compile"):
            piped.forward_loss(devices="cpu")
        with pytest.raises(TypeError, match="save_checkpoint has no option 'optim'; there are dir, optimizer, "):
            piped.save_checkpoint("there", optim=1)
        with pytest.raises(roundpipe.ConfigError, match=r"step_fn is an optimizer, SGD; .* lambda: \(optimizer.step"):
            piped.step(torch.optim.SGD(piped.optim_parameters(), 0.1))
    signature = inspect.signature(roundpipe.RoundPipe.forward_backward)
    assert list(signature.parameters)[:3] == ["self", "input_args", "input_kwargs"], "help() shows the options"


def test_memory_may_be_given_as_text():
    assert Device("cpu", memory_bytes="24GiB").memory_bytes == 24 << 30
    assert Device("cpu", memory_bytes="500 MB").memory_bytes == 500_000_000
    with pytest.raises(roundpipe.ConfigError, match=r"memory_bytes='much'.* a text such as '24GiB'"):
        Device("cpu", memory_bytes="much")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (RoundPipeRunConfig, ["num_microbatch: Number of pieces", "loss_reduction: How", "output_device: "]),
        (Device, ["memory_bytes: Memory that may be used", "upload_bytes_per_s: "]),
    ],
)
def test_help_shows_what_fields_are_for(kind, words):
    text = pydoc.plain(pydoc.render_doc(kind))
    assert all(word in text for word in words)


def test_a_wrapper_in_a_notebook_has_the_name_of_its_cell():
    space = {"In": ["", "one", "two"], "caller_name": caller_name}
    exec(compile("\nname = caller_name()", "ipykernel_17/2947561.py", "exec"), space)
    assert space["name"] == "cell 2:2"
    exec(compile("\nname = caller_name()", "script.py", "exec"), space)
    assert space["name"] == "script.py:2"


def test_a_notebook_shows_a_report_as_its_table():
    class Printer:
        shown = ""

        def text(self, words):
            self.shown += words

    with roundpipe.RoundPipe(nn.Sequential(nn.Linear(3, 3)), devices="cpu") as piped:
        piped(torch.zeros(2, 3))
        report, printer = piped.report(), Printer()
        report._repr_pretty_(printer, False)  # what notebooks call
        assert printer.shown == str(report)


def test_a_microbatch_of_one_sample_is_named_as_the_cause():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    given = {"input_args": (torch.randn(3, 3),), "loss_fn": lambda output, label: output.sum()}
    with roundpipe.compile(model, devices="cpu") as piped:
        with pytest.raises(ValueError, match="more than 1 value per channel") as caught:
            piped.forward_backward(**given, run_config=RoundPipeRunConfig(3))
        first, last = caught.value.__notes__
        assert "given these arguments (of one microbatch, if the batch was split)" in first
        assert "this microbatch has one sample left; set num_microbatch lower" in last
        with pytest.raises(ValueError, match="more than 1 value per channel") as caught:
            piped.forward_backward((torch.randn(1, 3),), loss_fn=given["loss_fn"], run_config=RoundPipeRunConfig(1))
        assert not any("left" in note for note in caught.value.__notes__)
