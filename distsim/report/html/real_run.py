"""The page of a real run, from the flight records that its guard leaves."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distsim.debug.postmortem import examine
from distsim.debug.rings.files import default_directory, private_folder
from distsim.errors import UsageError
from distsim.report.html.extra import check_page
from distsim.text.output_files import say_written

__all__ = ["launch_with_page"]


def launch_with_page(launch: Callable[[], int], args: Any) -> int:
    """What *launch* answers, or 2 where it went well and the page did not. The records of a run that went well are
    kept until the page is written."""
    check_page(args.html)
    chosen = getattr(args, "rings", None) or os.environ.get("DISTSIM_DIR")
    if not chosen:
        try:
            base = default_directory("x").parent
            private_folder(base)
            args.rings = tempfile.mkdtemp(prefix="run-", dir=base)
        except OSError as error:
            raise UsageError(f"no place for the flight records ({error}); choose one with --rings DIR") from None
    directory = Path(chosen or args.rings)
    code = launch()
    try:
        _write(directory, args)
    except UsageError as mistake:
        print(f"distsim: --html {args.html}: no page: {mistake}", file=sys.stderr)
        code = code or 2
    except OSError as error:
        print(f"distsim: error: --html {args.html}: cannot be written ({error.strerror})", file=sys.stderr)
        code = code or 2
    if not chosen and not code:
        shutil.rmtree(directory, ignore_errors=True)
    return code


def _write(directory: Path, args: Any) -> None:
    from distsim.report.html.reports import write_records

    found = examine(directory)
    more: dict[str, Any] = {"inconclusive": str(found.inconclusive)} if found.inconclusive else {}
    replay = shlex.join(["distsim", *args.argv])
    write_records(found.diagnoses, found.evidence, args.html, replay, program=args.training_script, **more)
    say_written(args.html)
