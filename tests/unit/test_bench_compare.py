"""The arithmetic of the comparison with other servers."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from tests.load.compare_peers import (
    OURS,
    Measurement,
    alternate,
    parse_options,
    ratios,
    results_table,
    spread,
    tokenloom_server,
    transformers_server,
)

PEER = "transformers serve, auto"


def measurement(server: str, concurrency: int, repeat: int, rate: float, failed: int = 0) -> Measurement:
    figures = {"output_tokens_per_s": rate, "failed": failed, "short_outputs": 0}
    return Measurement(server, concurrency, repeat, figures | {"ttft_s": {"p50": 0.25}, "tpot_s": None})


def test_each_server_runs_as_often_early_as_late() -> None:
    ours, peer = (tokenloom_server(Path("m"), port, 64, []) for port in (1, 2))
    assert list(alternate([ours, peer], 3)) == [(0, ours), (0, peer), (1, peer), (1, ours), (2, ours), (2, peer)]


def test_ratios_pair_the_runs_of_one_repeat() -> None:
    """A machine that gets slower from repeat to repeat must not change the ratio; a dead run gives none."""
    runs = [measurement(OURS, 16, 0, 100), measurement(PEER, 16, 0, 25), measurement(OURS, 1, 0, 7)]
    runs += [measurement(OURS, 16, 1, 40), measurement(PEER, 16, 1, 10), measurement(PEER, 1, 0, 7)]
    runs += [measurement(OURS, 16, 2, 90), measurement(PEER, 16, 2, 0, failed=32)]
    assert ratios(runs, PEER, 16) == [4.0, 4.0]
    assert ratios(runs, PEER, 1) == [1.0]
    assert ratios(runs, "nobody", 16) == []


def test_spread_is_median_and_range() -> None:
    assert spread([3.0, 1.0, 2.0]) == "2.00 (1.00–3.00)"
    assert spread([]) == "–"


def test_table_has_both_rows_and_the_failures() -> None:
    console = Console(width=160, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(results_table([measurement(OURS, 16, 0, 100), measurement(PEER, 16, 0, 25, failed=3)]))
    lines = [line for line in console.export_text().splitlines() if " 16 " in line]
    ours, peer = lines
    assert "100.00" in ours
    assert "25.00" in peer
    assert "4.00 × (4.00–4.00)" in peer
    assert " 3 " in peer


def test_both_servers_are_asked_for_the_same_answers() -> None:
    """Same endpoint, greedy, exactly so many tokens; the peer, which refuses ignore_eos, by its generation config."""
    ours = tokenloom_server(Path("m"), 1, 64, []).target.body("p")
    theirs = transformers_server(Path("v/bin/python"), Path("m"), 1, 64, "auto", []).target.body("p")
    assert (ours["prompt"], ours["max_tokens"], ours["temperature"], ours["ignore_eos"]) == ("p", 64, 0.0, True)
    assert (theirs["prompt"], theirs["max_tokens"], theirs["temperature"]) == ("p", 64, 0.0)
    assert "ignore_eos" not in theirs
    config = json.loads(theirs["generation_config"])
    assert config == {"max_new_tokens": 64, "do_sample": False, "eos_token_id": -1}


def test_defaults_are_the_published_load() -> None:
    options = parse_options([])
    assert (options.concurrency, options.prompt_tokens, options.max_tokens) == ([16, 1], 128, 64)
    assert not options.peer_venv.is_relative_to(Path(__file__).parents[2])
    assert parse_options(["-c", "4"]).concurrency == [4]


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_the_peer_runs_with_continuous_batching_on_loopback(dtype: str) -> None:
    command = transformers_server(Path("v/bin/python"), Path("m"), 7, 64, dtype, ["--cb-block-size", "32"]).command
    assert command[:3] == ["v/bin/transformers", "serve", "m"]
    assert "--continuous-batching" in command
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert command[command.index("--dtype") + 1] == dtype
    assert command[-2:] == ["--cb-block-size", "32"]
