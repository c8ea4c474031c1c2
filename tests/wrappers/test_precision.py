"""The dtype of the optimizer's copies where nobody gives one: half precision loses small updates."""

import copy
import warnings

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.tools.command_line import main
from tests.runtime.models import square_loss

HALF = [torch.bfloat16, torch.float16]
LR = 2e-5


def net(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))).to(dtype)


def inputs(dtype):
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(1)).to(dtype)


def dtypes_of_copies(piped):
    return {copy.dtype for copy in piped.optim_parameters()}


WRAPS = {
    "compile": roundpipe.compile,
    "wrap": roundpipe.wrap_model_to_roundpipe,
    "wrap in parts": lambda model, **options: roundpipe.wrap_model_to_roundpipe(
        nn.ModuleDict({"net": model}), use_sequential_preset=False, **options
    ),
    "wrap a sequential": lambda model, **options: roundpipe.wrap_model_to_roundpipe(
        model, use_sequential_preset=False, **options
    ),
}


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_half_precision_weights_have_float32_copies(wrap, dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with wrap(net(dtype), devices=["cpu"]) as piped:
            assert dtypes_of_copies(piped) == {torch.float32}
            with copy.deepcopy(piped) as other:
                assert dtypes_of_copies(other) == {torch.float32}
        with wrap(net(dtype), devices=["cpu"], optim_dtype=dtype) as piped:
            assert dtypes_of_copies(piped) == {dtype}


def test_wider_weights_keep_their_dtype_and_a_converted_model_keeps_its_precision():
    for dtype in (torch.float32, torch.float64):
        with roundpipe.compile(net(dtype), devices=["cpu"]) as piped:
            assert dtypes_of_copies(piped) == {dtype}
            piped.to(torch.bfloat16)
            assert dtypes_of_copies(piped) == {torch.float32}


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("wrap", [roundpipe.RoundPipe, roundpipe.AutoRoundPipe])
def test_a_wrapper_made_by_hand_keeps_the_dtype_with_one_warning(wrap, dtype):
    with wrap(net(dtype), devices=["cpu"]) as piped:
        with pytest.warns(UserWarning, match="optim_dtype=torch.float32") as caught:
            assert dtypes_of_copies(piped) == {dtype}
            assert dtypes_of_copies(piped) == {dtype}
        assert len(caught) == 1 and caught[0].filename == __file__
        with copy.deepcopy(piped) as other, pytest.warns(UserWarning, match="small updates are lost"):
            assert dtypes_of_copies(other) == {dtype}


def test_no_warning_without_copies_in_half_precision():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for options in ({"optim_dtype": torch.bfloat16}, {"optim_dtype": torch.float32}):
            with roundpipe.RoundPipe(net(), devices=["cpu"], **options) as piped:
                list(piped.optim_parameters())
        with roundpipe.RoundPipe(net().requires_grad_(False), devices=["cpu"]) as frozen:
            assert not list(frozen.optim_parameters())


def test_small_updates_add_up():
    """60 steps of AdamW at a fine-tuning rate, against the same on float32 weights."""
    exact = net(torch.float32)
    with torch.no_grad():
        for parameter in exact.parameters():
            parameter.copy_(parameter.bfloat16())
    model = net()
    x = inputs(torch.float32)
    plain = torch.optim.AdamW(exact.parameters(), lr=LR, weight_decay=0.0)
    before = [parameter.detach().clone() for parameter in exact.parameters()]
    with roundpipe.compile(model, devices=["cpu"] * 2) as piped:
        optimizer = torch.optim.AdamW(piped.optim_parameters(), lr=LR, weight_decay=0.0)
        for _ in range(60):
            square_loss(exact(x), None).backward()
            plain.step()
            plain.zero_grad()
            piped.forward_backward((x.bfloat16(),), loss_fn=lambda output, label: output.float().square().sum())
            piped.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
        for own, theirs, start in zip(piped.optim_parameters(), exact.parameters(), before, strict=True):
            moved, expected = own.detach() - start, theirs.detach() - start
            agreement = nn.functional.cosine_similarity(moved.flatten(), expected.flatten(), dim=0)
            assert agreement > 0.8
            assert torch.allclose(moved.abs().sum(), expected.abs().sum(), rtol=0.2)


@pytest.mark.parametrize("given", [None, torch.bfloat16], ids=str)
def test_tables_say_which(given):
    with roundpipe.compile(net(), devices=["cpu"], optim_dtype=given, example_args=(inputs(torch.bfloat16),)) as piped:
        assert f"optimizer in {'float32' if given is None else 'bfloat16'}" in piped.partition_table()
        piped.model.requires_grad_(False)
        assert "optimizer in" not in piped.partition_table()
    with roundpipe.AutoRoundPipe(net(torch.float64), devices=["cpu"]) as piped:
        assert "optimizer in float64" in piped.partition_table()


def wide():
    return net(torch.float64), {"input": torch.randn(2, 8, dtype=torch.float64)}


@pytest.mark.parametrize(("target", "dtype"), [("net_and_inputs", "float32"), ("wide", "float64")])
def test_plan_says_which_and_counts_it(capsys, target, dtype):
    main(["plan", f"{__name__}:{target}", "--flops", "1e12", "--memory", "8GiB", "--link", "16GB/s"])
    text = capsys.readouterr().out
    assert f"optimizer in {dtype}" in text and f"adamw in {dtype}" in text


def net_and_inputs():
    return net(), {"input": inputs(torch.bfloat16)}


def test_a_checkpoint_of_copies_in_half_precision_still_loads(tmp_path):
    x = inputs(torch.bfloat16)

    def trained(piped, steps):
        optimizer = torch.optim.AdamW(piped.optim_parameters(), lr=0.01)
        for _ in range(steps):
            piped.forward_backward((x,), loss_fn=lambda output, label: output.float().square().sum())
            piped.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
        return optimizer

    with roundpipe.compile(net(), devices=["cpu"], optim_dtype=torch.bfloat16) as before:
        optimizer = trained(before, 3)
        before.save_checkpoint(tmp_path / "saved", optimizer=optimizer, step=3)
        weights = {name: value.clone() for name, value in before.state_dict().items()}
        states = optimizer.state_dict()["state"]
    with roundpipe.compile(net(), devices=["cpu"] * 2) as after:
        optimizer = trained(after, 1)
        assert after.load_checkpoint(tmp_path / "saved", optimizer=optimizer).step == 3
        for name, own in after.optim_named_parameters():
            assert own.dtype == torch.float32 and torch.equal(own, weights[name].float())
        for index, state in optimizer.state_dict()["state"].items():
            torch.testing.assert_close(state["exp_avg"], states[index]["exp_avg"].float())
        trained(after, 1)


class UsesTwice(nn.Module):
    """Casts what it is given for each use, of which the gradients are added in its own precision."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return torch.tanh(self.first(x) + self.second(x)) + x


@pytest.mark.parametrize("wrap", ["compile", "layers"])
@pytest.mark.parametrize("grain", ["stage", "layer"])
def test_under_autocast_gradients_are_eagers_to_the_bit_wherever_stages_begin(wrap, grain):
    torch.manual_seed(0)
    model = nn.Sequential(*(UsesTwice() for _ in range(4)))
    reference = copy.deepcopy(model)
    plan = roundpipe.ExecutePlan([(0, 1), (1, 2)], (2, 4), [(1, 2), (0, 1)])
    x, make = torch.randn(6, 8), roundpipe.compile if wrap == "compile" else roundpipe.RoundPipe
    run_config = roundpipe.RoundPipeRunConfig(
        num_microbatch=2, recompute_grain=grain, execute_plan=plan if wrap == "layers" else None
    )
    with make(model, devices=["cpu"] * 2) as piped, torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(2):
            piped.forward_backward((x,), loss_fn=lambda out, _: out.float().square().sum(), run_config=run_config)
            for part in x.tensor_split(2):
                reference(part).float().square().sum().backward()
        piped.synchronize()
    for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(parameter.grad, expected.grad)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_dtype_may_change_while_there_are_gradients(dtype: torch.dtype) -> None:
    """As in plain PyTorch, they are converted with the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4))
    with roundpipe.compile(model, devices=["cpu"] * 2) as pipe:
        optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=0.1)
        pipe(torch.randn(9, 6)).square().sum().backward()
        optimizer.step()
        before = [copied.grad.clone() for copied in pipe.optim_parameters() if copied.grad is not None]
        model.to(dtype)
        pipe.synchronize()
        after = [copied.grad for copied in pipe.optim_parameters() if copied.grad is not None]
        assert len(before) == len(after) == 4
        for gradient, other in zip(after, before, strict=True):
            torch.testing.assert_close(gradient.to(dtype), other.to(dtype))
        pipe.zero_grad()
        pipe(torch.randn(9, 6, dtype=dtype)).square().sum().backward()
        assert all(parameter.grad is not None and parameter.grad.dtype == dtype for parameter in model.parameters())
