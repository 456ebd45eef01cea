"""What to do next about ranks that raised, and the words of long exceptions."""

from __future__ import annotations

import pytest

from distsim.debug.messages import exception_line, raised_advice
from distsim.debug.records import Phase, RankState


@pytest.mark.parametrize(
    ("exception", "awaited", "said"),
    [
        ("ValueError: bad", True, "Fix the exception of rank 1 first: other ranks wait only because of it."),
        (
            "FileNotFoundError: [Errno 2] a.pt",
            True,
            "Look for what writes that file: if another rank",
        ),
        ("FileNotFoundError: [Errno 2] a.pt", False, "Look for what writes that file: if"),
        ("ValueError: bad", False, "Fix the exception of rank 1."),
        ("NotSimulated: nvidia-smi is not simulated: ask torch.cuda", False, "Ask torch.cuda."),
        ("AttributeError: module 'torch._C' has no attribute '_cuda_setDevice'", True, "The program needs a GPU, and "),
        ("AssertionError: Torch not compiled with CUDA enabled", False, "The program needs a GPU, and there is none "),
        (
            "RuntimeError: No CUDA GPUs are available",
            False,
            "The program needs a GPU, and there is none here: simulate",
        ),
        ("OutOfMemoryError: CUDA out of memory. Tried to ...", True, "Let rank 1 need less: a smaller micro-batch, "),
    ],
)
def test_what_to_do_about_an_exception(exception: str, awaited: bool, said: str) -> None:
    """Nobody is said to wait where nobody does; what is not simulated has a remedy of its own, and so has memory."""
    assert raised_advice("rank 1", exception, awaited).startswith(said)


def test_a_long_exception_is_cut_behind_a_sentence() -> None:
    """What a sentence holds of an exception ends where one of its own does."""
    text = "OutOfMemoryError: " + "CUDA out of memory. " * 20
    line = exception_line(RankState(0, Phase.RAISED, exception=text)) or ""
    assert len(line) <= 300
    assert line.endswith("memory. ...")
    assert exception_line(RankState(0, Phase.RAISED, exception="x" * 500)) == "x" * 296 + " ..."


def test_an_address_of_a_group_that_is_gone_is_explained() -> None:
    """gloo's words for it are those of a network fault; a second init_process_group in one store is the usual cause."""
    error = "RuntimeError: Gloo connectFullMesh failed with [gloo/transport/tcp/pair.cc:144] Connection refused"
    said = raised_advice("rank 0", error, awaited=True)
    assert "earlier init_process_group" in said
    assert "PrefixStore" in said


def test_a_file_that_no_rank_has_found() -> None:
    """Where every rank misses it, no other one has written it too late."""
    error = "FileNotFoundError: [Errno 2] No such file: a.pt"
    assert raised_advice("ranks 0,1", error, False, everyone=True) == "Fix the exception of ranks 0,1."


def test_a_variable_of_the_launcher_that_is_missing_or_no_number() -> None:
    """torch names the first; of the second only the line in the traceback says which it is."""
    missing = (
        "ValueError: Error initializing torch.distributed using env:// rendezvous: environment variable RANK expected"
    )
    line = (
        "    rank = int(_get_env_or_raise(\"WORLD_SIZE\"))\nValueError: invalid literal for int() with base 10: 'one'"
    )
    assert raised_advice("rank 1", missing, True).startswith("Set RANK for rank 1 as a launcher does")
    wrong = raised_advice("rank 1", line.splitlines()[-1], True, traceback=line)
    assert wrong.startswith("Set WORLD_SIZE for rank 1 as a launcher does")
    assert "Set " not in raised_advice("rank 1", line.splitlines()[-1], True)


def test_a_rendezvous_of_too_many_ranks_says_how_many_came() -> None:
    """torch's own timeout: the remedy is world_size, or the ranks that nobody has started."""
    error = "torch.distributed.DistStoreError: Timed out after 7 seconds waiting for clients. 2/1000 clients joined."
    assert raised_advice("rank 0", error, True).startswith("Only 2 of the 1000 ranks that world_size says joined")
    error = "torch.distributed.DistStoreError: wait timeout after 6000ms, keys: /w/w//cpu//0/0"
    assert "compare world_size" in raised_advice("rank 1", error, False)
