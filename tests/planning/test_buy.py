"""`distsim buy`: the fewest nodes, the offers, the choice among them with its reason, and what it refuses."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from distsim.cli.dispatch import main
from distsim.planning.buy.plan import fewest
from distsim.scenario.expect.result import Result
from tests.documents import checked

RATES = {"dgx-h100": 60e3, "dgx-b200": 120e3, "frontier": 30e3}
"""Tokens/s of a node."""


@pytest.mark.parametrize(
    ("least", "most", "wanted", "tries"),
    [(1, 64, 1, 1), (1, 64, 5, 6), (1, 64, 64, 12), (1, 100, 99, 14), (3, 64, 7, 5), (1, 64, 65, 7), (6, 6, 6, 1)],
)
def test_the_fewest_nodes_are_found_by_doubling_and_bisection(least: int, most: int, wanted: int, tries: int) -> None:
    """None where not even the most nodes are enough."""
    tried: list[int] = []

    def search() -> Iterator[int | None]:
        yield (yield from fewest(least, most))

    sizes = search()
    number = next(sizes)
    for _ in range(tries):
        assert number is not None
        tried.append(number)
        number = sizes.send(number >= wanted)  # type: ignore[attr-defined]
    assert number == (wanted if wanted <= most else None)
    assert len(set(tried)) == tries


FRAMES = 'Traceback (most recent call last):\n  File "fixed.py", line 9, in build\n'
RAISED = [
    {
        "ranks": [0, 1],
        "type": "Misfit",
        "message": "expected\n48 ranks",
        "traceback": f"{FRAMES}Misfit: expected\n48 ranks",
    },
    {"ranks": [2], "type": "KeyError", "message": "'mlp'", "traceback": f"{FRAMES}KeyError: 'mlp'"},
]


def outcome(settings: Mapping[str, Any], last_step: int | None, script: str) -> Result:
    """A run of a script that needs 16 shards, scales at 90 % to the double, and is described by its own text."""
    kind, _, nodes = settings["on"].rpartition(":")
    count, tp = int(nodes), settings.get("--tp", 1)
    if "fixed" in script and count != 6:
        return Result("t", "t.py", exit_code=1, document={"failures": RAISED})
    figures = {"gpus": 8.0 * count, "peak_gpu_memory_bytes": 8e10, "gpu_memory_share": 0.9, "price": 10.0}
    if "stepless" in script:
        return Result("t", "t.py", figures=figures | {"fits": 1.0})
    if count * tp < 2:
        return Result("t", "t.py", exit_code=1, figures=figures | {"fits": 0.0, "missing_gpu_memory_bytes": 1e9})
    efficiency = 0.5 if "flat" in script and count > 8 else 0.9 if kind == "dgx-h100" else 0.99
    rate = RATES[kind] * count * efficiency ** (count.bit_length() - 1) / tp
    step_s = 1.0 if last_step == 2 else 1.01
    figures |= {"fits": 1.0, "step_s": step_s, "step_low_s": 0.9, "step_high_s": 1.1, "step_compute_s": 0.95}
    figures |= {"tokens_per_s": rate, "mfu": 0.4, "power_w": 700.0, "power_is_limit": 1.0}
    return Result("t", "t.py", figures=figures)


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int | None]]:
    """The points that ran, with their steps."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    for name in ("train", "fixed", "stepless", "flat"):
        (tmp_path / f"{name}.py").write_text("")
    points: list[tuple[str, int | None]] = []

    def run(scenario: Any, ask: Any, *_: object, last_step: int | None) -> Iterator[tuple[Any, Result]]:
        while following := ask(2):
            for key, chosen in following:
                points.append((chosen["on"] + str(chosen.get("--tp", "")), last_step))
                yield key, outcome(chosen, last_step, str(scenario.file))

    monkeypatch.setattr("distsim.planning.buy.plan.run_kept", run)
    monkeypatch.setattr("distsim.planning.tables.ratio_error", lambda: 1.05)
    return points


def test_offers_and_the_choice(ran: list[tuple[str, int | None]], capsys: pytest.CaptureFixture[str]) -> None:
    """The cheapest is recommended, with its reason and what it cannot be told apart from; nothing is wider than 80
    columns; the chosen offers ran for four steps; all figures are in the JSON and CSV files.
    """
    words = ["--on", "dgx-h100,dgx-b200", "--tokens", "1T", "--price", "dgx-b200=14", "--json=o.json", "--csv=o.csv"]
    assert main(["buy", *words, "train.py"]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    text = " ".join(printed.split())
    assert text.startswith("recommended dgx-b200:16, 128 GPUs: 6.3 days, 270k (also the fastest)")
    assert "it costs 3.1% more than dgx-b200:2, less than the error, at 13% of the time" in text
    assert "cannot be told apart from dgx-b200:2" in text
    assert "dgx-h100: 10 a GPU hour (list price of 2026 in USD, on demand: OCI" in text
    assert "dgx-b200: 14 a GPU hour (list price" in text, "the price given is the list price"
    document = checked(Path("o.json").read_text())
    sizes = [offer["machine"] for offer in document["offers"]]
    assert sizes == [f"{kind}:{nodes}" for kind in ("dgx-h100", "dgx-b200") for nodes in (2, 4, 8, 16)]
    first = document["offers"][0]
    assert (first["gpus"], first["bound"], first["layout"]) == (16, "compute", "")
    assert first["seconds"] == pytest.approx(1e12 / (2 * 60e3 * 0.9))
    assert first["amount"] == pytest.approx(first["seconds"] / 3600 * 16 * 10.0)
    assert [choice["title"] for choice in document["choices"]] == ["recommended", "cheapest", "fastest"]
    rows = list(csv.DictReader(Path("o.csv").read_text().splitlines()))
    assert [row["machine"] for row in rows] == sizes
    assert {name for name, steps in ran if steps == 4} == {"dgx-b200:2", "dgx-b200:16"}
    assert sorted(name for name, steps in ran if steps == 2)[:3] == ["dgx-b200:1", "dgx-b200:16", "dgx-b200:2"]


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["--deadline", "30d"], 0, "recommended dgx-b200:16, 128 GPUs: 6.3 days"),
        (["--on", "dgx-h100", "--deadline", "30d"], 0, "recommended dgx-h100:16, 128 GPUs: 18.4 days, 565k"),
        (["--on", "dgx-h100", "--budget", "500k"], 0, "the shortest time within --budget 500k"),
        (["--deadline", "5d"], 5,
         "nothing meets --deadline 5.0 days: the nearest is dgx-b200:16, 6.3 days for 193k"),
        (["--budget", "100k"], 5, "nothing meets --budget 100k: the nearest is dgx-b200:2, 48.7 days for 187k"),
        (["--nodes", "1..16", "--deadline", "5d"], 5, "; --nodes 1..64 compares more nodes"),
        (["--deadline", "6.5d"], 0, "may miss --deadline 6.5 days: likely up to 6.8 days"),
    ],
)  # fmt: skip
def test_a_deadline_and_a_budget(
    words: list[str], code: int, sentence: str, ran: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """They decide what is recommended; if nothing meets them, the nearest offer is named, and the exit code is 5."""
    on = [] if "--on" in words else ["--on", "dgx-h100,dgx-b200"]
    assert main(["buy", *on, "--tokens", "1T", *words, "train.py"]) == code
    assert sentence in " ".join(capsys.readouterr().out.split())


def test_twice_the_nodes_try_the_best_layouts_of_half(ran: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Two that fitted there, and those that did not fit: a layout that was worse is not tried again."""
    assert main(["buy", "--on", "dgx-h100", "--tokens", "1T", "--vary", "--tp=1,2,4", "train.py"]) == 0
    capsys.readouterr()
    tried = {name for name, steps in ran if steps == 2}
    assert tried == {"dgx-h100:" + name for name in ("11", "12", "14", "21", "22", "24", "41", "42", "81", "82")}


def test_layouts_are_searched_on_each_number_of_nodes(ran: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    """One that needs less memory fits on fewer nodes; the best one of each size is its offer."""
    words = ["--on", "dgx-h100", "--tokens", "1T", "--vary", "--tp=1,2", "--json=o.json"]
    assert main(["buy", *words, "train.py"]) == 0
    offers = json.loads(Path("o.json").read_text())["offers"]
    assert [(offer["machine"], offer["layout"]) for offer in offers] == [
        ("dgx-h100:1", "--tp=2"), ("dgx-h100:2", "--tp=1"), ("dgx-h100:4", "--tp=1"), ("dgx-h100:8", "--tp=1")
    ]  # fmt: skip
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_what_does_not_scale_is_left_out(ran: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    """The first size that does not scale is the last one that is shown."""
    assert main(["buy", "--on", "dgx-b200", "--tokens", "1T", "--json=o.json", "flat.py"]) == 0
    assert [offer["nodes"] for offer in json.loads(Path("o.json").read_text())["offers"]] == [2, 4, 8, 16]
    text = " ".join(capsys.readouterr().out.split())
    assert "twice as many as 8 nodes give less than 1.25 times the tokens/s" in text


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--on", "dgx-h100", "train.py"], "--tokens: expected a number such as 1T, the tokens of the whole training"),
        (["--on", "dgx-h100", "--tokens", "1T", "x.toml"], "expected a training script (.py), got x.toml"),
        (["--tokens", "1T", "train.py"], "--on: expected kinds of machine, such as dgx-h100,dgx-b200"),
        (["--on", "dgx-h100:4", "--tokens", "1T", "train.py"], "--on dgx-h100:4: expected a kind of machine, dgx-h100"),
        (["--on", "p4de", "--tokens", "1T", "train.py"], "unknown cluster 'p4de'; did you mean 'aws-p4de'?"),
        (["--on", "ethernet-cpu", "--tokens", "1T", "train.py"], "--on ethernet-cpu: expected a machine with GPUs"),
        (["--on", "dgx-h100,frontier", "--tokens", "1T", "train.py"],
         "no list price of frontier: give that of a GPU hour, --price frontier=AMOUNT"),
        (["--on", "dgx-h100", "--price", "dgx-b20=1", "--tokens", "1T", "train.py"],
         "--price dgx-b20=1: expected one of dgx-h100 before =, got dgx-b20"),
        (["--on", "dgx-h100", "--tokens", "1T", "--nodes", "8..1", "train.py"],
         "--nodes: expected a range of numbers of nodes such as 1..64, got '8..1'"),
        (["--on", "dgx-h100", "--tokens", "1T", "--deadline", "soon", "train.py"],
         "--deadline: expected a duration such as 30d, 6w or 12h, got 'soon'"),
        (["--on", "dgx-h100", "--tokens", "1T", "--budget", "much", "train.py"],
         "--budget: expected a number such as 2M, an amount of money, got much"),
        (["--on", "dgx-h100", "--tokens", "1T", "stepless.py"], "no optimizer completed a step on a GPU"),
        (["--on", "dgx-h100", "--tokens", "1T", "--nodes", "1", "train.py"],
         "dgx-h100: it does not fit on up to 1 nodes, where it is out of memory: 953.7 MiB were missing at that point"),
        (["--on", "dgx-h100", "--tokens", "1T", "fixed.py"],
         "dgx-h100: it runs on none of 1, 2, 4, 8, 16, 32, 64 nodes (exit code 1: Misfit: expected); "
         "if it needs a fixed number of GPUs, give that number of nodes: --nodes N"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(words: list[str], line: str, ran: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    """With what was expected, what came, and what to do."""
    assert main(["buy", *words]) == 2
    assert line in capsys.readouterr().err.splitlines()[-1]


def test_an_exception_of_the_script_is_shown_whole(ran: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Each once, with its points and ranks."""
    assert main(["buy", "--on", "dgx-h100", "--tokens", "1T", "--nodes", "1..4", "fixed.py"]) == 2
    printed = capsys.readouterr().out
    assert printed.startswith(
        f"\non=dgx-h100:1; on=dgx-h100:2; on=dgx-h100:4, ranks 0,1:\n{FRAMES}Misfit: expected\n48 ranks"
    )
    assert printed.count("Misfit") == printed.count("KeyError") == 1


def test_a_script_of_a_fixed_size_has_one_offer(ran: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Where its number of nodes is given."""
    assert main(["buy", "--on", "dgx-b200", "--tokens", "1T", "--nodes", "6", "fixed.py"]) == 0
    assert capsys.readouterr().out.startswith("recommended")


def test_the_page_begins_with_the_recommendation(ran: list[Any]) -> None:
    """Then cost over time, the offers, how sure they are, and what was assumed."""
    assert main(["buy", "--on", "dgx-h100,dgx-b200", "--tokens", "1T", "--html=o.html", "train.py"]) == 0
    text = Path("o.html").read_text()
    titles = ("<h1>1T tokens of train.py", "<dt>recommended</dt><dd><b>dgx-b200:16", "Cost and time", "Offers")
    places = [text.index(title) for title in (*titles, "How sure", "What was assumed")]
    assert places == sorted(places)
    assert "<li>dgx-b200:16: 5.6 days to 6.8 days, 172k to 210k, in 8 cases of 10</li>" in text


def test_failures_cost_time_and_money(ran: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    """With --mtbf an offer's days are those of its steps by its goodput, as is its cost; more nodes fail more often.

    Without --checkpoint-takes, and with a script that writes none, the command says what is missing.
    """
    words = ["buy", "--on", "dgx-h100", "--tokens", "1T", "--json=o.json", "--mtbf", "1000h"]
    assert main([*words, "--checkpoint-every", "30m", "--checkpoint-takes", "60s", "train.py"]) == 0
    text = capsys.readouterr().out
    assert "goodput" in text
    assert max(map(len, text.splitlines())) <= 80
    offers = checked(Path("o.json").read_text())["offers"]
    shares = [offer["goodput"] for offer in offers]
    assert shares == sorted(shares, reverse=True)
    assert 0.85 < shares[-1] < shares[0] < 0.97
    first = offers[0]
    assert first["seconds"] == pytest.approx(1e12 / (2 * 60e3 * 0.9) / first["goodput"])
    assert first["amount"] == pytest.approx(first["seconds"] / 3600 * 16 * 10.0)
    assert first["checkpoint_every_s"] == 1800.0
    assert main([*words, "--checkpoint-every", "5s", "--checkpoint-takes", "60s", "train.py"]) == 0
    assert capsys.readouterr().out.count("a checkpoint takes 60 s, longer than the 5 s of steps between two") == 1
    assert main([*words, "train.py"]) == 2
    assert "expected --checkpoint-takes TIME" in capsys.readouterr().err
    assert main([*words[:-2], "--checkpoint-every", "30m", "train.py"]) == 2
    assert "expected --mtbf TIME or --failures FILE, too" in capsys.readouterr().err
