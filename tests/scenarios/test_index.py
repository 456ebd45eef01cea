"""scenarios/README.md."""

from __future__ import annotations

from scenarios.scenario import ROOT, load, scenarios


def test_index_names_every_program() -> None:
    """The index has a line for every scenario, with the diagnosis that its file expects."""
    lines = (ROOT / "README.md").read_text().splitlines()
    for folder in ("healthy", "hangs"):
        for path in scenarios(folder):
            expect = load(path).expect
            row = [line for line in lines if f"]({folder}/{path.stem}.py)" in line]
            assert len(row) == 1, f"{folder}/{path.stem} has {len(row)} lines in scenarios/README.md"
            if folder == "hangs":
                culprits = ", ".join(map(str, expect.get("culprits", [])))
                assert f"| {expect['kind']} | {culprits} |" in row[0], path.stem
