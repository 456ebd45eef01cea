"""One list of options (distsim/options.py): flags, the keys of a scenario and the arguments of `simulate` follow it."""

from __future__ import annotations

import argparse
import inspect
from dataclasses import fields

import pytest

from distsim.errors import UsageError
from distsim.options import RunOptions, add_flags, default_of, options_of
from distsim.scenario.file.schema import ScenarioSpec
from distsim.sim import RunRequest, simulate

NAMES = {option.name for option in fields(RunOptions)}


def test_simulate_takes_the_options_with_their_defaults() -> None:
    """Those of `RunOptions`; tokens_per_step is for the report of the command line."""
    parameters = inspect.signature(simulate).parameters
    assert set(parameters) - NAMES == {"fn", "args", "kwargs", "silent_allow", "conditions", "check"}
    assert NAMES - set(parameters) == {"tokens_per_step"}
    assert {name: parameters[name].default for name in NAMES & set(parameters)} == {
        name: default_of(name) for name in NAMES & set(parameters)
    }


def test_a_scenario_has_them_as_keys_with_their_defaults() -> None:
    """Those that do not belong to one machine or one report."""
    scenario = options_of(ScenarioSpec(program="train.py"))
    assert scenario == {name: default_of(name) for name in scenario}
    assert NAMES - set(scenario) == {"nccl_version", "host_timeout_s", "tokens_per_step", "log_dir", "trace"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--nccl-version", "2.21"], {"nccl_version": "2.21"}),
        (["--host-timeout", "3.5"], {"host_timeout_s": 3.5}),
        (["--no-fuse", "--data", "real"], {"fuse": False, "data": "real"}),
        ([], {}),
    ],
)
def test_flags_are_options(given: list[str], expected: dict[str, object]) -> None:
    """A flag is read with the type of its option, and what is not given has its default."""
    parser = argparse.ArgumentParser()
    add_flags(parser.add_argument_group(), "nccl_version", "host_timeout_s", "fuse", "data", "placeholder")
    read = options_of(parser.parse_args(given))
    assert {name: value for name, value in read.items() if value != default_of(name)} == expected
    assert options_of(RunRequest("train.py", **read)).items() >= read.items()


def test_a_word_that_is_none_of_an_options_is_one_line() -> None:
    """Also where no parser looks at it: `simulate` and `RunRequest`."""
    with pytest.raises(UsageError, match=r"^fidelity: expected fluid or message, got 'exact'$"):
        RunRequest("train.py", fidelity="exact")  # type: ignore[arg-type]
