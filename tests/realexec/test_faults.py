"""Every planted fault on real gloo: the kind, the ranks, the line and the exit code that the monitor names."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import HERE, Case, Zygote

CASES = [Case.read(path) for path in sorted((HERE / "faults").glob("*.py"))]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.path.stem)
def test_fault_is_named(case: Case, zygote: Zygote, folder: Path) -> None:
    """The first diagnosis of a faulty program is the fault that was planted."""
    result = zygote.run(
        case.path,
        case.ranks,
        directory=folder,
        hang_after_s=float(case.head.get("hang_after", "60")),
        nan=bool(case.head.get("nan")) or None,
        checksum=bool(case.head.get("checksum")) or None,
    )
    assert result.diagnoses, result.outputs
    first = result.diagnoses[0]
    assert first.kind.value in case.head["kind"].split("|"), result.report
    assert first.culprits == case.culprits, result.report
    assert str(result.exit_code) in case.head["exit"].split("|"), result.report
    if case.lines():
        named = {first.sites[rank].line for rank in first.culprits if rank in first.sites}
        assert named, result.report
        assert named <= set(case.lines()), result.report
