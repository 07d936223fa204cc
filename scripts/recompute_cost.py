"""What computing P again in backward costs: FLOPs up, bytes down, and the time.

    python scripts/recompute_cost.py --out results/h200_recompute
    python scripts/recompute_cost.py --gpu h200              # without a GPU: the model
    python scripts/recompute_cost.py --measure --device cpu  # times what runs there

Four backends: standard attention, flash_v1, and one V1 kernel in two forms that differ in nothing
but P, which the one keeps in HBM (kept_p) and the other computes again (recomputed_p; the mask of
its tiles is part of that). Times as in bench_attention.py: medians of rounds in which each runs
once. FLOPs are those spent, recompute included; bytes are the IO model's.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, from anywhere

from flash_attention import io_model, launch, tiling
from flash_attention.v1 import tables
from scripts import bench_attention
from scripts.common import csv_file, gpu_option
from scripts.common.arguments import (
    beside,
    check_out,
    file_name,
    fill,
    kernel_head_dim,
    length,
    positive,
    present_device,
    two_defaults,
)
from scripts.common.ending import ended
from scripts.common.measured_table import measured_table
from training.run_folder import replacing
from training.throughput import device_name

BACKENDS = ("naive", "flash_v1", "kept_p", "recomputed_p")
ENDED_WELL = ("model", "ok", "out of memory")
DEFAULTS = dict(seq_lens=[1024, 2048, 4096, 8192], tokens=8192, width=2048, dtype="bf16", rounds=20)
ON_CPU = {key: bench_attention.ON_CPU[key] for key in DEFAULTS}  # timed there


@dataclass
class Row:
    """One backend at one shape. gflop, gbyte: model, forward + backward. status: "model" where
    nothing was measured."""

    backend: str
    head_dim: int
    seq_len: int
    batch: int
    heads: int
    causal: bool
    status: str
    gflop: float
    gbyte: float
    forward_ms: float | None
    backward_ms: float | None
    peak_mib: float | None

    @property
    def total_ms(self) -> float | None:
        if self.forward_ms is None or self.backward_ms is None:
            return None
        return self.forward_ms + self.backward_ms


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    device = torch.device(args.device)
    where = device_name(device) if args.measure else None
    rows: list[Row] = []
    for n in track(args.seq_lens, "timing" if where else "model", console=Console(stderr=True)):
        timed = measured(n, args, device) if where else {}
        these = [timed.get(name) or unmeasured(name, n, args) for name in BACKENDS]
        rows += [costed(row, args.gpu.processors) for row in these]
        if args.out:
            about = {"gpu": args.gpu.name, "device": where, **csv_file.software()}
            csv_file.write(beside(args.out, ".csv"), rows, about)
    if args.out:
        with replacing(beside(args.out, ".png")) as partial_name:
            plot(rows, partial_name, where or args.gpu.name)
    Console(width=None if sys.stdout.isatty() else 130).print(table(rows))
    print(f"model: {args.gpu.name}; times: {where or 'not measured'}")
    return int(any(row.status not in ENDED_WELL for row in rows))


def measured(
    n: int, args: argparse.Namespace, device: torch.device
) -> dict[str, bench_attention.Row]:
    """The benchmark's rows of one length, by backend: of those that run on the device."""
    rows = bench_attention.bench_shape(
        backends(device), args.head_dim, n, args.causal, args, device
    )
    return {row.backend: row for row in rows}


def unmeasured(name: str, n: int, args: argparse.Namespace) -> bench_attention.Row:
    batch, heads = bench_attention.batch_and_heads(args, args.head_dim, n)
    return bench_attention.Row(
        name, args.head_dim, n, args.causal, batch, heads, args.dtype, status="model"
    )


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cuda = torch.cuda.is_available()
    gpu_option.add(parser)
    add, default = parser.add_argument, partial(two_defaults, DEFAULTS, ON_CPU)
    add("--head-dim", type=kernel_head_dim, default=64, metavar="D")
    add("--seq-lens", nargs="+", type=length, metavar="N", help=default("seq_lens"))
    add("--tokens", type=positive, help=f"batch x seq_len; {default('tokens')}")
    add("--width", type=positive, help=f"heads x head dim; {default('width')}")
    add("--causal", action=argparse.BooleanOptionalAction, default=False)
    add("--dtype", choices=bench_attention.DTYPES, help=default("dtype"))
    here = "cuda" if cuda else "cpu"
    add("--device", type=present_device, default=here, help="of --measure; default: %(default)s")
    add("--rounds", type=positive, help=f"timings of each backend; {default('rounds')}")
    add("--out", type=file_name, metavar="PATH", help="write PATH.csv and PATH.png")
    args = parser.parse_args(argv)
    fill(args, ON_CPU if args.measure and args.device == "cpu" else DEFAULTS)
    gpu_option.check(parser, args, args.device)
    if args.out:
        check_out(args.out, beside(args.out, ".csv"), beside(args.out, ".png"))
    return args


def backends(device: torch.device) -> dict[str, Callable]:
    """Name -> f(q, k, v, causal); the kernel in two forms where Triton runs."""
    found = {
        "naive": partial(bench_attention._call, bench_attention.naive_attention),
        "flash_v1": partial(bench_attention._call, bench_attention.flash_attention_v1),
    }
    if launch.triton is not None and (device.type == "cuda" or launch.interpreting()):
        from scripts.common import kept_probabilities

        found["kept_p"] = kept_probabilities.kept_p_attention
        found["recomputed_p"] = kept_probabilities.recomputed_p_attention
    return found


def costed(row: bench_attention.Row, processors: int) -> Row:
    """The row with the FLOPs it spends and the bytes of the model."""
    size = bench_attention.DTYPES[row.dtype].itemsize
    shape = io_model.Shape(
        row.batch, row.heads, row.seq_len, row.seq_len, row.head_dim,
        element_size=size, causal=row.causal,
    )  # fmt: skip
    flops, moved = spent(row.backend, shape, processors)
    return Row(
        row.backend, row.head_dim, row.seq_len, row.batch, row.heads, row.causal, row.status,
        flops / 1e9, moved / 1e9, row.forward_ms, row.backward_ms, row.peak_mib,
    )  # fmt: skip


def spent(backend: str, shape: io_model.Shape, processors: int) -> tuple[int, int]:
    """FLOPs and bytes of one forward and backward on a device of so many processors."""
    if backend == "naive":
        flops = io_model.naive_flops(shape) + io_model.naive_flops(shape, backward=True)
        accesses = io_model.naive_forward(shape) + io_model.naive_backward(shape)
        return flops, sum(io_model.traffic(accesses))
    table = tiling.tuned(tables.FORWARD, shape.head_dim, shape.element_size)
    splits = tiling.forward_splits(shape.batch * shape.heads, shape.nq, table, processors)
    forward = table.block_q, table.block_kv
    table = tiling.tuned(tables.BACKWARD, shape.head_dim, shape.element_size)
    backward = table.block_q, table.block_kv
    again = io_model.flash_flops(shape, *backward, backward=True) // 5  # one product of the five
    flops = io_model.flash_flops(shape, *forward) + 5 * again
    accesses = io_model.flash_forward(shape, *forward, splits)
    accesses += io_model.flash_backward(shape, *backward)
    moved = sum(io_model.traffic(accesses))
    if backend == "kept_p":
        flops -= again
        moved += kept(shape, *forward) + kept(shape, *backward)
    return flops, moved


def kept(shape: io_model.Shape, block_q: int, block_kv: int) -> int:
    """Bytes of P, tile by tile, and of the maxima of its time, passed over once."""
    entries = sum(
        max(0, shape.nq - blocks.start * block_q) * min(block_kv, shape.nk - j * block_kv)
        for j, blocks in enumerate(io_model.row_blocks(shape, block_q, block_kv))
    )
    maxima = io_model.SUM * io_model.row_visits(shape, block_q, block_kv)
    return shape.batch * shape.heads * entries * shape.element_size + maxima


def table(rows: list[Row]) -> Table:
    headings = "N,backend,GFLOP,GB (model),forward ms,backward ms,both ms,peak MiB,status"
    lines = map(_line, rows)
    return measured_table("forward + backward", headings.split(","), lines, ["backend", "status"])


def _line(row: Row) -> list[str]:
    numbers = (
        row.gflop, row.gbyte, row.forward_ms, row.backward_ms, row.total_ms, row.peak_mib,
    )  # fmt: skip
    shown = ["" if x is None else f"{x:,.3f}" if x < 100 else f"{x:,.0f}" for x in numbers]
    return [f"{row.seq_len:,}", row.backend, *shown, row.status]


def plot(rows: list[Row], path: Path, device: str) -> None:
    """FLOPs, bytes of the model and time of forward + backward over N."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from scripts.common.io_plots import plain_ticks

    panels = {"gflop": "GFLOP spent", "gbyte": "GB moved, model"}
    if any(row.total_ms is not None for row in rows):
        panels["total_ms"] = "ms"
    figure = Figure(figsize=(1 + 4 * len(panels), 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(panels))
    lengths = sorted({row.seq_len for row in rows})
    for axis, (key, label) in zip(axes, panels.items(), strict=True):
        for i, name in enumerate(BACKENDS):
            line = [r for r in rows if r.backend == name and getattr(r, key) is not None]
            values = [getattr(r, key) for r in line]
            size = 11 - 2 * i  # the model of two may be the same: the later one lies on the other
            axis.plot([r.seq_len for r in line], values, "o-", markersize=size, label=name)
        axis.set_xscale("log", base=2)
        axis.set_xticks(lengths, [f"{n:,}" for n in lengths])
        axis.set(yscale="log", xlabel="N", ylabel=label)
        plain_ticks(axis.yaxis)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    row = rows[0]
    mask = ", causal" if row.causal else ""
    figure.suptitle(
        f"forward + backward, D = {row.head_dim}{mask}, batch x N = {row.batch * row.seq_len:,}, "
        f"{row.heads} heads, {device}",
        fontsize="medium",
    )
    figure.savefig(path, format="png", dpi=120)


if __name__ == "__main__":
    sys.exit(ended(main))
