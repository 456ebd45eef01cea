"""scenarios/training: what a flag changes of a program's work, counted, and which ones do not fit together."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from distsim.sim import Outcome, RunRequest, run_program

FOLDER = Path(__file__).parents[2] / "scenarios" / "training"
SMALL = "--layers 4 --hidden 256 --heads 8 --ffn 512 --vocab 256 --seq 1024 --steps 1"
TINY = "--layers 2 --hidden 64 --heads 4 --vocab 128 --seq 16 --steps 2 --dtype fp32"

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]  # a program's warnings are its own


@cache
def run(program: str, flags: str = "", *, on: str = "dgx-h100:1", ranks: int = 2, shape: str = SMALL) -> Outcome:
    """Run a program with its flags."""
    args = (*shape.split(), *flags.split())
    ran = run_program(RunRequest(program=str(FOLDER / f"{program}.py"), args=args, on=on, nproc_per_node=ranks))
    assert ran.exit_code == 0
    return ran


def memory(ran: Outcome) -> int:
    """Bytes that a GPU had allocated at its peak."""
    assert ran.training is not None
    return ran.training.peak_allocated_bytes


def products(ran: Outcome) -> float:
    """Floating point operations of all products, recomputed ones as well."""
    assert ran.training is not None
    assert ran.training.hardware_flops is not None
    return ran.training.hardware_flops


def operators(ran: Outcome) -> dict[str, float]:
    """How often each kernel ran."""
    assert ran.training is not None
    return {each.name: each.count for each in ran.training.operators}


def calls(ran: Outcome, op: str) -> int:
    """Collectives whose name contains *op*."""
    return sum(total.count for total in ran.collectives if op in total.op)


def moved(ran: Outcome, op: str) -> int:
    """Bytes of the collectives whose name contains *op*."""
    return sum(total.bytes for total in ran.collectives if op in total.op)


def losses(program: str, flags: str, capfd: pytest.CaptureFixture[str], *, ranks: int) -> list[float]:
    """What a program prints on CPUs, where numbers are real."""
    capfd.readouterr()
    run.__wrapped__(program, flags, on="ethernet-cpu:1", ranks=ranks, shape=TINY)
    return [float(loss) for loss in re.findall(r"loss: +([\d.]+)", capfd.readouterr().out)]


@pytest.mark.parametrize("program", ["fsdp1", "fsdp2"])
def test_parameters_that_stay_whole_are_gathered_once(program: str) -> None:
    """SHARD_GRAD_OP gathers a layer in forward, and not again in backward, at the price of its memory."""
    full, grad_op = (run(program, f"--sharding {kind}") for kind in ("full", "grad_op"))
    assert calls(grad_op, "all_gather") < calls(full, "all_gather")
    assert memory(grad_op) > memory(full)


@pytest.mark.parametrize("program", ["fsdp1", "fsdp2"])
def test_replicas_gather_within_and_reduce_between(program: str) -> None:
    """HSDP keeps gathers within a replica's ranks, and sums gradients over the replicas in an all_reduce."""
    sharded, hybrid = run(program, ranks=4), run(program, "--replicas 2", ranks=4)
    sizes = {total.num_ranks for total in hybrid.collectives if "all_gather" in total.op}
    assert sizes == {2}
    assert moved(hybrid, "all_reduce") > 100 * moved(sharded, "all_reduce")
    assert memory(hybrid) > memory(sharded)


@pytest.mark.parametrize("program", ["fsdp1", "fsdp2", pytest.param("zero1", marks=pytest.mark.soak)])
def test_every_second_layer_is_recomputed(program: str) -> None:
    """The products that run, and the memory they save, lie half way between none and all."""
    none, half, whole = (run(program, flags) for flags in ("", "--ckpt full --ckpt-every 2", "--ckpt full"))
    assert products(half) - products(none) == pytest.approx((products(whole) - products(none)) / 2, rel=0.01)
    assert memory(whole) < memory(half) < memory(none)


def test_activations_that_are_not_cut_along_the_sequence() -> None:
    """Without sequence parallel an all_reduce takes the place of a gather and a scatter, and norms keep whole
    activations."""
    cut, whole = (run("fsdp2", f"--arch llama --tp 2 --sequence-parallel {kind}") for kind in ("on", "off"))
    assert calls(whole, "all_gather") < calls(cut, "all_gather") / 2
    assert calls(whole, "all_reduce") > calls(cut, "all_reduce") + 8
    assert memory(whole) > memory(cut)


@pytest.mark.parametrize(
    ("recipe", "on"), [("tensorwise", "dgx-h100:1"), ("rowwise", "dgx-h100:1"), ("mxfp8", "dgx-b200:1")]
)
def test_layers_multiply_in_eight_bits(recipe: str, on: str) -> None:
    """Three products for each of the seven matrices of a layer."""
    ran = run("fsdp2", f"--arch llama --fp8 {recipe}", on=on)
    assert operators(ran)["_scaled_mm"] == 4 * 7 * 3
    assert ran.training is not None
    assert ran.training.peak_dtype == "fp8"


@pytest.mark.parametrize("program", ["context_parallel", "zero1"])
def test_a_ring_moves_what_grouped_queries_leave_of_keys(program: str) -> None:
    """A quarter of the heads of keys and values is a quarter of the bytes; attention is flash attention."""
    base = "--arch llama --cp 2 --dp 1"
    every, grouped = run(program, base), run(program, f"{base} --kv-heads 2")
    assert moved(grouped, "send") == moved(every, "send") / 4
    kernel = {"context_parallel": "flash", "zero1": "cudnn"}[program]  # Megatron-LM's on Hopper
    assert operators(grouped)[f"_scaled_dot_product_{kernel}_attention"] == 2 * 4
    assert "bmm" not in operators(grouped)


def test_a_ring_recomputes_and_is_cut_by_tensor_parallelism() -> None:
    """Less memory with --ckpt; with --tp a rank has half the heads, and sends half."""
    base = "--kv-heads 4 --cp 2 --dp 1 --seq 8192"
    plain, again = run("context_parallel", base), run("context_parallel", f"{base} --ckpt full")
    assert memory(again) < memory(plain)
    both = run("context_parallel", f"{base} --tp 2", ranks=4)
    assert moved(both, "send") == moved(plain, "send")  # of twice as many ranks


def test_experts_in_groups_or_beside_an_exchange_change_no_number(capfd: pytest.CaptureFixture[str]) -> None:
    """A batch of products, one kernel of groups, and rows that travel while the shared expert computes."""
    plain = losses("moe", "--ep 2", capfd, ranks=2)
    assert len(plain) == 2
    for flag in ("--grouped-gemm", "--overlap", "--overlap --ckpt full"):
        assert losses("moe", f"--ep 2 {flag}", capfd, ranks=2) == pytest.approx(plain, abs=1e-3)


def test_an_exchange_is_hidden_by_the_expert_of_all_tokens() -> None:
    """With --overlap less of the communication is exposed, and no byte less is sent."""
    shape = (
        SMALL.replace("--hidden 256", "--hidden 2048").replace("--seq 1024", "--seq 4096").replace("steps 1", "steps 2")
    )
    plain, hidden = (run("moe", f"--ep 2 {flag}", shape=shape) for flag in ("", "--overlap"))
    assert plain.training is not None
    assert hidden.training is not None
    assert hidden.training.ranks[0].overlapped_s > plain.training.ranks[0].overlapped_s
    assert hidden.training.ranks[0].exposed_s < plain.training.ranks[0].exposed_s
    assert moved(hidden, "all_to_all") == moved(plain, "all_to_all")


def test_the_shape_of_a_mixture() -> None:
    """More experts of a token are more rows to send; narrower ones are fewer operations; grouped keys fewer, too."""
    two, four = run("moe", "--ep 2"), run("moe", "--ep 2 --top-k 4")
    assert moved(four, "all_to_all") == pytest.approx(2 * moved(two, "all_to_all"), rel=0.01)
    assert products(run("moe", "--ep 2 --expert-ffn 128")) < products(two)
    assert products(run("moe", "--ep 2 --shared-ffn 0")) < products(two)
    assert products(run("moe", "--ep 2 --attention grouped --kv-heads 2")) < products(
        run("moe", "--ep 2 --attention grouped")
    )
    assert "bmm" in operators(two)
    assert "_grouped_mm" in operators(run("moe", "--ep 2 --grouped-gemm"))
    assert products(run("moe", "--ep 2 --dense-layers 3")) != products(two)


def bubble(schedule: str, *, stages: int = 2) -> float:
    """The largest share of a step that a rank waits for a message, two layers a rank and twice as many micro-batches as
    ranks."""
    shape = "--hidden 8192 --heads 64 --vocab 1024 --seq 4096 --steps 2"
    layout = f"--layers {2 * stages} --accum {2 * stages} --pp {stages} --schedule {schedule}"
    ran = run("schedules", layout, ranks=stages, shape=shape)
    assert ran.training is not None
    return max(rank.bubble_s / rank.step_s for rank in ran.training.ranks)


def test_bubbles_of_schedules_are_those_of_arithmetic() -> None:
    """Two stages and four micro-batches: 1/5 of 1F1B, 1/9 of two chunks, almost none of ZB-V."""
    assert bubble("1F1B") == pytest.approx(1 / 5, abs=0.02)
    assert bubble("Interleaved1F1B --vpp 2") == pytest.approx(1 / 9, abs=0.02)
    assert bubble("ZBVZeroBubble --vpp 2") < 0.04


@pytest.mark.soak
def test_bubbles_of_four_stages_are_those_of_arithmetic() -> None:
    """With eight micro-batches 3/11 of 1F1B and 3/19 of two chunks; less with weights' gradients in what is left."""
    assert bubble("1F1B", stages=4) == pytest.approx(3 / 11, abs=0.02)
    interleaved = bubble("Interleaved1F1B --vpp 2", stages=4)
    assert interleaved == pytest.approx(3 / 19, abs=0.02)
    assert bubble("InterleavedZeroBubble --vpp 2", stages=4) < 0.8 * interleaved
    assert bubble("DualPipeV --vpp 2", stages=4) < interleaved
    assert bubble("ZBVZeroBubble --vpp 2", stages=4) < 0.06


@pytest.mark.parametrize(
    ("program", "flags", "message"),
    [
        ("fsdp2", "--replicas 3", "--replicas 3 does not divide --dp 2"),
        ("fsdp2", "--ckpt-every 2", "--ckpt-every 2: nothing is recomputed; give --ckpt full or selective, too"),
        ("fsdp2", "--fp8 mxfp8", "--fp8 mxfp8: NVIDIA H100 80GB HBM3 has no such products"),
        (
            "tp_pp",
            "--arch gpt --cp 2 --dtype fp16",
            "--cp 2: a GPT in fp16, or that recomputes, has no flash attention here",
        ),
        ("zero1", "--cp 2 --seq 1022", "--seq 1022 must be a multiple of 2 * --cp 2 * --tp 1"),
        ("zero1", "--framework deepspeed", "invalid choice: 'deepspeed' (choose from"),
        ("zero1", "--framework internevo --pp 2 --accum 2 --dp 1", "--framework internevo has neither here"),
        ("zero1", "--fp8 tensorwise --tp 2", "--fp8 tensorwise --tp 2: products in 8 bits are not cut here"),
        ("zero1", "--replicas 2", "--replicas 2: give --framework internevo"),
        ("moe", "--kv-heads 2", "--kv-heads 2: latent attention has keys for each head"),
        ("moe", "--overlap --shared-ffn 0", "--overlap: what the exchange of rows is hidden by"),
        ("schedules", "", "a schedule is of a pipeline: give --pp, too"),
        ("schedules", "--pp 2 --vpp 2 --accum 2", "--vpp 2: 1F1B has one stage a rank"),
        ("schedules", "--pp 2 --schedule ZBVZeroBubble", "--vpp 1: ZBVZeroBubble has two stages a rank"),
        ("schedules", "--pp 2 --vpp 2 --accum 2 --schedule DualPipeV", "--accum 2: DualPipeV takes 2 * --pp 2"),
        ("schedules", "--pp 2 --vpp 2 --accum 2 --schedule ZBVZeroBubble --compile", "--compile: ZBVZeroBubble goes"),
    ],
)
def test_what_does_not_fit_together_is_one_line(
    program: str, flags: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 says it, and all ranks leave with exit code 2."""
    args = (*SMALL.split(), *flags.split())
    request = RunRequest(program=str(FOLDER / f"{program}.py"), args=args, on="dgx-h100:1", nproc_per_node=2)
    run_program(request)
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "error: " in line]
    assert message in line


def test_a_gpu_without_such_products_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    """An A100 has no 8-bit floats, and nothing is borrowed for them."""
    args = (*SMALL.split(), "--fp8", "tensorwise")
    run_program(RunRequest(program=str(FOLDER / "fsdp2.py"), args=args, on="dgx-a100:1", nproc_per_node=1))
    assert "A100-SXM4-80GB has no such products; it takes compute capability 8.9 or more" in capfd.readouterr().err


def test_gradients_in_16_bits_are_half_of_the_bytes() -> None:
    """Added up and reduced in bfloat16: half as much travels, and half as much is kept."""
    base = "--arch llama --dp 2"
    wide, narrow = run("zero1", base), run("zero1", f"{base} --grad-reduce-in-bf16")
    assert moved(narrow, "reduce_scatter") == moved(wide, "reduce_scatter") / 2
    assert memory(narrow) < memory(wide)


def test_each_framework_has_its_own_optimizer() -> None:
    """Megatron-LM scatters sums and gathers shares, nanotron sums all gradients at once, InternEvo sums them in
    bfloat16 and broadcasts what each owner has."""
    every = {name: run("zero1", f"--arch llama --dp 2 --framework {name}") for name in ("megatron", "nanotron")}
    every["internevo"] = run("zero1", "--arch llama --dp 2 --framework internevo")
    assert [calls(ran, "reduce_scatter") > 0 for ran in every.values()] == [True, False, False]
    assert [calls(ran, "broadcast") > 0 for ran in every.values()] == [False, False, True]
    assert memory(every["internevo"]) < min(memory(every["megatron"]), memory(every["nanotron"]))


def test_an_optimizer_is_sharded_within_replicas() -> None:
    """InternEvo's `zero1`: owners are among dp / replicas ranks, and gradients are summed over all."""
    base = "--arch llama --dp 4 --framework internevo"
    whole, part = run("zero1", base, ranks=4), run("zero1", f"{base} --replicas 2", ranks=4)
    sizes = [{total.num_ranks for total in ran.collectives if "broadcast" in total.op} for ran in (whole, part)]
    assert sizes[0] >= {4}
    assert 2 in sizes[1]
    assert memory(part) > memory(whole)


def test_frameworks_train_alike(capfd: pytest.CaptureFixture[str]) -> None:
    """On CPUs, where numbers are real: the losses of two steps are those of Megatron-LM's optimizer."""
    base = "--arch llama --mbs 2 --accum 2"
    plain = losses("zero1", base, capfd, ranks=2)
    for flags in ("--framework internevo", "--framework internevo --replicas 2", "--grad-reduce-in-bf16"):
        assert losses("zero1", f"{base} {flags}", capfd, ranks=2) == pytest.approx(plain, abs=1e-3)


def test_the_products_of_a_cut_optimizers_layers_are_in_eight_bits() -> None:
    """Three for each of the four matrices of a layer, and none for the output layer."""
    ran = run("zero1", "--arch llama --dp 2 --fp8 tensorwise")
    assert operators(ran)["_scaled_mm"] == 4 * 4 * 3


def test_stages_have_layers_of_any_number() -> None:
    """Seven layers over four chunks of two ranks: all of them, and the interleaved schedule of any."""
    whole, chunks = run("tp_pp", "--layers 7"), run("tp_pp", "--layers 7 --pp 2 --vpp 2 --accum 2")
    assert products(chunks) == pytest.approx(products(whole), rel=0.01)
