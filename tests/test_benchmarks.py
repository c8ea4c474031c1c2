"""The long benchmarks run, at sizes too small to measure anything, and write what they say they write."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from roundpipe.reports.timeline import OPTIMIZER, Span, Timeline

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(autouse=True)
def on_path() -> Iterator[None]:
    """The folder of a script is on the path while it runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield


def run(name: str, arguments: list[str], folder: Path) -> tuple[int, dict[str, Any]]:
    path = folder / "results" / f"{name}.json"
    code = importlib.import_module(name).main([*arguments, "--json", str(path)])
    document = json.loads(path.read_text())
    assert {"command", "processor", "cores", "python", "torch"} <= set(document["environment"])
    return code, document["results"]


@pytest.mark.parametrize(
    "name",
    [
        "fits",
        "generation",
        "generation_before",
        "handover",
        "images",
        "lengths",
        "long_run",
        "memory",
        "optimizer",
        "processes",
        "residency",
        "rows",
        "scaling",
        "simulator",
        "soak",
        "timeline",
    ],
)
def test_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        importlib.import_module(name).main(["--help"])
    assert end.value.code == 0
    assert "usage:" in capsys.readouterr().out


@pytest.mark.long
def test_long_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", reason="trains a Llama")
    code, results = run("long_run", ["--steps", "3", "--batch", "3", "--length", "12"], tmp_path)
    assert code == 0
    for mode in ("sync", "async", "tied", "tied_async", "tied_float64", "tied_async_float64"):
        assert len(results[mode]["ours"]) == len(results[mode]["plain"]) == 3
        assert results[mode]["difference"] <= results[mode]["target"]
    assert "ratio" in capsys.readouterr().out


@pytest.mark.long
def test_generation_before(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="generates with a Qwen3")
    sizes = ["--layers", "2", "--width", "128", "--vocabulary", "64", "--runs", "1"]
    cases = ["--case", "2", "8", "4", "8000000", "--case", "2", "8", "4", "1%"]
    code, results = run("generation_before", [str(BENCHMARKS.parent), *sizes, *cases], tmp_path)
    assert code == 1 and len(results["loop_of_commit"]) == 40
    found, tight = results["cases"]
    assert found["generate"]["of_loop"]["s"] > 0 and found["generate"]["of_plain"]["s"] > 0
    assert not found["failed"] and {"generate", "loop"} == tight["failed"].keys(), "one that fails ends no other"
    assert tight["sizes"]["budget_bytes"] == tight["sizes"]["weight_bytes"] // 100 and tight["per_token"]["plain"]


def test_lengths(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="trains adapters")
    sizes = ["--layers", "2", "--width", "128", "--vocabulary", "64", "--batch", "2", "--new", "4"]
    code, results = run("lengths", [*sizes, "--shortest", "5", "--longest", "12", "--lora", "2"], tmp_path)
    assert code == 0 and list(results) == ["plain", "default", "auto"]
    losses = [found["first_loss"] for found in results.values()]
    assert max(losses) - min(losses) < 1e-4, "all ways train the same"
    assert all(len(found["new_lengths_mean_s"]) == 3 and found["seen_length_s"] > 0 for found in results.values())


@pytest.mark.long
def test_images(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="trains adapters")
    code, results = run("images", ["--device", "cpu", "--preset", "small", "--steps", "4", "--batch", "2"], tmp_path)
    assert code == 0 and list(results) == ["plain", "checkpointed", "roundpipe"]
    assert results["roundpipe"]["traces"] == 2
    for losses in zip(*(found["losses"] for found in results.values()), strict=True):
        assert max(losses) - min(losses) < 1e-3, "all ways train the same"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_tokens_than_plains_are_no_failure_in_half_precision(dtype: str) -> None:
    """There, plain PyTorch itself makes others in its next call."""

    class Server:
        def __init__(self, last: int) -> None:
            self._last = last

        def ask(self, tokens: list[list[int]], num_new: int) -> tuple[dict[str, float], list[list[int]]]:
            return {"s": 1.0, "cpu_s": 1.0}, [[*row, 1, self._last][: len(row) + num_new] for row in tokens]

    class Servers:
        def get(self, way: str, case: Any) -> tuple[Server, dict[str, Any]]:
            return Server(2 if way == "plain" else 3), {}

        def drop(self, way: str, case: Any) -> None:
            pass

    case = {"batch": 1, "prompt": 3, "tokens": 2, "vocabulary": 8, "budget": ""}
    options = SimpleNamespace(dtype=dtype, loop_tokens=1)
    measurement = importlib.import_module("generation_before").Measurement(case, Servers(), options)
    measurement.warm_up(0)
    measurement.run()
    found = measurement.results()
    if dtype == "float32":
        assert "50.0%" in found["failed"]["generate"] and "of_plain" not in found["generate"]
    else:
        assert not found["failed"] and found["per_token"]["generate"]["equal_tokens"] == 0.5


@pytest.mark.long
def test_scaling(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", reason="trains a Qwen3")
    path, row = tmp_path / "scaling.json", "tiny all x2"
    options = ["--json", str(path), "--models", "tiny", "--numbers", "2", "--caps", "all"]
    scaling = importlib.import_module("scaling")
    assert scaling.main(["predict", *options]) == 0
    assert scaling.main(["measure", *options, "--device", "cpu"]) == 0
    found = json.loads(path.read_text())
    for way in ("predicted", "rotation", "fsdp2"):
        assert found[way][row]["tokens_per_s"] > 0, (way, found[way][row])
    for way in ("predicted", "rotation"):
        assert found[way][f"{row} shared"]["tokens_per_s"] > 0, (way, found[way])
    assert found["rotation"][row]["peak_bytes"] > 0 and sum(found["rotation"][row]["idle"].values()) < 1
    seconds = found["rotation"][row]["process_s"]
    assert scaling.main(["measure", *options, "--device", "cpu"]) == 0
    assert json.loads(path.read_text())["rotation"][row]["process_s"] == seconds, "what is there is not run again"
    assert "FSDP2" in capsys.readouterr().out


@pytest.mark.long
def test_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("peft", reason="trains adapters")
    for case in ("plain-1.7b", "qwen3-8b-lora"):
        code, results = run("fits", [case, "--device", "cpu", "--small", "--length", "64", "--steps", "1"], tmp_path)
        assert code == 0 and results["steps"][0]["peak_bytes"] > 0
    assert "tokens/s" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the process's memory from /proc")
def test_soak(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", reason="trains a Llama")
    _, results = run("soak", ["--calls", "16"], tmp_path)  # too short a run to hold the target
    assert sum(results["kinds"].values()) - results["kinds"]["traces"] == 16
    assert results["samples"] and all(one["resident_bytes"] > 0 for one in results["samples"])
    assert "resident" in capsys.readouterr().out


def test_optimizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--width", "16", "--tokens", "8", "--parameters", "1", "--samples", "1"]
    code, results = run("optimizer", sizes, tmp_path)
    assert code == 0, "only --strict fails"
    assert all(results[name]["ratio"] > 0 for name in ("hidden", "float32", "bfloat16"))
    assert capsys.readouterr().out.count("target") == 3


def test_handover(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--width", "8", "--blocks", "2", "--tokens", "2", "--steps", "4", "--warm-up", "3", "--runs", "1"]
    code, results = run("handover", sizes, tmp_path)
    assert code == 0
    for way in ("alloc", "double"):
        assert results[way]["step_s"] > 0 and 0 <= results[way]["exposed"] < 1
    assert capsys.readouterr().out.count("exposed") == 2


def test_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Predictions made before stay in the file beside what is measured; a row that fails has its error."""
    name, path = "2.0b-24-4x1x2048", ["--json", str(tmp_path / "rows.json"), "--small", "--rows"]
    rows = importlib.import_module("rows")
    assert rows.main(["--predict", "H200", *path, f"{name},2.0b-all-8x1x2048-x2"]) == 0
    here = ["--device", "cpu", "--steps", "1", "--warm-up-seconds", "0"]
    assert rows.main([*here, "--compiled", "eager", "--residency", "off,full", "--runs", "1", *path, name]) == 0
    assert rows.main([*here, "--row-seconds", "0.001", *path, "7.2b-head-24-8x1x2048"]) == 1
    document = json.loads((tmp_path / "rows.json").read_text())
    assert (
        document["environment"]["torch"] and "not done" in document["results"]["rows"]["7.2b-head-24-8x1x2048"]["error"]
    )
    found = document["results"]["rows"][name]
    assert found["predicted"]["tokens_per_s"] > 0 and found["ways"].keys() == {"off", "full"}
    assert found["compiled"] == "eager"
    for way in found["ways"].values():
        assert way["seconds"] > 0 and 0 <= way["exposed"] < 1 and way["peak_bytes"] > 0 and way["first_step_s"] > 0
        assert way["stages"] and way["limit"] and {"trace", "first round"} <= way["start_s"].keys()
    assert found["ways"]["full"]["resident_bytes"] > 0 == found["ways"]["off"]["resident_bytes"]
    assert "to 1 card" in capsys.readouterr().out


def test_rows_are_predicted_with_the_library_beside_them(tmp_path: Path) -> None:
    """As on the command line, where another version may be installed, whose classes differ."""
    installed = tmp_path / "installed" / "roundpipe"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("raise ImportError('the library that is installed')\n")
    start = f"import sys, runpy; sys.path[0] = {str(BENCHMARKS)!r}; sys.path.append({str(installed.parent)!r}); "
    start += "sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')"
    sizes = ["--small", "--predict", "H200", "--rows", "2.0b-24-4x1x2048", "--json", str(tmp_path / "rows.json")]
    command = [sys.executable, "-c", start, str(BENCHMARKS / "rows.py"), *sizes]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads((tmp_path / "rows.json").read_text())["results"]["rows"].values()
    assert row["predicted"]["tokens_per_s"] > 0


def test_rounds_are_told_apart_whatever_their_plans() -> None:
    """By their first jobs: plans may change while steps are recorded, and one may be under way as that begins."""
    handover = importlib.import_module("handover")

    def computed(job: int, first: int, part: str, microbatch: int, start_s: float) -> Span:
        args = {"layers": [first, first + 1], "job": job, "microbatch": microbatch, "part": part}
        return Span("cpu (worker 0)", "compute", f"{part}[{first}] m{microbatch}", start_s, start_s + 1.0, args)

    under_way = [computed(6, 0, "backward", 1, 0.0)]
    two_stages = [
        (7, 0, "forward", 0),
        (7, 0, "forward", 1),
        (8, 1, "fused", 0),
        (8, 1, "fused", 1),
        (9, 0, "backward", 0),
    ]
    shared_by_two = [(10, 0, "fused", 0), (11, 0, "fused", 1)]
    one_stage = [(12, 0, "fused", 0), (12, 0, "fused", 1)]
    jobs = [*two_stages, *shared_by_two, *one_stage]
    spans = [computed(*job, 2.0 * number) for number, job in enumerate(jobs, 1)]
    timeline = Timeline([*under_way, *spans])
    assert handover.rounds_of(timeline) == [(2.0, 11.0), (12.0, 15.0), (16.0, 19.0)]
    assert handover.read(timeline, 1, None).step_s == 4.0


@pytest.mark.parametrize("begins_s", [0.0, 2.5])
def test_a_step_has_one_update_however_many_are_seen(begins_s: float) -> None:
    """In part or whole, at any time of a round: here each takes 6 s, its exchange 2 s, and a step 8 s."""
    handover = importlib.import_module("handover")
    spans = []
    for number in range(6):
        step_s = 8.0 * number
        args = {"layers": [0, 1], "job": number, "microbatch": 0, "part": "fused"}
        spans.append(Span("cpu (worker 0)", "compute", "U m0", step_s + 2.0, step_s + 8.0, args))
        wait = Span("cpu (worker 0)", "waits", "optimizer", step_s + 1.0, step_s + 2.0, {"cause": "optimizer"})
        exchanged_s = step_s + begins_s + 2.0
        exchange = Span(OPTIMIZER, "hand-over", "exchange", step_s + begins_s, exchanged_s, {})
        spans += [wait, exchange, Span(OPTIMIZER, "update", "step_fn", exchanged_s, exchanged_s + 6.0, {})]
    found = handover.read(Timeline(spans), 1, None)
    assert (found.step_s, found.update_s, found.hand_over_s) == (8.0, 6.0, 2.0)
    assert (found.exposed, found.optimizer) == (2 / 8, 1 / 8)


def test_a_way_that_fails_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row_run, row_cases = importlib.import_module("row_run"), importlib.import_module("row_cases")

    def fails(*arguments: object) -> None:
        raise ZeroDivisionError("float division by zero")

    monkeypatch.setattr(row_run, "read", fails)
    (row,) = (row for row in row_cases.ROWS if row.name == "2.0b-24-4x1x2048")
    sizes = ["--device", "cpu", "--small", "--steps", "1", "--warm-up-seconds", "0", "--residency", "off"]
    options = importlib.import_module("rows")._parser().parse_args([*sizes, "--json", str(tmp_path / "row.json")])
    num_threads = torch.get_num_threads()
    try:
        way = row_run.measure_row(row, options)["ways"]["off"]
    finally:
        torch.set_num_threads(num_threads)
    assert way["error"] == "ZeroDivisionError: float division by zero"
    assert any("in fails" in line for line in way["traceback"])


@pytest.mark.long
def test_rows_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="trains adapters")
    names = ("2.0b-all-8x4x2048", "qwen3-1.7b-all-8x4x2048", "qwen3-8b-lora-24-4x1x4096", "8.0b-all-8x4x2048-x2")
    sizes = ["--device", "cpu", "--small", "--steps", "1", "--warm-up-seconds", "0", "--rows", ",".join(names)]
    code, results = run("rows", sizes, tmp_path)
    assert code == 0 and set(results["rows"]) == set(names)
    for name in names:
        ways = results["rows"][name]["ways"]
        losses = [way["loss"] for way in ways.values()]
        assert "auto" in ways and losses == pytest.approx([losses[0]] * len(losses), rel=0.01), name


def test_simulator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--layers", "4", "--microbatches", "2", "--milliseconds", "0.5", "--steps", "2"]
    code, results = run("simulator", sizes, tmp_path)
    assert code == 0, "only --strict fails"
    for name in ("compute", "upload", "optimizer"):
        row = results["cases"][name]
        # How near they are depends on the machine and on what else it does: `--strict` judges that, no test.
        assert row["predicted_s"] > 0 < row["measured_s"]
        assert row["predicted_peak_bytes"] > 0 < row["measured_peak_bytes"]
        assert sum(row["idle"].values()) < 1
    assert capsys.readouterr().out.count("predicted") == 6


def test_timeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.json"
    sizes = ["--width", "8", "--blocks", "4", "--tokens", "8", "--warm-up", "1", "--steps", "1", "--link", "1"]
    assert importlib.import_module("timeline").main([*sizes, "--save", str(path)]) == 0
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {
        *(f"cpu (worker {index})" for index in range(4)),
        "optimizer",
    }
    assert "tokens/s (elements of input_ids)" in capsys.readouterr().out


@pytest.mark.long
def test_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All models, on CPU workers whose ledgers count what a device would: after one round predictions hold."""
    table = tmp_path / "memory.md"
    arguments = ["--device", "cpu", "--small", "--caps", "24", "--rounds", "2", "--markdown", str(table)]
    code, results = run("memory", arguments, tmp_path)
    assert code == 0, capsys.readouterr().out
    assert len(results["cases"]) >= 12
    for found in results["cases"].values():
        assert found["then"]["low"] <= 0.02 and found["then"]["high"] <= 0.05
        assert found["peak_bytes"] > 0 and len(found["rounds"]) == 2
    assert table.read_text().count("\n") == 4 + len(results["cases"])


@pytest.mark.long
def test_residency(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, results = run("residency", ["--device", "cpu", "--memory", "1GiB", "--small"], tmp_path)
    assert code == 0 and results.keys() == {"lora", "full"}
    assert all(found["ways"].keys() == {"off", "auto", "full", "plain"} for found in results.values())
    off, auto = (results["lora"]["ways"][way] for way in ("off", "auto"))
    assert auto["uploaded_bytes"] < 0.5 * off["uploaded_bytes"] and auto["resident_bytes"] > 0
    assert results["full"]["ways"]["full"]["uploaded_bytes"] < results["full"]["ways"]["auto"]["uploaded_bytes"]
    assert "of plain" in capsys.readouterr().out


def test_a_way_that_does_not_end_costs_no_other_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", reason="the processes would train a Qwen3")
    options = ["--device", "cpu", "--model", "tiny", "--ways", "rotation,sharded", "--limit", "0"]
    code, results = run("processes", options, tmp_path)
    assert code == 1
    assert results["rotation"]["error"] == "not done in time (rank 0: started)"
    assert results["sharded"]["error"] == "not done in time (rank 0: started; rank 1: started)"
    assert "not done in time" in capsys.readouterr().out


@pytest.mark.long
def test_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", reason="trains a Qwen3")
    sizes = ["--model", "tiny", "--microbatches", "4", "--batch", "1", "--warm-up", "1", "--steps", "1"]
    code, results = run("processes", ["--device", "cpu", *sizes, "--limit", "250"], tmp_path)
    assert code == 0, results
    for way in ("rotation", "data-parallel", "sharded", "stages"):
        assert results[way]["tokens_per_s"] > 0 and results[way]["steps"] == 1
    assert results["sharded"]["optimizer_s"].keys() >= {"averaging", "update"}
    assert "of rotation" in capsys.readouterr().out
