"""Run options: validation, precedence field by field, and the running call's microbatch count."""

import dataclasses
import threading

import pytest
import torch

from roundpipe.core.errors import ConfigError, MicrobatchError
from roundpipe.core.execute_plan import ExecutePlan
from roundpipe.runtime.config import (
    ResolvedConfig,
    RoundPipeRunConfig,
    microbatch_count,
    num_microbatches,
    resolve,
)

PLAN = ExecutePlan([(0, 1)], (1, 2), [(0, 1)])

GIVEN = {
    "num_microbatch": (3, 5),
    "recompute_grain": ("layer", "stage"),
    "output_device": (torch.device("meta"), torch.device("cpu")),
    "split_input": (((None,), None), ((None, None), None)),
    "split_label": ([None], (None,)),
    "merge_output": (False, True),
    "requires_grad": (False, True),
    "preserve_rng_state": (False, True),
    "execute_plan": (PLAN, ExecutePlan([], (0, 2), [])),
    "replicas": ("off", "auto"),
    "tiles": (4, 7),
    "residency": ("off", "auto"),
    "loss_reduction": ("mean", "sum"),
    "loss_scope": ("batch", "microbatch"),
    "check_finite": (True, False),
}
"""Two values, other than the built-in, of every field."""


def test_nothing_given_is_the_built_in():
    assert all(getattr(RoundPipeRunConfig(), field.name) is None for field in dataclasses.fields(RoundPipeRunConfig))
    assert resolve(None, None, num_devices=4) == ResolvedConfig(
        num_microbatch=5,
        recompute_grain="stage",
        output_device=torch.device("cpu"),
        split_input=None,
        split_label=None,
        merge_output=True,
        requires_grad=True,
        preserve_rng_state=True,
        execute_plan=None,
        replicas=None,
        tiles=None,
        residency="auto",
        loss_reduction="sum",
        loss_scope="microbatch",
        check_finite=False,
        is_number_given=False,
    )


def test_fields_of_given_and_resolved_are_the_same():
    names = [field.name for field in dataclasses.fields(RoundPipeRunConfig)]
    assert [*names, "auto", "is_number_given"] == [field.name for field in dataclasses.fields(ResolvedConfig)]
    assert names == list(GIVEN)


def test_options_left_to_choice_hold_what_is_built_in():
    left = RoundPipeRunConfig(num_microbatch="auto", recompute_grain="auto")
    resolved = resolve(RoundPipeRunConfig(recompute_grain="layer"), left, num_devices=2)
    assert (resolved.num_microbatch, resolved.recompute_grain, resolved.auto) == (3, "layer", {"num_microbatch"})
    assert resolve(None, None, num_devices=2).auto == frozenset() and not resolved.is_number_given


@pytest.mark.parametrize("name", GIVEN)
def test_call_over_model_over_built_in(name):
    call, model = (RoundPipeRunConfig(**{name: value}) for value in GIVEN[name])
    empty, built_in = RoundPipeRunConfig(), resolve(None, None, num_devices=1)
    for configs, expected in [
        ((call, model), GIVEN[name][0]),
        ((empty, model), GIVEN[name][1]),
        ((call, empty), GIVEN[name][0]),
        ((None, model), GIVEN[name][1]),
    ]:
        resolved = resolve(*configs, num_devices=1)
        assert getattr(resolved, name) == expected
        assert resolved.is_number_given is (name == "num_microbatch")
        assert dataclasses.replace(resolved, is_number_given=False, **{name: getattr(built_in, name)}) == built_in
    assert resolve(empty, empty, num_devices=1) == built_in


@pytest.mark.parametrize(("given", "resolved"), [("auto", None), ("off", 1), (1, 1), (16, 16)])
def test_tiles_are_a_number_or_left_to_the_planner(given, resolved):
    assert resolve(RoundPipeRunConfig(tiles=given), RoundPipeRunConfig(tiles=5), num_devices=1).tiles == resolved


def test_fields_of_both_are_joined():
    resolved = resolve(
        RoundPipeRunConfig(num_microbatch=7),
        RoundPipeRunConfig(num_microbatch=2, recompute_grain="layer"),
        num_devices=1,
    )
    assert (resolved.num_microbatch, resolved.recompute_grain) == (7, "layer")


def test_requires_grad_follows_the_callers_grad_mode():
    with torch.no_grad():
        assert not resolve(None, None, num_devices=1).requires_grad
        assert resolve(RoundPipeRunConfig(requires_grad=True), None, num_devices=1).requires_grad
    with torch.inference_mode():
        assert not resolve(None, None, num_devices=1).requires_grad


def test_device_names_are_devices():
    assert resolve(RoundPipeRunConfig(output_device="cpu:0"), None, num_devices=1).output_device == torch.device(
        "cpu", 0
    )


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("num_microbatch", 0, "an int of at least 1"),
        ("num_microbatch", 2.0, "an int of at least 1"),
        ("num_microbatch", True, "an int of at least 1"),
        ("recompute_grain", "block", '"stage", "layer" or "auto"'),
        ("output_device", "nowhere", '"cuda:0"'),
        ("output_device", 0, '"cuda:0"'),
        ("split_input", 3, "a pair"),
        ("split_input", ((None,), None, None), "a pair"),
        ("split_input", (None, (None,)), "a pair"),
        ("requires_grad", "yes", "True, False"),
        ("preserve_rng_state", 1, "True, False"),
        ("check_finite", "always", "True, False"),
        ("execute_plan", [(0, 1)], "an ExecutePlan"),
        ("tiles", 0, "an int of at least 1"),
        ("tiles", True, "an int of at least 1"),
        ("tiles", "on", '"auto", "off"'),
        ("tiles", (4, 4), '"auto", "off"'),
        ("residency", "on", '"auto", "full" or "off"'),
        ("replicas", 2, '"auto" or "off"'),
    ],
)
def test_bad_values_are_refused_with_what_is_allowed(name, value, allowed):
    with pytest.raises(ConfigError) as caught:
        RoundPipeRunConfig(**{name: value})
    message = str(caught.value)
    assert message.startswith(f"RoundPipeRunConfig.{name}: got {value!r} ({type(value).__name__}); allowed: ")
    assert allowed in message
    assert isinstance(caught.value, ValueError)


def test_other_configs_are_refused():
    with pytest.raises(ConfigError, match="pass a RoundPipeRunConfig"):
        resolve({"num_microbatch": 2}, None, num_devices=1)


def test_configs_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        RoundPipeRunConfig().num_microbatch = 3


def test_num_microbatches_is_known_inside_only_and_per_thread():
    seen = []

    def worker(number):
        with microbatch_count(number):
            barrier.wait(5)
            seen.append((number, num_microbatches()))

    barrier = threading.Barrier(2)
    threads = [threading.Thread(target=worker, args=(number,)) for number in (2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == [(2, 2), (3, 3)]
    with microbatch_count(4), microbatch_count(5):
        assert num_microbatches() == 5
    with pytest.raises(MicrobatchError, match="only inside loss_fn"):
        num_microbatches()
