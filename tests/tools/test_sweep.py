"""`plan --sweep`, the verdict, and models named as on the hub."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import pytest
import torch

from roundpipe.core.errors import ConfigError
from roundpipe.tools import command_line as cli
from roundpipe.tools import device_data, sweep
from roundpipe.tools.forecast_report import step_text
from roundpipe.tools.target import Target, check_target
from tests.documents import ROOT
from tests.tools.cases_command_line import H100, QWEN, TINY

pytest.importorskip("transformers")


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a model whose config is in a Hugging Face cache of its own."""
    hub = pytest.importorskip("huggingface_hub")
    folder = tmp_path / "models--roundpipe--tiny"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "snapshots" / "abc" / "config.json").write_text(json.dumps(TINY))
    lookup = hub.try_to_load_from_cache
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda name, file: lookup(name, file, cache_dir=tmp_path))
    return "roundpipe/tiny"


@pytest.mark.long
def test_rows_are_plans_of_their_options(cached: str, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setattr(sweep, "NUM_DEVICES", (1, 2))
    swept: list[sweep.SweptPlan] = []
    monkeypatch.setattr(cli, "sweep", lambda *given: swept.extend(sweep.sweep(*given)) or swept)
    given = ["plan", cached, *H100, "--batch", "4", "--microbatches", "2"]
    assert cli.main([*given, "--sweep", "devices"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("tiny, device H100, trains all weights, batch 4, microbatches 2, 64 tokens a sample\n")
    assert text.count("fits if the host has ") == 2
    assert cli.main([*given, "--devices", "2", "--host-memory", "1MiB"]) == 1
    single = capsys.readouterr().out
    assert "doesn't fit, because the host needs " in single and " of memory and has 1.00 MiB" in single
    assert [row.result.machine.num_devices for row in swept] == [1, 2]
    assert step_text(swept[1].result) in single


def test_several_times_the_batch_keeps_the_size_of_microbatches() -> None:
    options = argparse.Namespace(
        batch=8,
        microbatches=None,
        devices=1,
        optimizer=None,
        optim_dtype="float32",
        recompute="stage",
        residency=None,
        replicas=None,
    )
    target = Target("none", torch.nn.Identity(), lambda number: {}, None, None, False)

    def sizes(num_devices: int, times: int) -> tuple[int, int]:
        training = cli.training_of(options, target, num_devices, times)
        return training.batch, training.num_microbatches

    assert [sizes(1, 1), sizes(1, 2), sizes(1, 4), sizes(4, 1)] == [(8, 2), (16, 4), (32, 8), (8, 5)]
    options.microbatches = 4
    assert [sizes(1, 1), sizes(2, 2)] == [(8, 4), (16, 8)]


def test_what_can_not_be_varied() -> None:
    assert sweep.parse_axes("lora, devices") == ("devices", "lora")
    with pytest.raises(ConfigError, match="there is no 'nonsense' to vary; there are cards, devices, batch, lora"):
        sweep.parse_axes("devices,nonsense")


def test_a_name_that_is_not_in_the_cache_says_how_to_fetch_it(cached: str) -> None:
    check_target(cached)
    with pytest.raises(ConfigError, match="hf download roundpipe/other config.json fetches it"):
        check_target("roundpipe/other")
    with pytest.raises(ConfigError, match="Hugging Face cache; give"):  # a path is no name
        check_target("other/config.json")


@pytest.mark.long
def test_the_table_of_a_sweep_is_what_plan_says(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "hardware.md").read_text()
    ((line, shown),) = re.findall(r"^```text\n\$ python -m roundpipe (plan .*?)\n(.*?)^```$", page, re.M | re.S)
    assert cli.main([str(QWEN) if word == "Qwen3-8B" else word for word in line.split()]) == 0
    found = capsys.readouterr().out.partition("\n")[2].splitlines()  # below the line that has the model's name
    for mine, theirs in zip(found, shown.partition("\n")[2].splitlines(), strict=True):
        assert re.sub(r"[\d., ]+", "", mine) == re.sub(r"[\d., ]+", "", theirs)
        numbers = [[float(each.replace(",", "")) for each in re.findall(r"\d[\d.,]*", row)] for row in (mine, theirs)]
        assert numbers[0] == pytest.approx(numbers[1], rel=0.03), f"make the table anew: {line}"


def documented_cards() -> dict[str, list[str]]:
    """The cells of the table of cards, by the card's name."""
    rows = [line.strip("| ").split(" | ") for line in (ROOT / "docs" / "hardware.md").read_text().splitlines()]
    return {row[0]: row[1:] for row in rows if len(row) == 9 and row[0] not in ("card", "---")}


def test_the_table_of_cards_has_every_profile() -> None:
    assert list(documented_cards()) == [device.name for device in device_data.DEVICES]


@pytest.mark.long
@pytest.mark.parametrize("card", ["RTX-3060", "RTX-4090", "L40S", "A100-80G", "H100", "B200"])
@pytest.mark.parametrize(("options", "columns"), [(("--lora", "16"), slice(0, 4)), ((), slice(4, 8))])
def test_the_table_of_cards_is_what_plan_says(
    capsys: pytest.CaptureFixture[str], card: str, options: tuple[str, ...], columns: slice
) -> None:
    assert cli.main(["plan", str(QWEN), "--batch", "16", "--device-profile", card, *options]) == 0
    found = re.search(
        r"^step +(.*?), ([\d,]+) tokens/s.*^device memory +(.*?):.*^verdict +fits if the host has (.*?)$",
        capsys.readouterr().out,
        re.MULTILINE | re.DOTALL,
    )
    assert found is not None
    for mine, theirs in zip(found.groups(), documented_cards()[card][columns], strict=True):
        units, shown_units = (re.sub(r"[\d.,]+", "", text) for text in (mine, theirs))
        numbers, shown = (
            [float(each.replace(",", "")) for each in re.findall(r"[\d.,]+", text)] for text in (mine, theirs)
        )
        assert units == shown_units
        assert numbers == pytest.approx(shown, rel=0.03), "make the table anew: plan ... --sweep cards"
