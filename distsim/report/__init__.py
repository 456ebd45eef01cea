"""What a run leaves: the summary on the terminal, the JSON report, the trace, the live progress.

`summary.py` is the terminal, `document.py` the JSON, `tracing.py` Perfetto and HTA in the words of `kineto.py`;
`training` is what the first two say of GPUs. All read an `Outcome` only.
"""

from __future__ import annotations

from distsim.report.document import SCHEMA, report_document, write_report
from distsim.report.summary import Summary, print_summary
from distsim.report.tracing import write_trace

__all__ = ["SCHEMA", "Summary", "print_summary", "report_document", "write_report", "write_trace"]
