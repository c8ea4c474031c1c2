"""Options of the wrong type or range are refused by name."""

import pytest
import torch
from torch import nn

import roundpipe

X = torch.ones(4, 6)


def network():
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))


def compiled(**options):
    return roundpipe.compile(network(), devices=["cpu"], **options)


def wrapped(**options):
    return roundpipe.wrap_model_to_roundpipe(network(), devices=["cpu"], **options)


def record():
    with roundpipe.RoundPipe(network(), devices=["cpu"]) as piped, piped.record_timeline(3):
        pass


def save(tmp_path):
    with roundpipe.RoundPipe(network(), devices=["cpu"]) as piped:
        piped.save_checkpoint(tmp_path / "c", is_async="no")


def run(**options):
    config = roundpipe.RoundPipeRunConfig(**options)
    with roundpipe.RoundPipe(network(), devices=["cpu"]) as piped:
        piped.forward_backward((X,), loss_fn=lambda outputs, label: outputs.sum(), run_config=config)


NAN = float("nan")
CASES = {
    "example_kwargs": (lambda: compiled(example_kwargs=3), "example_kwargs is int"),
    "fallback": (lambda: compiled(example_args=(X,), fallback="no"), "fallback='no'"),
    "preset": (lambda: wrapped(use_sequential_preset="no"), "use_sequential_preset='no'"),
    "override_config": (lambda: wrapped(override_config=3), "override_config is int"),
    "device": (lambda: roundpipe.Device(None), r"Device\(None\)"),
    "memory": (lambda: roundpipe.Device("cpu", memory_bytes=NAN), r"Device\(memory_bytes=nan\)"),
    "upload": (lambda: roundpipe.Device("cpu", upload_bytes_per_s=NAN), "upload_bytes_per_s=nan"),
    "download": (lambda: roundpipe.Device("cpu", download_bytes_per_s=float("inf")), "download_bytes_per_s=inf"),
    "timeline": (record, "a timeline is written to a file, not to 3"),
    "graph": (lambda: roundpipe.explain(network(), example_args=(X,), graph=3), "graph=3"),
}


@pytest.mark.parametrize("option", CASES)
def test_it_is_refused_by_name(option):
    use, words = CASES[option]
    with pytest.raises(roundpipe.RoundPipeError, match=words):
        use()


def test_whether_a_save_is_asynchronous(tmp_path):
    with pytest.raises(roundpipe.RoundPipeError, match="is_async is str"):
        save(tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there")
def test_outputs_on_a_device_that_is_not_there():
    with pytest.raises(roundpipe.RoundPipeError, match="output_device='cuda:0': torch sees no such device"):
        run(output_device="cuda:0")
