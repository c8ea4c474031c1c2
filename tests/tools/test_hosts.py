"""`plan --hosts`: what a network adds, what hosts need, and which way is the fastest."""

from __future__ import annotations

from typing import Any

import pytest

from roundpipe.tools import command_line as cli
from roundpipe.tools.hosts import Network, ScaleOut, fastest, hosts_text
from tests.tools.cases_command_line import H100, QWEN, Output, json_of


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Output:
    def call(*argv: Any) -> tuple[int, str, str]:
        exit_code = cli.main([str(each) for each in argv])
        return (exit_code, *capsys.readouterr())

    return call


def test_ways_to_use_more_hosts(run: Output) -> None:
    pytest.importorskip("transformers")
    given = ["plan", QWEN, *H100, "--batch", 4, "--microbatches", 2, "--seq", 64, "--hosts", 4]
    given += ["--residency", "off"]  # so that one host alone streams as one of several does
    found = json_of(run(*given, "--network", "10GB/s", "--json"))
    ways = {way["name"]: way for way in found["hosts"]["ways"]}
    copies, model = (found["host_memory"][name] for name in ("optimizer_gradients", "gradients"))
    average, shards = ways["data parallel"], ways["sharded optimizer"]
    assert average["sent_bytes"] == 2 * 3 / 4 * copies and shards["sent_bytes"] == 2 * 3 / 4 * model
    assert average["host_bytes"] == found["host_memory"]["needed_bytes"]
    assert average["host_bytes"] - shards["host_bytes"] == pytest.approx(3 / 4 * 4 * copies)
    assert average["seconds"] - average["network_s"] == pytest.approx(found["step"]["seconds"])
    assert average["seconds"] > average["sent_bytes"] / 10e9 > average["network_s"] > shards["network_s"] > 0
    assert found["hosts"]["fastest"] == min((w for w in ways.values() if w["fits"]), key=lambda w: w["seconds"])["name"]
    assert {"GPipe", "1F1B", "interleaved 1F1B", "one host"} <= ways.keys()
    assert ways["one host"]["seconds"] < 4.5 * found["step"]["seconds"] and not ways["one host"]["sent_bytes"]
    exit_code, _, message = run(*given)
    assert exit_code == 2 and "--hosts N and --network RATE go together" in message


def test_ways_in_words() -> None:
    network = Network(2, 1e9)
    ways = [
        ScaleOut("one host", 2.0, host_bytes=2**30, fits=True),
        ScaleOut("1F1B", 1.0, 0.25, remark="a device needs 1 GiB"),
    ]
    text = hosts_text(ways, network, 100, "tokens")
    assert "2 hosts, each with this batch, over 1 GB/s: the fastest that fits: one host" in text
    assert "250 ms" in text and "a device needs 1 GiB" in text
    assert fastest(ways[1:]) is None and "none fits" in hosts_text(ways[1:], network, 100, "tokens")
