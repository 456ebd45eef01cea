"""What a public function of torch.distributed refuses has not arrived: the rank that goes on is missing."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist

import distsim
from distsim.debug.records.kinds import Kind
from tests.sim.running import ranks


def went_on() -> None:
    """Rank 0's second all_gather gets a text for a tensor; the program forgets it."""
    dist.init_process_group("gloo")
    own = torch.ones(4)
    parts = [torch.empty(4) for _ in range(2)]
    dist.all_gather(parts, own)
    if dist.get_rank() == 0:
        with contextlib.suppress(TypeError):
            dist.all_gather(parts, "no tensor")  # type: ignore[arg-type]
    else:
        dist.all_gather(parts, own)
    dist.all_gather(parts, own)
    dist.barrier()


def refused_by(what: str) -> None:
    dist.init_process_group("gloo")
    own = torch.ones(4)
    parts = [torch.empty(4) for _ in range(2)]
    things: list[object] = [lambda: None] if dist.get_rank() == 0 else [None]
    with contextlib.suppress(Exception):
        if what == "the group":
            dist.all_gather(parts[:1] if dist.get_rank() == 0 else parts, own)
        else:
            dist.broadcast_object_list(things, 0)
    if dist.get_rank() == 0:
        return
    dist.barrier()


def made_again() -> None:
    dist.init_process_group("gloo")
    own = torch.ones(4)
    if dist.get_rank() == 0:
        with contextlib.suppress(TypeError):
            dist.all_reduce("no tensor")  # type: ignore[arg-type]
    dist.all_reduce(own)
    dist.all_reduce(own)


def test_the_rank_whose_call_was_refused_is_missing() -> None:
    """Rank 0 is named, with the line of the refused call; the call of rank 1 is right."""
    (told, *_) = ranks(went_on).diagnoses
    assert (told.kind, told.culprits) == (Kind.MISSING_RANK, (0,))
    assert told.call is not None
    assert told.call.seq == 2
    assert "refused by torch with TypeError" in told.explanation


def test_what_is_refused_deeper_down_is_refused_as_well() -> None:
    """The group's own check of its lists, and pickle, say no before anybody has heard of the call."""
    for what in ("the group", "pickle"):
        (told, *_) = ranks(refused_by, 2, what).diagnoses
        assert (told.kind, told.culprits) == (Kind.MISSING_RANK, (0,)), what
        assert "refused by torch with" in told.explanation, what


def test_a_call_that_is_made_again_is_healthy() -> None:
    """The refused call has no number, and the second attempt meets the others' first."""
    outcome = ranks(made_again)
    assert outcome.exit_code == 0
    assert not outcome.diagnoses
    assert [call.rejected for call in outcome.records[0] if call.op == "all_reduce"] == [True, False, False]


def builds(suffix: str) -> None:
    from torch.utils import cpp_extension

    cpp_extension.load("fused", [f"bias.{suffix}"], build_directory="nowhere")


def test_an_extension_with_cuda_sources_is_refused_before_it_is_compiled() -> None:
    """The kernel could not run; a build takes minutes, and ends for want of nvcc. C++ alone is torch's matter."""
    (raised,) = distsim.simulate(builds, "dgx-h100:1", ("cu",), nproc_per_node=1, check=False).diagnoses
    assert "NotSimulated" in raised.explanation
    assert "the CUDA extension 'fused'" in raised.explanation
    assert "impl='ref'" in raised.suggestion
    (raised,) = distsim.simulate(builds, "dgx-h100:1", ("cpp",), nproc_per_node=1, check=False).diagnoses
    assert "NotSimulated" not in raised.explanation
