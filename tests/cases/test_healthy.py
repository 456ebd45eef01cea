"""Legal programs of the corpus finish in every arm, and nobody cries wolf."""

from __future__ import annotations

from typing import Any

import pytest
from jobs import Zygote

from tests.cases.arms import on_gloo, simulate
from tests.cases.corpus import HEALTHY, SCENARIOS, Case
from tests.kin import one_in

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # a program's warnings are its own

STARTS_ITS_OWN_RANKS = {"ddp_two_layers", "distributed_sgd", "point_to_point"}
"""Programs of one process that call mp.spawn: see `test_spawn.py`."""
REAL = HEALTHY + [
    Case(path, 4, {"ranks": "4", "kind": "healthy"})
    for path in sorted((SCENARIOS / "healthy").glob("*.py"))
    if path.stem not in STARTS_ITS_OWN_RANKS
]
WAYS: list[tuple[str, dict[str, Any], int, int]] = [
    ("check", {}, 9, 0),
    ("strict", {}, 15, 1),
    ("check", {"nan": True, "checksum": True}, 30, 2),
    ("record", {}, 20, 3),
    ("off", {}, 20, 4),
    ("check", {"silent": "watch"}, 15, 5),
]
"""Level, settings, and which of how many programs the suite runs."""
EVERY_WAY = [
    pytest.param(
        *param.values, level, settings, marks=param.marks, id="-".join([param.values[0].name, level, *settings])
    )
    for level, settings, every, first in WAYS
    for param in one_in(every, REAL, first=first)
]


@pytest.mark.parametrize(("case", "level", "settings"), EVERY_WAY)
def test_no_alarm(case: Case, level: str, settings: dict[str, Any], zygote: Zygote) -> None:
    """A legal program runs to its end with exit code 0 and an empty list of diagnoses, at level off without a ring."""
    seen = on_gloo(case, level, zygote, **settings)
    assert seen.codes == (0,) * case.ranks, seen.text
    assert seen.diagnoses == [], seen.text
    assert not seen.silent, seen.text
    assert seen.rings == (0 if level == "off" else case.ranks)


@pytest.mark.smoke
@pytest.mark.parametrize("level", ["check", "strict"])
def test_each_backend_of_a_group_has_its_own_calls(level: str, zygote: Zygote) -> None:
    """Neither a thread race nor calls in the wrong order: neither knows of the other."""
    seen = on_gloo(Case.named("healthy/two_backends"), level, zygote)
    assert (seen.codes, seen.diagnoses) == ((0, 0), []), seen.text


@pytest.mark.parametrize("case", one_in(8, [c for c in HEALTHY if c.runs("simulated")]), ids=lambda case: case.name)
def test_no_alarm_in_a_simulation(case: Case) -> None:
    """Simulated, too, it runs to its end and nobody is accused of anything."""
    seen = simulate(case)
    assert (seen.exit_code, seen.diagnoses) == (0, []), seen.text
