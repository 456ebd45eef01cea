"""What ranks print: whole lines behind their rank, or files named as torchrun names them."""

from __future__ import annotations

from pathlib import Path

from sim.running import HEAD, Scripts


def test_lines_are_whole_and_prefixed(script: Scripts) -> None:
    """end="", several lines at once, Unicode, bytes through the buffer, writelines, stderr."""
    ran = script(
        HEAD
        + """
print("a", end="")
dist.barrier()
print("b")
print("one\\ntwo\\n\\nfour")
print("ünï ✓ 日本")
data = "bÿtes\\n".encode()
for i in range(len(data)):
    sys.stdout.buffer.write(data[i : i + 1])
sys.stdout.writelines(["l1\\n", "l2\\n"])
print("10%\\r20%\\r30%")
print("error", file=sys.stderr)
print("last", end="")
"""
    )
    expected = ["ab", "one", "two", "", "four", "ünï ✓ 日本", "bÿtes", "l1", "l2", "30%", "last"]
    for rank in range(2):
        assert ran.of(rank) == expected
        assert ran.of(rank, ran.err) == ["error"]


def test_prefixes_are_aligned(script: Scripts) -> None:
    """Ranks of one and two digits have prefixes of the same width."""
    ran = script("import os\nprint(os.environ['RANK'])\n", num_ranks=11)
    assert ran.out.splitlines() == [f"[{rank:>2}] {rank}" for rank in range(11)]


def test_a_stream_is_asked_what_programs_ask(script: Scripts) -> None:
    """isatty, encoding, reconfigure, name: progress bars and loggers look at them."""
    ran = script(
        "import sys\nsys.stdout.reconfigure(line_buffering=True)\n"
        "print(sys.stdout.isatty(), sys.stdout.encoding, sys.stdout.name, sys.stdout.closed, sys.stdout.writable())\n"
        "sys.stdout.close()\nprint('still')\n"
    )
    assert ran.of(0) == ["False utf-8 <stdout> False True", "still"]


def test_faulthandler_may_be_enabled(script: Scripts) -> None:
    """A stream has a file descriptor even where its terminal is a string (torch's @record asks for one)."""
    ran = script("import faulthandler, sys\nfaulthandler.enable()\nprint(sys.stderr.fileno() >= 0)\n")
    assert ran.of(0) == ["True"]


def test_redirected_within_a_rank(script: Scripts) -> None:
    """contextlib.redirect_stdout of a rank catches its own lines, over a barrier too."""
    ran = script(
        HEAD
        + """
import contextlib, io
caught = io.StringIO()
with contextlib.redirect_stdout(caught):
    print("in", rank)
    dist.barrier()
    print("still in", rank)
print(repr(caught.getvalue()))
"""
    )
    assert ran.of(1) == ["'in 1\\nstill in 1\\n'"]


def test_log_dir(script: Scripts, tmp_path: Path) -> None:
    """--log-dir: LOG_DIR/<rank>/stdout.log and stderr.log hold what the rank printed; the terminal stays empty."""
    ran = script(
        "import os, sys\nprint('out', os.environ['RANK'])\nprint('err', file=sys.stderr)\n",
        log_dir=str(tmp_path / "logs"),
    )
    assert ran.out == ""
    for rank in range(2):
        assert (tmp_path / "logs" / str(rank) / "stdout.log").read_text() == f"out {rank}\n"
        assert (tmp_path / "logs" / str(rank) / "stderr.log").read_text() == "err\n"


def test_input_is_at_its_end(script: Scripts) -> None:
    """A rank has no terminal to read from: input() meets the end of the file, or pytest's refusal."""
    ran = script("try:\n    input('? ')\nexcept (EOFError, OSError):\n    print('none')\n")
    assert ran.of(0)[-1].endswith("none")
