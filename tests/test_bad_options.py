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


def training(**given):
    with roundpipe.RoundPipe(network(), devices=["cpu"]) as piped:
        piped.forward_backward(**{"input_args": (X,), "loss_fn": lambda outputs, label: outputs.sum(), **given})


def wait(timeout):
    with roundpipe.RoundPipe(network(), devices=["cpu"]) as piped:
        piped.step(lambda: None).wait(timeout)


def stages(model=None, num_stages=2, example_args=(X,)):
    # here, since it takes as long to import as torch
    return roundpipe.distributed.partition_stages(model or network(), num_stages, example_args=example_args)


def run(**options):
    config = roundpipe.RoundPipeRunConfig(**options)
    with roundpipe.RoundPipe(network(), devices=["cpu"]) as piped:
        piped.forward_backward((X,), loss_fn=lambda outputs, label: outputs.sum(), run_config=config)


NAN = float("nan")
CASES = {
    "example_kwargs": (lambda: compiled(example_kwargs=3), "example_kwargs is int"),
    "fallback": (lambda: compiled(example_args=(X,), fallback="no"), "fallback is str; give True or False"),
    "preset": (lambda: wrapped(use_sequential_preset="no"), "use_sequential_preset is str; give True, False or None"),
    "override_config": (lambda: wrapped(override_config=3), "override_config is int"),
    "device": (lambda: roundpipe.Device(None), r"Device\(None\)"),
    "devices in one text": (
        lambda: roundpipe.Device("cpu,cpu"),
        r"several devices are a list, such as \['cpu', 'cpu'\]",
    ),
    "memory": (lambda: roundpipe.Device("cpu", memory_bytes=NAN), r"Device\(memory_bytes=nan\)"),
    "memory beyond all numbers": (lambda: roundpipe.Device("cpu", memory_bytes="1e400GB"), r"memory_bytes='1e400GB'"),
    "upload": (lambda: roundpipe.Device("cpu", upload_bytes_per_s=NAN), "upload_bytes_per_s=nan"),
    "download": (lambda: roundpipe.Device("cpu", download_bytes_per_s=float("inf")), "download_bytes_per_s=inf"),
    "timeline": (record, "path=3; give the path of a file, .json or .png"),
    "tiles": (lambda: roundpipe.RoundPipeRunConfig(tiles=0), r"tiles: got 0"),
    "residency": (lambda: roundpipe.RoundPipeRunConfig(residency=True), r"residency: got True"),
    "number": (lambda: roundpipe.RoundPipeRunConfig(num_microbatch=NAN), "num_microbatch: got nan"),
    "reduction": (lambda: training(loss_reduction="avg"), "loss_reduction: got 'avg'"),
    "replicas": (lambda: roundpipe.RoundPipeRunConfig(replicas=2), "replicas: got 2 .*; allowed: .auto. or .off."),
    "scope": (lambda: training(loss_scope=[]), r"loss_scope: got \[\]"),
    "outputs": (lambda: training(return_outputs="no"), "return_outputs is str"),
    "arguments": (lambda: training(input_args=X), "input_args is Tensor"),
    "keywords": (lambda: training(input_kwargs=[1]), "input_kwargs is a list with int"),
    "loss": (lambda: training(loss_fn=3), "loss_fn is int"),
    "config": (lambda: training(run_config={}), "run_config: got {}"),
    "timeout": (lambda: wait("x"), "timeout='x'"),
    "no time": (lambda: wait(NAN), "timeout=nan"),
    "scale": (lambda: roundpipe.GradScaler("cpu", init_scale=NAN), "init_scale=nan"),
    "interval": (lambda: roundpipe.GradScaler("cpu", growth_interval=0), "growth_interval"),
    "plan": (lambda: roundpipe.ExecutePlan([(0, NAN)], (0, 1), []), "nan"),
    "devices": (lambda: roundpipe.RoundPipe(network(), devices=[None]), "None is NoneType"),
    "dtype": (lambda: roundpipe.RoundPipe(network(), devices="cpu", optim_dtype=torch.int32), "optim_dtype"),
    "name": (lambda: roundpipe.RoundPipe(network(), devices="cpu", name=3), "name"),
    "pin": (lambda: roundpipe.RoundPipe(network(), devices="cpu", pin_model="maybe"), "pin_model"),
    "balance": (lambda: compiled(balance="weight", example_args=(X,)), "balance"),
    "threshold": (lambda: compiled(lower_threshold=NAN), "lower_threshold"),
    "skipped": (lambda: wrapped(skip_modules=[3]), "skip_modules"),
    "chunks": (lambda: roundpipe.Pipe(network(), chunks=NAN, devices=["cpu"]), "chunks"),
    "pipe": (lambda: roundpipe.Pipe(3, chunks=2), "Pipe|model"),
    "stages": (lambda: stages(num_stages=0), "num_stages=0"),
    "part of one": (lambda: stages(num_stages=NAN), "num_stages=nan"),
    "example of stages": (lambda: stages(example_args=X), "example_args is Tensor"),
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
