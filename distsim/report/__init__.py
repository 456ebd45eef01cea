"""Output of a run: the summary on the terminal, the JSON report, the trace, and the live progress.

`summary.py` prints to the terminal, `document.py` writes the JSON, and `tracing.py` the trace for Perfetto and HTA;
`training` has the parts about GPUs. All of them read only an `Outcome`.
"""

from __future__ import annotations

from distsim.debug.records.diagnosis import SCHEMA
from distsim.report.document import report_document, write_report
from distsim.report.summary import Summary, print_summary
from distsim.report.tracing import write_trace

__all__ = ["SCHEMA", "Summary", "print_summary", "report_document", "write_report", "write_trace"]
