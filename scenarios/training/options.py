"""The flags that the training programs share, and what follows from those left out."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any, NoReturn

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SYNONYMS = {"bfloat16": "bf16", "amp_bf16": "bf16", "float16": "fp16", "amp_fp16": "fp16", "float32": "fp32"}
FP8 = ("none", "tensorwise", "rowwise", "mxfp8")

LLAMA_3_8B = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128256, "seq": 8192}
LLAMA_1B = {"layers": 16, "hidden": 2048, "heads": 32, "kv_heads": 32, "ffn": 8192, "vocab": 131072, "seq": 4096}
GPT_2 = {"layers": 12, "hidden": 768, "heads": 12, "vocab": 50304, "seq": 1024}
GPT_7B = {"layers": 36, "hidden": 4096, "heads": 32, "vocab": 51200, "seq": 2048}
DEEPSEEK_V3 = {"layers": 4, "hidden": 7168, "heads": 128, "ffn": 18432, "vocab": 129280, "seq": 4096}

WHO_DOES = {
    "tp": "fsdp2.py, zero1.py, tp_pp.py or context_parallel.py",
    "pp": "tp_pp.py, zero1.py, moe.py or schedules.py",
    "vpp": "tp_pp.py, zero1.py, moe.py or schedules.py",
    "ep": "moe.py",
    "cp": "context_parallel.py, zero1.py or tp_pp.py",
}


class OneLine(argparse.ArgumentParser):
    """A wrong flag is one line, from rank 0; every rank leaves with exit code 2."""

    def error(self, message: str) -> NoReturn:
        refuse(message)


def refuse(message: str) -> NoReturn:
    """End all ranks with exit code 2; the first says why."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"{os.path.basename(sys.argv[0])}: error: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


def _positive(text: str) -> int:
    return _whole(text, 1)


def _whole(text: str, least: int = 0) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"expected a whole number, {least} or more, got {text}")
    return int(text)


def options(
    about: str,
    model: dict[str, int],
    *,
    does: tuple[str, ...] = (),
    dtypes: tuple[str, ...] = ("bf16", "fp32"),
    archs: tuple[str, ...] = ("gpt", "llama"),
    mbs: int = 1,
    schedules: tuple[str, ...] = (),
    frameworks: tuple[str, ...] = (),
    argv: list[str] | None = None,
) -> argparse.Namespace:
    """Read the flags. *model* is the shape when none is given, *does* what this program has of kinds of parallelism and
    of flags that not all have."""
    parser = OneLine(description=about)
    shape = parser.add_argument_group("the model")
    shape.add_argument("--layers", type=_positive)
    shape.add_argument("--hidden", type=_positive)
    shape.add_argument("--heads", type=_positive)
    shape.add_argument("--kv-heads", type=_positive, help="default: as many as heads")
    shape.add_argument("--ffn", type=_positive, help="width of the feed-forward layer (default: 4 * hidden)")
    shape.add_argument("--vocab", type=_positive)
    shape.add_argument("--arch", choices=archs, help="default: what the shape says, see _arch() in options.py")
    if "ep" in does:
        _of_mixture(shape)
    parser.set_defaults(fused_norm=False, compile=False, fp8="none", replicas=1, sharding="full", ring=None)
    parser.set_defaults(framework="megatron", grad_reduce_in_bf16=False)
    if frameworks:
        shape.add_argument("--framework", choices=frameworks, help="whose Llama and optimizer (default: megatron)")
    if "bf16 gradients" in does:
        parser.add_argument(
            "--grad-reduce-in-bf16", action="store_true", help="add up and reduce gradients in the parameters' type"
        )
    if "compile" in does:
        parser.add_argument("--compile", action="store_true", help="torch.compile each layer, then shard it")
    if "fp8" in does:
        parser.add_argument(
            "--fp8", choices=FP8, default="none", help="how operands of the layers' products are scaled"
        )
    if "fused_norm" in does:
        shape.add_argument("--fused-norm", action="store_true", help="RMSNorm in one kernel, as torch has it since 2.9")
    batch = parser.add_argument_group("the batch")
    batch.add_argument("--seq", type=_positive, help="tokens of a sequence")
    batch.add_argument("--mbs", type=_positive, default=mbs, help="sequences of a micro-batch")
    batch.add_argument("--accum", type=_positive, default=1, help="micro-batches of a step, on each replica")
    layout = parser.add_argument_group("over how many ranks")
    layout.add_argument("--tp", type=_positive, default=1, help="tensor parallel")
    if "tp" in does:
        layout.add_argument(
            "--sequence-parallel",
            choices=("on", "off"),
            default="on",
            help="cut what lies between the layers along the sequence, over the tensor parallel ranks",
        )
    layout.add_argument("--pp", type=_positive, default=1, help="pipeline parallel")
    layout.add_argument("--vpp", type=_positive, default=1, help="model chunks a pipeline rank (interleaved)")
    if schedules:
        layout.add_argument("--schedule", choices=schedules, default="1F1B", help="of torch.distributed.pipelining")
    layout.add_argument("--dp", type=_positive, help="data parallel (default: what the others leave)")
    layout.add_argument("--cp", type=_positive, default=1, help="context parallel")
    layout.add_argument("--ep", type=_positive, default=1, help="expert parallel, within dp")
    if "shard" in does or "replicas" in does:
        layout.add_argument(
            "--replicas", type=_positive, help="copies of what is sharded, each over dp / replicas ranks (HSDP)"
        )
    if "shard" in does:
        layout.add_argument(
            "--sharding", choices=("full", "grad_op"), help="grad_op: parameters stay whole until backward"
        )
    parser.add_argument("--dtype", choices=[*DTYPES, *SYNONYMS], help="of the parameters in forward and backward")
    parser.add_argument("--ckpt", choices=("none", "selective", "full"), default="none", help="recomputed activations")
    parser.add_argument("--ckpt-every", type=_positive, default=1, help="recompute in every n-th layer only")
    parser.add_argument("--steps", type=_positive, default=5)
    args = parser.parse_args(argv)
    for kind, others in WHO_DOES.items():
        if kind not in does and getattr(args, kind) != 1:
            parser.error(f"--{kind} {getattr(args, kind)}: {parser.prog} has no such parallelism; try {others}")
    _shape(args, parser, model, archs)
    _layout(args, parser)
    _precision(args, parser, dtypes)
    return args


def _of_mixture(shape: Any) -> None:
    shape.add_argument("--experts", type=_positive, help="of a layer (default: the published of --hidden, or 8)")
    shape.add_argument("--top-k", type=_positive, help="experts of a token (default: as --experts, or 2)")
    shape.add_argument("--expert-ffn", type=_positive, help="width of an expert (default: as --experts, or hidden)")
    shape.add_argument("--shared-ffn", type=_whole, help="width of the expert of all tokens, 0: none (as --expert-ffn)")
    shape.add_argument("--dense-layers", type=_whole, help="first layers that have no experts (default 1)")
    shape.add_argument("--attention", choices=("latent", "grouped"), default="latent", help="MLA or GQA")
    shape.add_argument("--grouped-gemm", action="store_true", help="experts in one kernel of groups, not in a batch")
    shape.add_argument("--overlap", action="store_true", help="send rows while the expert of all tokens computes")


def _shape(args: Any, parser: OneLine, model: dict[str, int], archs: tuple[str, ...]) -> None:
    if args.hidden is None and args.heads is None:
        args.kv_heads = args.kv_heads or model.get("kv_heads")
        args.ffn = args.ffn or model.get("ffn")
    args.heads = args.heads or (max(1, args.hidden // 128) if args.hidden else model["heads"])
    for name in ("layers", "hidden", "vocab", "seq"):
        setattr(args, name, getattr(args, name) or model[name])
    args.arch = args.arch or (_arch(args) if len(archs) > 1 else archs[0])
    args.kv_heads = args.kv_heads or args.heads
    args.ffn = args.ffn or 4 * args.hidden
    for large, small in (("hidden", "heads"), ("heads", "kv_heads")):
        if getattr(args, large) % getattr(args, small):
            flags = small.replace("_", "-")
            parser.error(f"--{flags} {getattr(args, small)} does not divide --{large} {getattr(args, large)}")
    if args.arch == "gpt" and args.kv_heads != args.heads:
        parser.error(f"--kv-heads {args.kv_heads}: a GPT has as many as --heads, {args.heads}; try --arch llama")


def _arch(args: Any) -> str:
    """Which model has such a shape: fewer kv-heads, a feed-forward of 3.5 hidden and 128k words are Llama's."""
    grouped = args.kv_heads is not None and args.kv_heads != args.heads
    gated = args.ffn is not None and args.ffn != 4 * args.hidden
    return "llama" if grouped or gated or args.vocab > 65536 else "gpt"


def _layout(args: Any, parser: OneLine) -> None:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    model = args.tp * args.pp * args.cp
    if args.dp is None:
        if world % model:
            parser.error(f"--tp {args.tp} * --pp {args.pp} * --cp {args.cp} = {model} does not divide {world} ranks")
        args.dp = world // model
    if model * args.dp != world:
        parser.error(
            f"--tp {args.tp} * --pp {args.pp} * --cp {args.cp} * --dp {args.dp} = {model * args.dp} ranks, "
            f"but {world} are running"
        )
    for name in ("heads", "kv_heads", "ffn", "vocab", "seq"):
        if getattr(args, name) % args.tp:
            flag = name.replace("_", "-")
            parser.error(f"--tp {args.tp} does not divide --{flag} {getattr(args, name)}")
    if args.cp > 1 and args.seq % (2 * args.cp * args.tp):
        parser.error(f"--seq {args.seq} must be a multiple of 2 * --cp {args.cp} * --tp {args.tp}")
    if args.vpp > 1 and args.pp == 1:
        parser.error(f"--vpp {args.vpp} is of a pipeline: give --pp, too")
    if args.layers < args.pp * args.vpp:
        parser.error(f"--layers {args.layers} must be --pp {args.pp} * --vpp {args.vpp} or more")
    if args.vpp > 1 and args.accum % args.pp:
        parser.error(f"--accum {args.accum} must be a multiple of --pp {args.pp} where --vpp interleaves")
    if args.dp % args.replicas:
        parser.error(f"--replicas {args.replicas} does not divide --dp {args.dp}")
    if args.dp % args.ep:
        parser.error(f"--ep {args.ep} does not divide --dp {args.dp}: experts are spread over data parallel ranks")


def recomputed(args: Any, layer: int) -> str:
    """Which of --ckpt holds for the layer."""
    return args.ckpt if layer % args.ckpt_every == 0 else "none"


def _precision(args: Any, parser: OneLine, dtypes: tuple[str, ...]) -> None:
    if args.dtype is None:
        legacy = args.arch == "gpt" and args.ckpt != "none" and "fp16" in dtypes
        args.dtype = "fp16" if legacy else "bf16"
    args.dtype = SYNONYMS.get(args.dtype, args.dtype)
    if args.ckpt == "none" and args.ckpt_every > 1:
        parser.error(f"--ckpt-every {args.ckpt_every}: nothing is recomputed; give --ckpt full or selective, too")
    if args.dtype not in dtypes:
        parser.error(f"--dtype {args.dtype}: {parser.prog} has {' and '.join(dtypes)}")
    args.torch_dtype = DTYPES[args.dtype]
