"""What a user who is nearly right is told: options in the wrong place, sizes as text, names and fields that show."""

import dataclasses
import functools
import inspect
import pydoc
import re

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import Device, RoundPipeRunConfig
from roundpipe.core.caller import caller_name
from roundpipe.integrations.arguments import RoundPipeArguments
from tests.repeats import repeats


@pytest.mark.parametrize(
    ("option", "advice"),
    [
        ("num_microbatch", "model_run_config=RoundPipeRunConfig(num_microbatch=...), or run_config="),
        ("loss_fn", "it is given as forward_backward(loss_fn=...)"),
        ("memory_bytes", "it is given as devices=[Device('cuda:0', memory_bytes=...)]"),
        ("is_async", "it is given as step(step_fn, is_async=...)"),
        ("device", "did you mean 'devices'?"),
        ("pin", "did you mean 'pin_model'?"),
        ("optimizer", "it is given as step(lambda: (optimizer.step(), optimizer.zero_grad()))"),
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
    with pytest.raises(TypeError, match="Device has no option 'memory'; did you mean 'memory_bytes'"):
        Device("cpu", memory="24GiB")
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


FIELDS = [field.name for field in dataclasses.fields(RoundPipeRunConfig)]


@pytest.mark.parametrize("option", repeats(FIELDS, ["num_microbatch", "tiles", "loss_reduction"]))
def test_an_option_of_a_run_has_a_hint_wherever_it_is_given(option, tmp_path):
    """Loss options are arguments of some calls themselves."""
    net, x = nn.Sequential(nn.Linear(3, 3)), torch.zeros(4, 3)
    with roundpipe.RoundPipe(net, devices="cpu") as piped, roundpipe.compile(nn.Linear(3, 3), devices="cpu") as traced:
        places = [
            lambda **given: roundpipe.compile(net, **given),
            lambda **given: roundpipe.wrap_model_to_roundpipe(net, **given),
            lambda **given: roundpipe.RoundPipe(net, **given),
            lambda **given: roundpipe.AutoRoundPipe(net, **given),
            lambda **given: roundpipe.Pipe(net, **given),
            lambda **given: roundpipe.explain(net, **given),
            lambda **given: Device("cpu", **given),
            lambda **given: RoundPipeArguments(**given),
            lambda **given: piped.save_checkpoint(tmp_path, **given),
        ]
        for one in (piped, traced):
            places += [
                functools.partial(one, x),
                functools.partial(one.step, lambda: None),
                functools.partial(one.step, lambda: None, False),
            ]
            if not option.startswith("loss_"):
                places += [
                    functools.partial(one.forward_backward, (x,), loss_fn=lambda out, _: out.sum()),
                    functools.partial(one.forward_loss, (x,), loss_fn=lambda out, _: out.sum()),
                ]
        for place in places:
            with pytest.raises(TypeError, match=f"'{option}'.*RoundPipeRunConfig\\("):
                place(**{option: 4})
        assert piped(x, roundpipe_run_config=RoundPipeRunConfig(2)).shape == (4, 3), "all are as usable as before"


def test_options_for_a_forward_that_takes_anything_are_passed_on_with_a_warning():
    class TakesAll(nn.Linear):
        def forward(self, x, **kwargs):
            return super().forward(x) * len(kwargs)

    class TakesTiles(nn.Linear):
        def forward(self, x, tiles):
            return super().forward(x) * tiles

    x = torch.ones(4, 3)
    with roundpipe.RoundPipe(TakesAll(3, 3), devices="cpu") as piped:
        with pytest.warns(UserWarning, match=r"TakesAll has no argument 'num_microbatch'; .* roundpipe_run_config="):
            torch.testing.assert_close(piped(x, num_microbatch=2), piped.model(x, num_microbatch=2))
    with roundpipe.RoundPipe(TakesTiles(3, 3), devices="cpu") as piped:
        torch.testing.assert_close(piped(x, tiles=3), piped.model(x, 3))


def test_memory_may_be_given_as_text():
    device = Device("cpu", upload_bytes_per_s="16GB/s", download_bytes_per_s="12 GB/s")
    assert (device.upload_bytes_per_s, device.download_bytes_per_s) == (16e9, 12e9)
    with pytest.raises(roundpipe.ConfigError, match=r"upload_bytes_per_s='fast'.* a text such as '16GB/s'"):
        Device("cpu", upload_bytes_per_s="fast")
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


def test_a_notebook_shows_reports_as_their_tables():
    class Printer:
        shown = ""

        def text(self, words):
            self.shown += words

    with roundpipe.RoundPipe(nn.Sequential(nn.Linear(3, 3)), devices="cpu") as piped:
        piped(torch.zeros(2, 3))
        for shown in (piped.report(), roundpipe.explain(piped.model, (torch.zeros(2, 3),))):
            printer = Printer()
            shown._repr_pretty_(printer, False)  # what notebooks call
            assert printer.shown == str(shown)


@pytest.mark.filterwarnings("ignore:.*nothing overlaps")
@pytest.mark.parametrize("wrap", [roundpipe.compile, roundpipe.RoundPipe, roundpipe.AutoRoundPipe])
@pytest.mark.parametrize("num", [3, 4])
def test_a_microbatch_of_one_sample_has_a_note_in_each_wrapper(wrap, num):
    x = torch.randn(num + (num == 4), 3, 4, 4)
    layers = nn.Conv2d(3, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.BatchNorm1d(4), nn.Linear(4, 2)
    with wrap(nn.Sequential(*layers), devices="cpu", model_run_config=RoundPipeRunConfig(num)) as piped:
        for call in (
            lambda: piped(x),
            lambda: piped.forward_backward((x,), loss_fn=lambda output, label: output.sum()),
            lambda: piped.forward_loss((x,), loss_fn=lambda output, label: output.sum()),
        ):
            with pytest.raises(ValueError, match="more than 1 value per channel") as caught:
                call()
            assert (
                sum(
                    "one sample left; plain PyTorch takes the batch as a whole. Set num_" in note
                    for note in caught.value.__notes__
                )
                == 1
            )


class Messages(nn.Module):
    """Adds to each node of a graph what its neighbours have."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, nodes, edges):
        nodes = self.first(nodes)
        return self.second(nodes.index_add(0, edges[0], nodes[edges[1]]))


def test_arguments_that_belong_together_are_named_as_the_cause():
    nodes, edges = torch.randn(6, 3), torch.tensor([[0, 1, 5, 4], [5, 4, 0, 1]])
    model = Messages()
    with roundpipe.compile(model, devices="cpu") as piped:
        with pytest.raises(IndexError) as caught:
            piped(nodes, edges)
        assert "one of the 2 microbatches that the batch was cut into" in caught.value.__notes__[-1]
        whole = RoundPipeRunConfig(num_microbatch=1)
        torch.testing.assert_close(piped(nodes, edges, roundpipe_run_config=whole), model(nodes, edges))


def padded_to_the_longest(output, label):
    return nn.functional.cross_entropy(output[:, :, : len(output)], label)


def flattened_badly(output, label):
    return nn.functional.cross_entropy(output.flatten(0, 1), label[0])


def checks_sizes(output, label):
    assert len(output) == 4
    return output.sum()


@pytest.mark.parametrize("kind", [roundpipe.RoundPipe, roundpipe.AutoRoundPipe])
@pytest.mark.parametrize("loss_fn", [padded_to_the_longest, flattened_badly, checks_sizes])
def test_a_loss_function_is_told_that_it_gets_one_of_several_microbatches(kind, loss_fn):
    model, label = nn.Sequential(nn.Linear(5, 5), nn.ReLU()), torch.zeros(4, 5, dtype=torch.long)
    with kind(model, devices=["cpu"], model_run_config=RoundPipeRunConfig(num_microbatch=2)) as piped:
        with pytest.raises((RuntimeError, ValueError, AssertionError)) as caught:
            piped.forward_backward((torch.randn(4, 3, 5),), label=label, loss_fn=loss_fn)
    notes = [note for note in caught.value.__notes__ if "loss_fn was called with one of the 2 microbatches" in note]
    assert len(notes) == 1


def test_a_microbatch_of_one_sample_is_named_as_the_cause():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    given = {"input_args": (torch.randn(3, 3),), "loss_fn": lambda output, label: output.sum()}
    with roundpipe.compile(model, devices="cpu") as piped:
        with pytest.raises(ValueError, match="more than 1 value per channel") as caught:
            piped.forward_backward(**given, run_config=RoundPipeRunConfig(3))
        (note,) = caught.value.__notes__  # not that the arguments are wrong, since the whole batch runs
        assert "split into microbatches, and this one has one sample left; plain PyTorch takes" in note
        with pytest.raises(ValueError, match="more than 1 value per channel") as caught:
            piped.forward_backward((torch.randn(1, 3),), loss_fn=given["loss_fn"], run_config=RoundPipeRunConfig(1))
        assert not any("left" in note for note in caught.value.__notes__)


def test_calls_that_miss_where_a_models_arguments_belong_are_told():
    with roundpipe.compile(nn.Sequential(nn.Linear(3, 3)), devices=["cpu"]) as piped:
        with pytest.raises(TypeError, match="belong in input_args and input_kwargs"):
            piped.forward_backward(input_ids=torch.ones(2, 3))
        with pytest.raises(roundpipe.ConfigError, match=r"input_args is dict; .* as a dict, input_kwargs=\{"):
            piped.forward_backward({"input": torch.ones(2, 3)})
        with pytest.raises(roundpipe.LossError, match="Without loss_fn=, the model's outputs are taken for losses"):
            piped.forward_backward((torch.ones(2, 3),), label=torch.ones(2, 3))
        with pytest.raises(roundpipe.LossError, match="needs its labels in input_kwargs"):
            piped.forward_backward((torch.ones(2, 3),), loss_fn=lambda outputs, label: None)
