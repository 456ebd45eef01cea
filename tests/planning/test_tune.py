"""`distsim tune`: the order of a search, what it leaves out, what it says of the best, and what it keeps."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distsim.cli.dispatch import main
from distsim.errors import UsageError
from distsim.planning.points import KeptPoints
from distsim.planning.search import Axis, Objective, Search, axis_of, difference, spent
from distsim.planning.variations import Variation, parse_variation, point_of, run_kept, script
from distsim.scenario.expect.result import Result
from distsim.scenario.pool import one_by_one
from distsim.text.units import seconds_of
from tests.documents import checked
from tests.planning.test_sweep_scripts import TRAIN


def result(step_s: float | None, fits: bool = True, exit_code: int = 0, **figures: float) -> Result:
    found = {"fits": float(fits), "gpus": 8.0, "peak_gpu_memory_bytes": 1e9, **figures}
    if step_s is not None:
        found["step_s"] = step_s
    return Result("x", "x.toml", figures=found, exit_code=exit_code)


def searched(axes: list[Axis], run: Callable[[dict[str, Any]], Result], most: int = 2) -> tuple[Search, list[Any]]:
    search, order = Search(axes, Objective("tokens/s")), []
    while places := search.next_points(most):
        for place in places:
            settings = search.settings(place)
            order.append(tuple(settings.values()))
            search.add(place, run(settings))
    return search, order


AXES = [axis_of(Variation("--tp", (1, 2, 4, 8))), axis_of(Variation("--mbs", (1, 2, 4, 8)))]


def test_what_needs_as_much_memory_is_left_out() -> None:
    """Less tensor parallelism and larger micro-batches need more; a point that was run is not ruled out."""

    def run(settings: dict[str, Any]) -> Result:
        fits = settings["--mbs"] <= settings["--tp"]
        return result(8.0 / settings["--mbs"] + settings["--tp"], fits, 0 if fits else 1)

    search, order = searched(AXES, run)
    assert order[0] == (8, 1), "the least memory first"
    assert search.settings(search.ranking()[0]) == {"--tp": 2, "--mbs": 2}
    assert len(order) + len(search.ruled_out) == 16
    assert len(search.ruled_out) >= 2
    assert search.untried == []
    assert all(search.settings(place)["--mbs"] > search.settings(place)["--tp"] for place in search.ruled_out)


def test_neighbours_of_the_best_come_first() -> None:
    """Of 1,600 points the best one is found in at most 200 rounds of two, where the way to it goes up."""
    axes = [Axis("--a", tuple(range(40))), Axis("--b", tuple(range(40)))]
    search, best = Search(axes, Objective("tokens/s")), (20, 15)
    for number in range(200):  # noqa: B007 - told below
        places = search.next_points(2)
        for a, b in places:
            search.add((a, b), result(1.0 + abs(a - best[0]) + abs(b - best[1])))
        if best in search.results:
            break
    assert search.ranking()[0] == best
    assert number < 199


@pytest.mark.parametrize(
    ("text", "memory"),
    [
        ("--tp=1,2", (-1.0, -2.0)),
        ("--micro-batch-size=4,2", (4.0, 2.0)),
        ("--ckpt=full,none,selective", (-2.0, 0.0, -1.0)),
        ("--seq=1024,2048", (1024.0, 2048.0)),
        ("on=dgx-h100:1,dgx-h100:2", (-1.0, -2.0)),
        ("on=dgx-h100:1,dgx-a100:1", None),
        ("--ckpt=a,b", None),
        ("--lr=1,2", None),
    ],
)
def test_the_name_of_a_setting_tells_of_memory(text: str, memory: tuple[float, ...] | None) -> None:
    """Of those that are known, and no other."""
    assert axis_of(parse_variation(text)).memory == memory


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90.0), ("30m", 1800.0), ("1.5h", 5400.0), ("45", 45.0), ("soon", None), ("0m", None)]
)
def test_a_budget_is_a_duration(text: str, seconds: float | None) -> None:
    """In seconds, minutes or hours."""
    if seconds is not None:
        assert seconds_of(text) == seconds
        return
    with pytest.raises(UsageError, match="--budget: expected a duration such as 90s, 30m or 2h, got"):
        seconds_of(text)


def test_a_search_has_its_objective() -> None:
    """Tokens of a GPU, the cost of a token, or memory; what failed, or does not fit, has no score."""
    small, quick = result(2.0, peak_gpu_memory_bytes=1e9), result(1.0, peak_gpu_memory_bytes=2e9)
    assert Objective("tokens/s").score(quick) > Objective("tokens/s").score(small)
    assert Objective("memory").score(quick) < Objective("memory").score(small)
    cheap, dear = result(1.0, price=2.0), result(1.0, price=4.0)
    assert Objective("cost").score(cheap) == Objective("cost").score(dear) * 2
    for failed in (result(1.0, fits=False), result(1.0, exit_code=1), result(None)):
        assert Objective("tokens/s").score(failed) == 0.0


def test_why_is_told_from_the_reports_own_figures() -> None:
    """Where the best one's step goes, and which parts of the other's are longer for a token."""
    training = {
        "pacing_rank": 0,
        "ranks": [
            {
                "rank": 0,
                "waits": [{"op": "all_gather_into_tensor", "group": "dp", "moving_s": 0.35, "late_s": 0.0}],
            }
        ],
    }
    best = result(1.0, tokens_per_s=1000.0, step_compute_s=0.9, step_bubble_s=0.1)
    other = result(1.2, tokens_per_s=1000 / 1.2, step_compute_s=0.8, step_exposed_s=0.4)
    other.document = {"training": training}
    assert spent(best) == "a step of 1 s: 90% compute, 10% bubble"
    assert difference(best, other, "tokens/s") == (
        "takes 20.0% longer for a token: 40.0% more exposed communication (all_gather_into_tensor of dp 29% of its "
        "step), 10.0% less compute, 10.0% less bubble"
    )


def test_points_are_kept_for_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By all that determines them; a program that has changed finds none of them, and no point that a limit ended."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    program = tmp_path / "train.py"
    program.write_text("import helper\n")
    (tmp_path / "helper.py").write_text("x = 1\n")
    config = tmp_path / "model.json"
    config.write_text("1")
    scenario = script(program, ["--model=model.json"])
    one, two = (point_of(scenario, {"--tp": tp}) for tp in (1, 2))
    kept = KeptPoints(scenario)
    assert kept.load(one) is None
    ended = Result("x", "x.toml", site=("x.py", 1), culprits=(2,), figures={"step_s": 1.0})
    kept.save(one, ended)
    kept.save(two, Result("x", "x.toml", limit="limits.wall_time_s"))
    assert kept.load(one) == ended
    assert (kept.load(one, "4 steps"), kept.load(two)) == (None, None), "another stage, and one that a limit ended"
    assert len(KeptPoints(script(program, ["--other"]))) == 1
    config.write_text("23")
    assert kept.load(one) is None, "a file that its arguments name has changed"
    for file, text in (("helper.py", "x = 2\n"), ("train.toml", "")):
        (tmp_path / file).write_text(text)
        assert len(KeptPoints(scenario)) == 0
    for file in kept.folder.iterdir():
        os.utime(file, (1.0, 1.0))
    assert len(kept) == 0
    kept.discard_old()
    assert not kept.folder.exists()


@pytest.mark.slow
def test_a_script_is_tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The best layout, the runner-up and why are printed, the failed ones with their reasons, and all are in CSV,
    JSON and on a page; what was kept of an interrupted search is not run again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    flags = ["--on", "dgx-h100:1", "--nproc-per-node", "2", "-n", "1"]
    out = [f"--{kind}={tmp_path}/t.{kind}" for kind in ("csv", "json", "html")]
    command = ["tune", *flags, *out, "--vary", "--width=512,513,1024", str(path)]

    def stopped(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Search, "finalists", stopped)
        assert main(command) == 130
    captured = capsys.readouterr()
    assert "points; they are kept in " in captured.err
    assert main([*command]) == 0
    captured = capsys.readouterr()
    assert "results of this script kept from before, of any search; what is asked for again" in captured.err
    assert captured.out.splitlines()[0].split()[:1] == ["best"]
    assert "runner-up" in captured.out
    assert "exit code 1: width must be even" in captured.out
    document = checked((tmp_path / "t.json").read_text())
    assert [point["valid"] for point in document["points"]][:2] == [True, True]
    rows = list(csv.DictReader((tmp_path / "t.csv").read_text().splitlines()))
    assert len(rows) == len(document["points"])
    assert "Time and memory" in (tmp_path / "t.html").read_text()
    monkeypatch.setattr("distsim.scenario.pool.run_scenario", stopped)
    assert main([*command]) == 0, "all points are kept"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--vary", "--a=" + ",".join(map(str, range(1000))), "--vary", "--b=" + ",".join(map(str, range(1000)))],
         "--vary: 1,000,000 points, the most is 10,000; give fewer values, or fewer --vary"),
        (["--price", "cheap", "--vary", "--a=1"], "--price: expected an amount of money for a GPU's hour, such as 2.5"),
        (["--budget", "soon", "--vary", "--a=1"], "--budget: expected a duration such as 90s, 30m or 2h, got 'soon'"),
        (["--objective", "cost", "--on", "frontier:1", "--vary", "--a=1"],
         "--objective cost: expected --price AMOUNT of a GPU's hour"),
        (["--vary", "a=1,2"], "--vary a=1,2: expected a flag of the script; did you mean --vary --a=1,2?"),
        ([], "nothing to vary: expected --vary --FLAG=A,B, or several clusters after --on"),
        (["--vary", "--a=1,2"], "no point is valid (the first one: exit code 1: no); vary other values"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(
    words: list[str], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With what was expected and what to do."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import sys\nsys.exit('no')\n")
    assert main(["tune", *words, "train.py"]) == 2
    assert line in capsys.readouterr().err.splitlines()[-1]


def test_a_script_without_steps_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It finishes, so nothing has failed, and it has no figure that could be compared."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.py").write_text("")
    assert main(["tune", "--vary", "--a=1", "empty.py"]) == 2
    out, err = capsys.readouterr()
    assert "1 point ran; 1 of them fits; 1 of these ended without a step" in out
    assert "--a=1: it finished, but no optimizer completed a step" in out
    assert "no point is valid (the first one: it finished, but no optimizer" in err.splitlines()[-1]
    assert err.splitlines()[-1].endswith("; tune a script that trains on GPUs (calls optimizer.step)")


def test_a_point_that_finished_decides_on_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other values do not make a script train, even if the first point failed for another reason."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "half.py").write_text("import sys\nsys.exit('no' if '--a=1' in sys.argv else None)\n")
    assert main(["tune", "-n", "1", "--vary", "--a=1,2", "half.py"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "no point is valid (--a=2: it finished, but no optimizer" in last
    assert last.endswith("; tune a script that trains on GPUs (calls optimizer.step)")


def test_a_point_runs_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What has ended is kept: the next command with the same points reads it, and runs the others."""
    (tmp_path / "t.py").write_text("with open('ran', 'a') as file:\n    file.write('x')\n")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    scenario = script(tmp_path / "t.py", [], on="dgx-h100:1", nproc_per_node=1)
    for settings in ([{"--tp": 1}], [{"--tp": 1}, {"--tp": 2}]):
        results = dict(run_kept(scenario, one_by_one(settings), KeptPoints(scenario), None))
        assert [results[number].kind for number in range(len(settings))] == ["healthy"] * len(settings)
        assert (tmp_path / "ran").read_text() == "x" * len(settings)


def test_a_point_that_another_command_runs_is_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two commands do not run one point twice: the second takes the first one's result."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "t.py").write_text("raise SystemExit('must not run')\n")
    scenario = script(tmp_path / "t.py", [], on="dgx-h100:1", nproc_per_node=1)
    point = point_of(scenario, {"--tp": 1})
    first, second = KeptPoints(scenario), KeptPoints(scenario)
    assert first.claim(point)
    monkeypatch.setattr(
        "distsim.scenario.pool.time.sleep",
        lambda s: first.save(point, Result("t", "t.py", virtual_time_s=7.0)),
    )
    results = dict(run_kept(scenario, one_by_one([{"--tp": 1}]), second, None))
    assert results[0].virtual_time_s == 7.0
    assert first.claim(point), "the claim ended"
    second.discard_old()
    assert len(second) == 1
    first.release(point)
