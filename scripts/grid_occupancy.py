"""Time of flash_v1's forward against the number of heads: V1's grid is (batch, head).

    python scripts/grid_occupancy.py --out results/h200_grid
    python scripts/grid_occupancy.py --gpu h200            # without a GPU: the model

With q_splits=1, the paper's grid, each (batch, head) is one program: until there are as many as the
processors hold, one more head costs no time, and the rest of the GPU idles. "auto" shares the rows
of a head among programs. The model counts waves: programs over how many run at a time, rounded up,
times the rows of a program; it is scaled to the first point measured with q_splits=1.
"""

import argparse
import math
import statistics
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, from anywhere

from flash_attention import flash_attention_v1, gpus, tiling
from flash_attention.v1 import tables
from scripts.common import csv_file, gpu_option
from scripts.common.arguments import beside, check_out, file_name, kernel_head_dim, length, positive
from scripts.common.ending import ended
from scripts.common.measured_table import measured_table
from scripts.common.timing import cold_buffer, timed_call
from training.run_folder import replacing

HEADS = [1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 132, 136, 160, 192, 224, 256, 264, 272, 320, 396, 528]


@dataclass
class Row:
    """One number of heads (batch x heads) under one q_splits."""

    head_dim: int
    seq_len: int
    heads: int
    q_splits: str
    programs: int
    waves: int
    work: float  # model: row blocks that the last program ends after, one after the other
    ms: float | None = None
    tflops: float | None = None


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    rows: list[Row] = []
    todo = [(d, h) for d in args.head_dims for h in args.heads]
    bar = Console(stderr=True, quiet=not args.measure)
    for head_dim, heads in track(todo, "timing", console=bar):
        these = [modelled(head_dim, heads, args.seq_len, s, args.gpu) for s in ("1", "auto")]
        if args.measure:
            for row in these:
                row.ms = timed(row, args.rounds)
                row.tflops = 4 * heads * row.seq_len**2 * head_dim / row.ms / 1e9
        rows += these
        if args.out:
            about = {"gpu": args.gpu.name, **csv_file.software()}
            csv_file.write(beside(args.out, ".csv"), rows, about)
    if args.out:
        with replacing(beside(args.out, ".png")) as partial:
            plot(rows, partial, args.gpu)
    Console(width=None if sys.stdout.isatty() else 100).print(table(rows))
    times = "" if args.measure else "; times: not measured"
    print(f"{args.gpu.name}: {args.gpu.processors} processors{times}")
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    gpu_option.add(parser)
    add = parser.add_argument
    add("--head-dims", nargs="+", type=kernel_head_dim, default=[64, 128], metavar="D")
    add("--heads", nargs="+", type=positive, default=HEADS, help="batch x heads")
    add("--seq-len", type=length, default=2048, metavar="N")
    add("--rounds", type=positive, default=10, help="timings of each (default: 10)")
    add("--out", type=file_name, metavar="PATH", help="write PATH.csv and PATH.png")
    args = parser.parse_args(argv)
    gpu_option.check(parser, args)
    if args.out:
        check_out(args.out, beside(args.out, ".csv"), beside(args.out, ".png"))
    return args


def modelled(head_dim: int, heads: int, n: int, q_splits: str, gpu: gpus.Gpu) -> Row:
    blocks = tiling.tuned(tables.FORWARD, head_dim, 2)
    row_blocks = math.ceil(n / blocks.block_q)
    at_a_time = gpu.processors * blocks.per_processor
    splits = 1 if q_splits == "1" else tiling.forward_splits(heads, n, blocks, gpu.processors)
    programs = heads * splits
    waves = math.ceil(programs / at_a_time)
    return Row(head_dim, n, heads, q_splits, programs, waves, waves * row_blocks / splits)


def timed(row: Row, rounds: int) -> float:
    """Median milliseconds of a forward, after a warm-up."""
    device = torch.device("cuda")
    shape = (1, row.heads, row.seq_len, row.head_dim)
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(3))
    splits = "auto" if row.q_splits == "auto" else int(row.q_splits)
    cold = cold_buffer(device)
    call = partial(flash_attention_v1, q, k, v, q_splits=splits)
    times = [timed_call(call, cold).ms for _ in range(rounds + 1)]
    return statistics.median(times[1:])


def table(rows: list[Row]) -> Table:
    headings = "head dim,batch x heads,q_splits,programs,waves,model: row blocks,ms,TFLOP/s"
    return measured_table("grid of flash_v1, forward", headings.split(","), map(_line, rows))


def _line(row: Row) -> list[str]:
    measured = ["" if x is None else f"{x:.3f}" for x in (row.ms, row.tflops)]
    return [
        str(row.head_dim), str(row.heads), row.q_splits, str(row.programs), str(row.waves),
        f"{row.work:.1f}", *measured,
    ]  # fmt: skip


def plot(rows: list[Row], path: Path, gpu: gpus.Gpu) -> None:
    """Time over batch x heads, measured and by the model, a panel for each head dim."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    head_dims = sorted({row.head_dim for row in rows})
    figure = Figure(figsize=(1.5 + 5 * len(head_dims), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    for axis, head_dim in zip(
        figure.subplots(1, len(head_dims), squeeze=False)[0], head_dims, strict=True
    ):
        first = next(r for r in rows if (r.head_dim, r.q_splits) == (head_dim, "1"))
        scale = first.ms / first.work if first.ms else 1.0
        for i, splits in enumerate(("1", "auto")):
            line = [r for r in rows if (r.head_dim, r.q_splits) == (head_dim, splits)]
            heads, label = [r.heads for r in line], f"q_splits={splits}"
            axis.plot(heads, [scale * r.work for r in line], f"C{i}:", label=f"{label}, model")
            if line[0].ms:
                axis.plot(heads, [r.ms for r in line], f"C{i}o-", label=f"{label}, measured")
        for k in (1, tiling.tuned(tables.FORWARD, head_dim, 2).per_processor):
            axis.axvline(k * gpu.processors, color="grey", lw=1)
        axis.set(title=f"D = {head_dim}", xlabel="batch x heads")
        axis.set(ylabel="ms" if rows[0].ms else "row blocks")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    title = f"flash_v1 forward, N = {rows[0].seq_len:,}; grey: the {gpu.processors} processors"
    if any(tiling.tuned(tables.FORWARD, d, 2).per_processor == 2 for d in head_dims):
        title += ", and two programs on each"
    figure.suptitle(f"{title}; {gpu.name}", fontsize="medium")
    figure.savefig(path, format="png", dpi=120)


if __name__ == "__main__":
    sys.exit(ended(main))
