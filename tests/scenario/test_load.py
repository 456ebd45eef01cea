"""Files that are wrong: every fault at once, each with its path."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from distsim.debug.records.kinds import Kind
from distsim.errors import UsageError
from distsim.scenario import find_scenarios, load_scenario, load_scenarios
from distsim.scenario.file.load import BadFile, read_faults
from distsim.scenario.file.schema import json_schema
from tests.scenario.made import made

WRONG = {
    "bakend = 'sim'\n[expect]": "bakend: unknown key",
    "nnodes = -1\n[expect]": "nnodes: expected greater than or equal to 1, got -1",
    "seed = 1.5\n[expect]": "seed: expected",
    "[limits]\nvirtual_time = 3\n[expect]": "did you mean 'virtual_time_s'?",
    "[expect]\nkind = 'missing_rnk'": "expect.kind: expected 'healthy'",
    "[expect]\nculprits = [4]": "expect.culprits: no rank 4: the world has ranks 0 to 3",
    "[expect]\nprints = { 9 = ['x'] }": "expect.prints.9: no such rank",
    "[expect]\nprints = { one = ['x'] }": "expect.prints.one",
    "[expect]\nline = '# <- nowhere'": "expect.line: no line of made.py ends with '# <- nowhere'",
    "[expect]\nstep_time = { line = '# no' }": "expect.step_time.line: no line of made.py",
    "[expect]\nresults = { 0 = 1 }": "expect.results: a script returns nothing",
    "[expect]\nmemory_below = 'much'": "expect.memory_below: expected a memory size such as '80GiB'",
    "[expect]\nmemory_below = 0": "expect.memory_below: expected a memory size above zero, got 0",
    "backend = 'gloo'\n[expect]\nmemory_below = 9": "expect.memory_below: known of simulated runs only",
    "[expect]\nbusbw_above = { all_reduce = 'fast' }": "expect.busbw_above.all_reduce: expected a bandwidth",
    "schedule = 'buffered'\n[expect]": "schedule: there are none any more",
    "explore = 'some'\n[expect]": "explore: expected 'all', a number of runs (200) or a time ('60s'), got 'some'",
    "explore = 'all'\nbackend = 'gloo'\n[expect]": "explore: of simulated runs only",
    "on = 'dgx-h200x'\n[expect]": "on: ",
    "on = 'dgx-h100:1'\nnproc_per_node = 9\n[expect]": "on: asked for 9 ranks",
    "program = 'none.py'\n[expect]": "program: no script none.py beside the file",
    "program = 'module'\n[expect]": "program: expected script.py, script.py:function or module:function",
    "faults = [{ kind = 'crash', ranks = [1] }]": (
        "faults[0].kind: unknown key; expected the key what, which is one of corrupt, crash"
    ),
    "faults = [{ ranks = [1] }]": "faults[0]: expected the key what, which is one of corrupt, crash",
    "faults = [{ what = 'link_slw' }]": "faults[0].what: expected one of corrupt, crash",
    "faults = [{ what = 'link_cut', link = 'n9/nic0->leaf0' }]": "faults[0]: no link 'n9/nic0->leaf0' in ethernet-cpu",
    "faults = [{ what = 'nic_down', nic = 'leaf0' }]": "faults[0]: no NIC 'leaf0'",
    "faults = [{ what = 'switch_down', switch = 'n0/nic0' }]": "faults[0]: no switch 'n0/nic0'",
    "faults = [{ what = 'crash', ranks = [4] }]": "faults[0]: no rank 4",
    "faults = [{ what = 'crash', ranks = [] }]": "faults[0].ranks: expected a list that should have",
    "faults = [{ what = 'crash', ranks = [1], signal = 'SIGFOO' }]": "faults[0]: no signal 'SIGFOO'",
    "faults = [{ what = 'exception', ranks = [1], exception = 'Foo' }]": "faults[0]: no exception 'Foo'",
    "faults = [{ what = 'exception', ranks = [1], exception = 'no.such.Foo' }]": (
        "faults[0]: no exception 'no.such.Foo': no module no.such"
    ),
    "faults = [{ what = 'exception', ranks = [1], exception = 'json.loads' }]": (
        "faults[0]: no exception 'json.loads': json does not define it"
    ),
    "faults = [{ what = 'exception', ranks = [1], exception = 'UnicodeDecodeError' }]": (
        "faults[0]: UnicodeDecodeError cannot be made of a message alone; try RuntimeError"
    ),
    "faults = [{ what = 'crash', ranks = [1], call = 'sum' }]": "faults[0].call: expected a call such as",
    "faults = [{ what = 'crash', ranks = [1], call = 1, at_s = 1 }]": "faults[0]: expected at_s or call, got both",
    "faults = [{ what = 'delay', ranks = [1], delay_s = '1 parsec' }]": "faults[0].delay_s: expected a time",
    "faults = [{ what = 'link_flap', link = '*', period_s = 1, down_s = 2 }]": "expected down_s below period_s",
    "faults = [{ what = 'jitter', period_s = '1ms', pause_s = '1ms' }]": "faults[0]: expected pause_s below period_s",
    "faults = [{ what = 'link_lossy', link = '*', loss = 1.5 }]": "faults[0].loss: expected less than 1",
    "backend = 'gloo'\nfaults = [{ what = 'link_slow', link = '*' }]": "link_slow cannot be injected into a real",
    "backend = 'gloo'\nfaults = [{ what = 'link_cut', link = 'n0/cpu0->*' }]": "link_cut: a real run can only cut",
    "backend = 'gloo'\nfaults = [{ what = 'crash', ranks = [1] }]": "a real run needs a call",
    "backend = 'gloo'\n[expect]\nstep_time = {}": "expect.step_time: known of simulated runs only",
    "backend = 'gloo'\nguards = ['payloads']\n[expect]": "guards: payloads are watched in simulated runs only",
}


@pytest.mark.parametrize("toml", WRONG, ids=list(WRONG.values()))
def test_a_wrong_file_is_refused_with_the_path(tmp_path: Path, toml: str) -> None:
    """The message names the file, the path in it, and what was expected."""
    with pytest.raises(UsageError) as caught:
        made(tmp_path, toml)
    assert str(caught.value).startswith(f"{tmp_path / 'made.toml'}: ")
    assert WRONG[toml] in str(caught.value)


def test_all_faults_of_a_file_come_at_once(tmp_path: Path) -> None:
    """Faults of the schema, of the cluster and of the program are one message; numbers of faults are the file's."""
    with pytest.raises(UsageError) as caught:
        made(
            tmp_path,
            """
            backed = "sim"
            [[faults]]
            what = "nonsense"
            [[faults]]
            what = "link_cut"
            link = "a->b"
            [expect]
            culprits = [7]
            line = "# <- nowhere"
            """,
        )
    told = str(caught.value)
    assert "5 faults" in told
    for path in ("backed:", "faults[0].what:", "faults[1]:", "expect.culprits:", "expect.line:"):
        assert path in told


@pytest.mark.parametrize("faults", [["nnodes: one"], ["seed: one", "on: two"]])
def test_what_is_wrong_with_a_file_travels_between_processes(faults: list[str]) -> None:
    """A worker tells it to the process that asked."""
    error = BadFile(Path("folder/x.toml"), faults)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.path, again.faults, str(again)) == (BadFile, error.path, faults, str(error))


def test_all_files_are_read_before_one_runs(tmp_path: Path) -> None:
    """Two wrong files are two messages in one error."""
    made(tmp_path, "[expect]")
    for name in ("one", "two"):
        (tmp_path / f"{name}.toml").write_text("program = 'x.py'\n[expect]\nkind = 3\n")
    with pytest.raises(UsageError) as caught:
        load_scenarios([tmp_path])
    assert str(caught.value).count("expect.kind") == 2


@pytest.mark.parametrize("text", ["program = [", "\xff"])
def test_what_is_no_toml_is_said(tmp_path: Path, text: str) -> None:
    """A file that cannot be parsed is one line."""
    (tmp_path / "bad.toml").write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError, match=r"bad\.toml: expected"):
        load_scenario(tmp_path / "bad.toml")


def test_only_scenarios_are_found_in_a_folder(tmp_path: Path) -> None:
    """A cluster file or a pyproject.toml beside scenarios is none."""
    made(tmp_path, "[expect]")
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    (tmp_path / "deeper").mkdir()
    made(tmp_path / "deeper", "[expect]")
    (tmp_path / "half.toml").write_text("program = [\n")
    assert [p.name for p in find_scenarios([tmp_path])] == ["made.toml", "made.toml"]
    (tmp_path / "half.toml").write_text("program = 'made.py'\n[expect\n")  # it means to be one
    assert [p.name for p in find_scenarios([tmp_path])] == ["made.toml", "half.toml", "made.toml"]
    with pytest.raises(UsageError, match="no such file or folder"):
        find_scenarios([tmp_path / "nowhere"])


def test_the_json_schema_knows_every_kind_and_every_fault() -> None:
    """Editors complete what the loader takes."""
    schema = json.loads(json_schema())
    assert schema["properties"]["program"]["description"]
    assert set(schema["properties"]["expect"]["properties"]["kind"]["enum"]) == {kind.value for kind in Kind}
    whats = schema["properties"]["faults"]["items"]["properties"]["what"]["enum"]
    assert {"link_slow", "nic_down", "crash", "straggler", "corrupt", "master_unreachable"} <= set(whats)
    assert schema["additionalProperties"] is False


def test_faults_of_a_marker_are_checked_like_those_of_a_file() -> None:
    """The pytest marker takes the same tables."""
    assert str(read_faults([{"what": "crash", "ranks": [1], "call": "barrier #2"}])[0]) == "rank 1 killed by SIGKILL"
    with pytest.raises(UsageError, match=r"faults\[0\].rank: unknown key"):
        read_faults([{"what": "crash", "ranks": [1], "rank": 2}])


def test_times_may_have_units(tmp_path: Path) -> None:
    """`at_s = "5ms"` and `at_s = 0.005` are the same."""
    scenario = made(tmp_path, "faults = [{ what = 'freeze', ranks = [1], at_s = '5ms', for_s = 2 }]")
    when = scenario.rules[0].when
    assert (when.at_s, when.for_s) == (0.005, 2.0)
