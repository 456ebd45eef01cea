"""Programs of random calls: what the guard answers is what plain gloo answers, value by value and word by word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jobs import Zygote

SETTINGS: dict[str, dict[str, Any]] = {
    "check": {"level": "check"},
    "strict": {"level": "strict"},
    "looks": {"level": "check", "nan": True, "checksum": True},
    "strict, looks": {"level": "strict", "nan": True, "checksum": True},
}


def calls(output: str) -> list[str]:
    """Lines of the program's own: torch's warnings carry the time of day."""
    return [line for line in output.splitlines() if line[:1].isdigit()]


SEEDS = [pytest.param(seed, marks=[] if seed < 1 else pytest.mark.soak) for seed in range(12)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_answers_are_those_of_plain_gloo(seed: int, zygote: Zygote, folder: Path) -> None:
    """Values, exceptions, kinds of handles, and what handles and futures say, at each level."""
    args = (str(seed), "60")
    script = Path(__file__).parent / "random_calls.py"
    plain = zygote.run(script, 3, directory=folder, guarded=False, args=args)
    assert set(plain.codes.values()) == {0}, plain.outputs
    for name, settings in SETTINGS.items():
        under = folder / name.replace(", ", "-")
        under.mkdir()
        guarded = zygote.run(script, 3, directory=under, args=args, **settings)
        for rank, output in plain.outputs.items():
            for mine, theirs in zip(calls(guarded.outputs[rank]), calls(output), strict=True):
                assert mine == theirs, (name, rank, guarded.report)
        assert guarded.codes == plain.codes, (name, guarded.report)
