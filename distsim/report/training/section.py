"""The report's section `training`: what the steps of simulated GPUs were.

- `steps`: ends of an optimizer's `step`, of the rank with fewest; `first_counted`: the figures are means of the steps
  from this one (counted from 1) on; `step_times_s[]`: each the slowest rank's, from step 2 on (of a single step, that
  one's, from the first use of the GPU); `step_time_s`: their median, of the counted ones; `step_low_s`, `step_high_s`:
  where a measured one would lie in eight cases of ten, by the errors of published steps and of the exposed
  communication; `step_regime`: whose errors these are (one node, many nodes, near launch-bound); `launching_s`: what
  the host of the mean rank needs to launch the kernels of a step; `host_work_s`: what it spends on all that it
  launches (views, autograd functions in Python and collectives, too); `host_bound`: the GPU of the rank that paces the
  others stands idle for a tenth of the step or more because its host has launched nothing
- `tokens_per_step`, `tokens_how`: of all ranks together, and where that number is from; `tokens_per_s`,
  `tokens_per_s_per_gpu`
- `model_flops`, `hardware_flops`: a step's, all GPUs together: the products of forward and backward; all that
  ran, with what backward computes again.
  `mfu`, `hfu`: their shares of `peak_flops_per_s`, the GPU's dense peak of `peak_dtype`
- `gpu`, `num_gpus`, `gpu_memory_bytes`, `context_bytes`: the GPU, how many were used, its memory, what of it lies
  outside torch's allocator
- `peak_allocated_bytes`, `peak_reserved_bytes`: torch's max_memory_allocated and max_memory_reserved of the rank with
  most, whatever the program has reset; `peak_memory_bytes`: the second, which is what is usually published
- `ranks[]`: `rank`, `alike` (how many ranks it stands for, itself included), `step_s` and what it was: `compute_s` (of
  it `overlapped_s` beside communication, which took `slowed_s` of it), `exposed_s` (communication that nothing hid; of
  it `late_s` before the last member came), `bubble_s` (a message whose other end had not come), `host_s` (nothing was
  launched); `peak_allocated_bytes`, `peak_reserved_bytes`; `waits[]`: `op, group, moving_s, late_s` of what was
  exposed, `busy_s`, all that its bytes moved, `spared_s`, what of moving_s half as long calls would hide;
  `memory`: bytes allocated when they were most, by what they were for (the rule: device/allocator/allocator.py);
  `modules`: the same by module, `layers.*.mlp`, as the second step had it (at its own peak, where a later one
  is little higher); empty where the peak was in the first; `sites[]` (of `distsim fits` alone): the same by line and
  operator: `kind, where, code, operator, tensor` (of the largest), `nbytes, count`
- `operators[]`: those that took longest: `name, count, time_s`, a step of the mean rank
- `critical_path[]`: of the last step: `kind` (compute, communication, host), `name, time_s`, the longest part first;
  `critical_path_share`: how much of the step, up to its end, it tells of (1, unless the step has very many kernels)
- `gains[]`: what a step would take if something were better, estimated as gains.py says: `name, how, step_s`, the
  largest gain first
- `out_of_memory[]`: ranks that raised torch.OutOfMemoryError: `ranks`, bytes `asked` for, `capacity`, `reserved`,
  `allocated`, `missing`, `held` (by what it is for), `sharded` (parameters are shards), `in_backward`,
  `asked_as` (one of the kinds of `held`), `sequences` (of a micro-batch; 0: not known), `coming_gradients`,
  `coming_optimizer`: bytes not there yet (null: unknown); `site` (of `distsim fits` alone): what asked;
  `remedies[]`: one sentence each on what would have fitted
- `unknown_reads[]`: `what, where, code, count`: the program read values that no simulation knows, so often on one rank,
  and got `placeholder`
- `checkpoints`: what the rank that spent most time on it (`rank`) wrote to files with torch.save and DCP and read from
  them: `writes, written_bytes, write_s, reads, read_bytes, read_s`, at its cluster's rates
- `fused` (with --fuse, else null): `rank`, `functions` (compiled function: calls), `kernels_before`, `kernels_after`,
  `gpu_saved_s`, `host_saved_s` of that rank's whole run, against what would have run eagerly

What cannot be said is null: without a step, all that is a step's; without tokens, what is made of them.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from distsim.report.training.gains import gains
from distsim.report.training.memory import remedies

if TYPE_CHECKING:
    from distsim.sim.observe.metrics import OutOfMemory, RankTraining, Training

__all__ = ["training_section"]

_FIELDS = (
    "steps",
    "first_counted",
    "step_times_s",
    "step_time_s",
    "step_low_s",
    "step_high_s",
    "step_regime",
    "launching_s",
    "host_work_s",
    "host_bound",
    "tokens_per_step",
    "tokens_how",
    "tokens_per_s",
    "tokens_per_s_per_gpu",
    "model_flops",
    "hardware_flops",
    "mfu",
    "hfu",
    "critical_path_share",
    "peak_dtype",
    "peak_flops_per_s",
    "gpu",
    "num_gpus",
    "context_bytes",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "placeholder",
)


def training_section(training: Training) -> dict[str, Any]:
    """*training* as plain JSON data."""
    return {name: getattr(training, name) for name in _FIELDS} | {
        "gpu_memory_bytes": training.memory_bytes,
        "peak_memory_bytes": training.peak_reserved_bytes,
        "ranks": [_rank(rank) for rank in training.ranks],
        "operators": [asdict(operator) for operator in training.operators],
        "critical_path": [asdict(part) for part in training.critical_path],
        "out_of_memory": [_short(found, training) for found in training.out_of_memory],
        "gains": [asdict(gain) for gain in gains(training)],
        "checkpoints": {"rank": training.saved_rank} | asdict(training.saved),
        "fused": None if training.fused is None else asdict(training.fused),
        "unknown_reads": [asdict(read) for read in training.reads],
    }


def _short(short: OutOfMemory, training: Training) -> dict[str, Any]:
    section = asdict(short) | {"remedies": remedies(short, training)}
    if short.site is None:
        del section["site"]
    return section


def _rank(rank: RankTraining) -> dict[str, Any]:
    found = asdict(rank)
    found["alike"] = len(found.pop("like"))
    if not rank.sites:
        del found["sites"]
    return found
