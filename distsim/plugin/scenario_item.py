"""A scenario file as a pytest item."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

__all__ = ["ScenarioFile", "ScenarioItem"]


class ScenarioFile(pytest.File):
    """One .toml file; it holds one test."""

    def collect(self) -> Iterator[pytest.Item]:
        """The file's only item."""
        yield ScenarioItem.from_parent(self, name=self.path.stem)


class ScenarioFailure(Exception):
    """An expectation that failed; its text is the report."""


class ScenarioItem(pytest.Item):
    """Runs the scenario; a failed expectation is its failure, a fault of the file too."""

    culprit: tuple[str, int] | None = None
    """File and line that an annotation points at, once it has run."""

    def setup(self) -> None:
        """Nothing: a scenario brings its own world."""

    def runtest(self) -> None:
        """Run it and print what its ranks printed, so that pytest shows it under the failure."""
        from distsim.scenario import load_scenario, run_scenario

        folder = self.config.getoption("--distsim-html")
        result = run_scenario(load_scenario(self.path), picture=bool(folder))
        if result.output:
            print(result.output, end="" if result.output.endswith("\n") else "\n")
        if not result.passed:
            self.culprit = result.place
            if folder and result.document:
                from distsim.report.html.reports import page_of_report

                result.notes.append(page_of_report(folder, self.nodeid, result.document))
                print(result.notes[-1])
            output, result.output = result.output, ""
            text = result.text
            result.output = output
            raise ScenarioFailure(text)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The report itself, without a traceback of ours."""
        from distsim.errors import UsageError

        if isinstance(excinfo.value, ScenarioFailure | UsageError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        """The file's first line."""
        return self.path, 0, f"scenario {self.path.stem}"
