"""Times launch configurations of the Triton kernels and prints the best as lines of their tables.

    python scripts/tune_blocks.py v2_forward --head-dims 64 128 --out h200_v2_forward
    python scripts/tune_blocks.py v1_forward v1_backward --grid block_kv=128,256 num_stages=1,2

Kernels: v1_forward, v1_backward, v2_forward, v2_dk_dv, v2_dq; all without a name. Every combination
of the grid and the table's own entry is compiled (in several processes), compared with PyTorch's
attention at every length, and timed in turns with the others, all causal. What does not fit the GPU
or is not right is left out. The best has the least geometric mean of its times over the lengths.
Where none is right, the exit status is 1.

--out writes PATH.csv, all candidates. The lines are printed, and the tables left as they are.
"""

import argparse
import itertools
import math
import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, from anywhere

from flash_attention import launch, tiling
from scripts import bench_attention
from scripts.bench_attention import DTYPES
from scripts.common import csv_file
from scripts.common.arguments import beside, check_out, file_name, kernel_head_dim, positive
from scripts.common.ending import ended
from scripts.common.timing import cold_buffer, timed_call
from training.throughput import device_name

if launch.triton is not None:
    from flash_attention import v1, v2
    from flash_attention.delta import delta

# Relative error, in norm, beside PyTorch's result in the same dtype: each rounds P once or twice.
BOUNDS = {"bf16": 2e-2, "fp16": 3e-3, "fp32": 1e-4}
GRID = {
    "block_q": [32, 64, 128],
    "block_kv": [32, 64, 128],
    "num_warps": [4, 8],
    "num_stages": [2, 3],
}
V1_FORWARD = {**GRID, "block_kv": [64, 128, 256], "num_stages": [1, 2], "per_processor": [1, 2]}
V2_GRID = {**GRID, "heads_at_a_time": [4], "descriptors": [False, True]}
GRIDS = {
    "v1_forward": V1_FORWARD,
    "v1_backward": GRID,
    "v2_forward": V2_GRID,
    "v2_dk_dv": V2_GRID,
    "v2_dq": V2_GRID,
}
SHOWN = 8  # rows of the table for one kernel and head dim


@dataclass(frozen=True)
class Inputs:
    """What kernels are called with, ``[B, H, N, D]`` and ``[B, H, N]``, and what is right."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    o: Tensor
    m: Tensor
    l: Tensor
    prepared: tuple[Tensor, Tensor, Tensor]  # dO, L, D as delta.py makes them
    right: dict[str, Tensor]  # o, dq, dk, dv of PyTorch; lse in base 2, of V2's table


@dataclass(frozen=True)
class Kernel:
    """``run(blocks, inputs)`` returns the tensors named ``returns``."""

    table: dict[tuple[int, int], tiling.Blocks]
    returns: tuple[str, ...]
    run: Callable[[tiling.Blocks, Inputs], tuple[Tensor, ...]]


@dataclass
class Row:
    """A candidate at one head dim. error: the largest of any length; ms by length."""

    kernel: str
    head_dim: int
    blocks: tiling.Blocks
    status: str = "ok"
    error: float = 0.0
    ms: dict[int, float] = field(default_factory=dict)

    @property
    def mean_ms(self) -> float:
        return math.exp(statistics.fmean(map(math.log, self.ms.values())))


def kernels() -> dict[str, Kernel]:
    """By name, all that can be tuned."""

    def o_lse(o: Tensor, m: Tensor, l: Tensor) -> tuple[Tensor, Tensor]:
        return o, m + l.log2()

    def v1_forward(blocks: tiling.Blocks, x: Inputs) -> tuple[Tensor, ...]:
        return o_lse(*v1.forward.forward(x.q, x.k, x.v, splits=None, blocks=blocks, **options(x.q)))

    def v1_backward(blocks: tiling.Blocks, x: Inputs) -> tuple[Tensor, ...]:
        given = (x.do, x.q, x.k, x.v, x.o, x.m, x.l)
        return v1.backward.backward(*given, splits=None, blocks=blocks, **options(x.q))

    def v2_forward(blocks: tiling.Blocks, x: Inputs) -> tuple[Tensor, ...]:
        return o_lse(*v2.forward.forward(x.q, x.k, x.v, blocks=blocks, **options(x.q)))

    def v2_backward(launcher: Callable, blocks: tiling.Blocks, x: Inputs) -> tuple[Tensor, ...]:
        scaled_do, lse, row_delta = x.prepared
        result = launcher(scaled_do, x.q, x.k, x.v, lse, row_delta, blocks=blocks, **options(x.q))
        return result if isinstance(result, tuple) else (result,)

    dk_dv, dq = (partial(v2_backward, f) for f in (v2.backward.dk_dv, v2.backward.dq))
    results, gradients = ("o", "lse"), ("dq", "dk", "dv")
    return {
        "v1_forward": Kernel(v1.tables.FORWARD, results, v1_forward),
        "v1_backward": Kernel(v1.tables.BACKWARD, gradients, v1_backward),
        "v2_forward": Kernel(v2.tables.FORWARD, results, v2_forward),
        "v2_dk_dv": Kernel(v2.tables.DK_DV, gradients[1:], dk_dv),
        "v2_dq": Kernel(v2.tables.DQ, gradients[:1], dq),
    }


def options(q: Tensor) -> dict:
    """What all kernels are launched with here."""
    scale = q.shape[-1] ** -0.5
    return dict(causal=True, scale=scale, dropout_p=0.0, seed=None, segment_ids=None)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    known, device = kernels(), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = [
        Row(name, head_dim, blocks)
        for name in args.kernels
        for head_dim in args.head_dims
        for blocks in candidates(name, known[name], head_dim, args)
    ]
    compile_all(rows, args, device)
    for head_dim in args.head_dims:
        for n in args.seq_lens:
            x = inputs(head_dim, n, args, device)
            for name in args.kernels:
                these = [r for r in rows if (r.kernel, r.head_dim) == (name, head_dim)]
                measure(these, known[name], x, n, args)
                if args.out:  # after each: a crash loses none of those before it
                    write(rows, args, device)
    Console(width=None if sys.stdout.isatty() else 100).print(table(rows, known, args))
    print(f"{device_name(device)}, torch {torch.__version__}, {args.dtype}, causal")
    found = [(n, d, best(rows, n, d)) for n in args.kernels for d in args.head_dims]
    for name, head_dim, row in found:
        print(f"{name}: {line(row, args)}" if row else f"{name}, {head_dim}: none is right")
    return 0 if all(row for _, _, row in found) else 1


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if launch.triton is None or not (torch.cuda.is_available() or launch.interpreting()):
        parser.epilog = "Not here: it needs Triton and a CUDA GPU (or TRITON_INTERPRET=1)."
    add = parser.add_argument
    names = list(GRIDS)
    add("kernels", nargs="*", metavar="KERNEL", help=f"some of {', '.join(names)}; default: all")
    add("--head-dims", nargs="+", type=kernel_head_dim, default=[64, 128], metavar="D")
    add("--seq-lens", nargs="+", type=positive, default=[1024, 4096, 16384], metavar="N")
    add("--tokens", type=positive, default=16384, help="batch x seq_len (default: 16384)")
    add("--width", type=positive, default=2048, help="heads x head dim (default: 2048)")
    default = "fp32" if launch.interpreting() else "bf16"
    add("--dtype", choices=DTYPES, default=default, help="default: %(default)s")
    add("--grid", nargs="+", default=[], metavar="FIELD=V,V", help="other values of Blocks' fields")
    add("--rounds", type=positive, default=10, help="timings of each (default: 10)")
    workers = min(16, os.cpu_count() or 1)
    add("--processes", type=positive, default=workers, help="that compile (default: %(default)s)")
    add("--out", type=file_name, metavar="PATH", help="write PATH.csv")
    args = parser.parse_args(argv)
    if parser.epilog:
        parser.error(parser.epilog)
    args.kernels = args.kernels or names
    if unknown := set(args.kernels) - set(names):
        parser.error(f"{min(unknown)} is no kernel; give some of {', '.join(names)}")
    args.grid = dict(_field(parser, text) for text in args.grid)
    for name in args.grid:
        if not any(name in GRIDS[kernel] for kernel in args.kernels):
            parser.error(f"--grid: {name} is no choice of {', '.join(args.kernels)}")
    if args.dtype == "bf16" and launch.interpreting():
        parser.error("--dtype: bf16 is wrong in Triton's interpreter; give fp16 or fp32")
    if min(args.seq_lens) < 2:
        parser.error("--seq-lens: 1 token has dq and dk of 0; give lengths of at least 2")
    if args.out:
        check_out(args.out, beside(args.out, ".csv"))
    return args


def _field(parser: argparse.ArgumentParser, text: str) -> tuple[str, list[int]]:
    """A field of Blocks and its values."""
    name, _, values = text.partition("=")
    numbers = values.split(",")
    if name not in {f.name for f in fields(tiling.Blocks)} or not all(map(str.isdecimal, numbers)):
        known = ", ".join(f.name for f in fields(tiling.Blocks))
        parser.error(f"--grid: {text}; give FIELD=NUMBER,NUMBER with a field of {known}")
    numbers = [bool(int(n)) if name == "descriptors" else int(n) for n in numbers]
    if name in ("block_q", "block_kv") and not set(numbers) <= set(tiling.BLOCK_SIZES):
        parser.error(f"--grid: {text}; blocks have {', '.join(map(str, tiling.BLOCK_SIZES))} rows")
    return name, numbers


def candidates(
    name: str, kernel: Kernel, head_dim: int, args: argparse.Namespace
) -> list[tiling.Blocks]:
    """The table's entry, then the grid's combinations of the fields that the kernel has."""
    own = tiling.tuned(kernel.table, head_dim, DTYPES[args.dtype].itemsize)
    grid = {field: args.grid.get(field, values) for field, values in GRIDS[name].items()}
    made = [
        tiling.Blocks(**dict(zip(grid, values, strict=True)))
        for values in itertools.product(*grid.values())
    ]
    return list(dict.fromkeys([own, *made]))


def inputs(head_dim: int, n: int, args: argparse.Namespace, device: torch.device) -> Inputs:
    """Random tensors of a length, with the results of PyTorch's attention."""
    batch, heads = bench_attention.batch_and_heads(args, head_dim, n)
    row = bench_attention.Row("", head_dim, n, True, batch, heads, args.dtype)
    *leaves, do = bench_attention.inputs(row, device)
    o = F.scaled_dot_product_attention(*leaves, is_causal=True)
    right = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(o, leaves, do), strict=True))
    right["o"] = o = o.detach()
    q, k, v = (t.detach() for t in leaves)
    blocks = tiling.tuned(v2.tables.FORWARD, head_dim, q.element_size())
    _, m, l = v2.forward.forward(q, k, v, blocks=blocks, **options(q))
    right["lse"] = m + l.log2()
    return Inputs(q, k, v, do, o, m, l, delta(o, do, m, l), right)


def compile_all(rows: list[Row], args: argparse.Namespace, device: torch.device) -> None:
    """Fill Triton's cache in several processes, and mark the candidates that do not fit, and all
    that are left when one makes the compiler end its process."""
    if device.type != "cuda":
        return
    jobs = [(row, argparse.Namespace(**{**vars(args), "tokens": 2048})) for row in rows]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(args.processes, len(jobs)), mp_context=spawn) as pool:
        said = [pool.submit(_compiled, job) for job in jobs]
        pairs = zip(rows, said, strict=True)
        for row, future in track(pairs, "compiling", len(jobs), console=Console(stderr=True)):
            try:
                row.status = future.result()
            except BrokenProcessPool:
                row.status = "not compiled"


def _compiled(job: tuple[Row, argparse.Namespace]) -> str:
    """Launch on two short sequences: all lengths that are multiples of 16 share the kernel."""
    row, args = job
    try:
        x = inputs(row.head_dim, 1024, args, torch.device("cuda"))
        kernels()[row.kernel].run(row.blocks, x)
        torch.cuda.synchronize()
    except Exception as error:
        return type(error).__name__
    return "ok"


def measure(rows: list[Row], kernel: Kernel, x: Inputs, n: int, args: argparse.Namespace) -> None:
    """Check and time the candidates that are ok so far, in turns, at one length."""
    cold, times = cold_buffer(x.q.device), {id(row): [] for row in rows}
    for row in rows:
        if row.status == "ok":
            try:
                got = kernel.run(row.blocks, x)
            except Exception as error:
                row.status = type(error).__name__
                continue
            errors = [_error(t, x.right[name]) for t, name in zip(got, kernel.returns, strict=True)]
            row.error = max(row.error, *errors)
            row.status = "ok" if row.error <= BOUNDS[args.dtype] else "wrong"
    what = f"timing {rows[0].kernel}, head dim {rows[0].head_dim}, N = {n}"
    for _ in track(range(args.rounds), what, console=Console(stderr=True)):
        for row in rows:
            if row.status == "ok":
                try:
                    timing = timed_call(partial(kernel.run, row.blocks, x), cold)
                except Exception as error:
                    row.status = type(error).__name__
                else:
                    times[id(row)].append(timing.ms)
    for row in rows:
        if row.status == "ok":
            row.ms[n] = statistics.median(times[id(row)])


def _error(got: Tensor, right: Tensor) -> float:
    error = float((got.float() - right.float()).norm() / right.float().norm())
    return error if math.isfinite(error) else math.inf


def ranked(rows: list[Row], name: str, head_dim: int) -> list[Row]:
    """Those that are right at all lengths, the fastest first."""
    these = [r for r in rows if (r.kernel, r.head_dim, r.status) == (name, head_dim, "ok")]
    return sorted(these, key=lambda row: row.mean_ms)


def best(rows: list[Row], name: str, head_dim: int) -> Row | None:
    return next(iter(ranked(rows, name, head_dim)), None)


def line(row: Row, args: argparse.Namespace) -> str:
    """The entry as the tables have it: without what is default."""
    blocks, default = row.blocks, tiling.Blocks(0, 0)
    named = [f.name for f in fields(blocks) if not f.name.startswith("block")]
    given = "".join(
        f", {name}={getattr(blocks, name)}"
        for name in named
        if name in ("num_warps", "num_stages") or getattr(blocks, name) != getattr(default, name)
    )
    key = max(64, tiling.padded_head_dim(row.head_dim)), min(4, DTYPES[args.dtype].itemsize)
    return f"{key}: Blocks({blocks.block_q}, {blocks.block_kv}{given}),"


def table(rows: list[Row], known: dict[str, Kernel], args: argparse.Namespace) -> Table:
    """The fastest of each kernel and head dim, with the table's entry (*) wherever it stands."""
    lengths = [f"ms at {n:,}" for n in args.seq_lens]
    out = Table("kernel", "D", "blocks", *lengths, "mean ms", "error", title="fastest first")
    for name in args.kernels:
        for head_dim in args.head_dims:
            own = tiling.tuned(known[name].table, head_dim, DTYPES[args.dtype].itemsize)
            for place, row in enumerate(ranked(rows, name, head_dim)):
                if place < SHOWN or row.blocks == own:
                    b = row.blocks
                    text = f"{b.block_q} x {b.block_kv}, {b.num_warps} warps, {b.num_stages} st."
                    text += ", maps" if "descriptors" in GRIDS[name] and b.descriptors else ""
                    text += " *" if row.blocks == own else ""
                    ms = [f"{row.ms[n]:.4f}" for n in args.seq_lens]
                    mean, error = f"{row.mean_ms:.4f}", f"{row.error:.1e}"
                    out.add_row(name, str(head_dim), text, *ms, mean, error)
    return out


def write(rows: list[Row], args: argparse.Namespace, device: torch.device) -> None:
    def flat(row: Row) -> dict:
        blocks = {f.name: int(getattr(row.blocks, f.name)) for f in fields(row.blocks)}
        ms = {f"ms_{n}": row.ms.get(n) for n in args.seq_lens}
        about = {"kernel": row.kernel, "head_dim": row.head_dim, **blocks}
        return {**about, "status": row.status, "error": row.error, **ms}

    shape = {"tokens": args.tokens, "width": args.width, "dtype": args.dtype}
    about = {**shape, "device": device_name(device), **csv_file.software()}
    csv_file.write(beside(args.out, ".csv"), [flat(row) for row in rows], about)


if __name__ == "__main__":
    sys.exit(ended(main))
