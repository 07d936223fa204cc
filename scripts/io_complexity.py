"""Sets the bytes that attention moves beside the IO model: over N, over the block size, over L2.

    python scripts/io_complexity.py lengths --out results/h200_io    # naive against flash, over N
    python scripts/io_complexity.py blocks --out results/h200_io     # the paper's figure 2
    python scripts/io_complexity.py l2 --out results/h200_io         # where model and DRAM part
    python scripts/io_complexity.py lengths --gpu h200               # without a GPU: the model

On a GPU each shape runs in a process of its own under Nsight Compute (ncu), which counts what goes
between L2 and DRAM and between the processors and L2; times are taken without it. Forward and
backward of one call, operations around the kernels included in "lengths"; "blocks" and "l2" look
at flash_v1's forward kernel alone. Inputs are bfloat16.

The model has no cache. The processors ask L2 for what the model counts, plus what the compiler
spills out of registers; DRAM is asked for what L2 does not hold. ncu empties the caches before each
kernel (--cache-control none leaves them), and what a kernel leaves unwritten in L2 when it ends is
not counted.
"""

import argparse
import csv
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, from anywhere

import flash_attention
from flash_attention import gpus, io_model, tiling
from scripts import io_plots, ncu
from scripts.show_tiling import find_gpu
from training.devices import versions
from training.run_folder import replacing

PARTS = ("lengths", "blocks", "l2")
NCU_LIMIT_S = 120


@dataclass(frozen=True)
class Case:
    """One call to look at. blocks: of flash_v1's forward and backward; None takes the table's."""

    attention: str
    batch: int
    heads: int
    seq_len: int
    head_dim: int
    causal: bool
    block_q: int | None = None
    block_kv: int | None = None
    kernel: str | None = None  # look at this one alone

    @property
    def shape(self) -> io_model.Shape:
        return io_model.Shape(
            self.batch, self.heads, self.seq_len, self.seq_len, self.head_dim, causal=self.causal
        )


@dataclass
class Row:
    """One case and direction: the model's bytes and what was measured; None where nothing was."""

    attention: str
    direction: str
    batch: int
    heads: int
    seq_len: int
    head_dim: int
    causal: bool
    kernel: str
    block_q: int | None = None
    block_kv: int | None = None
    flops: int | None = None
    model_read: int | None = None
    model_written: int | None = None
    intensity: float | None = None  # model, FLOP/byte
    bound: str | None = None
    roofline_ms: float | None = None
    l2_read: float | None = None
    l2_written: float | None = None
    spilled: float | None = None  # of l2_read + l2_written
    dram_read: float | None = None
    dram_written: float | None = None
    ncu_ms: float | None = None  # of the same kernels, caches emptied
    ms: float | None = None  # of the whole call, without ncu
    status: str = "model"

    @property
    def model(self) -> float | None:
        return _sum(self.model_read, self.model_written)

    @property
    def l2(self) -> float | None:
        return _sum(self.l2_read, self.l2_written)

    @property
    def dram(self) -> float | None:
        return _sum(self.dram_read, self.dram_written)


def _sum(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a + b


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    rows: list[Row] = []
    console = Console(width=None if sys.stdout.isatty() else 150)
    for case in track(cases(args), args.part, console=Console(stderr=True)):
        these = modelled(case, args.gpu)
        if args.measure:
            measure(case, these, args)
        rows += these
        if args.out:  # after every case: a crash loses none of those before it
            write(rows, Path(f"{args.out}_{args.part}.csv"), args.gpu)
    if args.out:
        with replacing(Path(f"{args.out}_{args.part}.png")) as partial:
            io_plots.PLOTS[args.part](rows, args.gpu, partial)
    console.print(table(rows, args.part))
    print(f"{args.gpu.name}; bytes in 10^9; L2 {args.gpu.l2 / gpus.MIB:.0f} MiB")
    failed = [row for row in rows if row.status not in ("model", "ok")]
    for row in failed:
        print(f"{row.attention} {row.direction}, N = {row.seq_len}: {row.status}")
    return int(bool(failed))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cuda = torch.cuda.is_available()
    add = parser.add_argument
    add("part", choices=PARTS)
    add("--gpu", metavar="GPU", help="of the model; default: the one that is here")
    add("--measure", action=argparse.BooleanOptionalAction, default=cuda, help="default: on a GPU")
    add("--head-dim", type=positive, default=64, metavar="D")
    add("--heads", nargs="+", type=positive, help="lengths, blocks: one; l2: several")
    add("--seq-lens", nargs="+", type=positive, metavar="N", help="lengths: several; else one")
    add("--block-sizes", nargs="+", type=int, default=[16, 32, 64, 128, 256], metavar="Bc")
    add("--causal", action=argparse.BooleanOptionalAction, default=False)
    add("--rounds", type=positive, default=10, help="timings of each case (default: 10)")
    add("--cache-control", choices=("all", "none"), default="all", help="ncu's, before a kernel")
    add("--out", metavar="PATH", help="write PATH_<part>.csv and PATH_<part>.png")
    args = parser.parse_args(argv)
    if args.measure and not cuda:
        parser.error("--measure, but there is no CUDA GPU here; leave it out")
    if bad := set(args.block_sizes) - set(tiling.BLOCK_SIZES):
        parser.error(f"--block-sizes: {min(bad)}; give some of {tiling.BLOCK_SIZES}")
    heads = {"lengths": [32], "blocks": [32], "l2": [4, 8, 16, 32, 64, 128, 256]}
    lengths = {"lengths": [1024, 2048, 4096, 8192], "blocks": [8192], "l2": [4096]}
    args.heads = args.heads or heads[args.part]
    args.seq_lens = args.seq_lens or lengths[args.part]
    if args.part != "l2" and len(args.heads) > 1:
        parser.error(f"--heads: {args.part} takes one number")
    if args.part != "lengths" and len(args.seq_lens) > 1:
        parser.error(f"--seq-lens: {args.part} takes one length")
    try:
        args.gpu = find_gpu(args.gpu or (None if cuda else "h200"))
    except ValueError as error:
        parser.error(f"--gpu: {error}")
    return args


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def cases(args: argparse.Namespace) -> list[Case]:
    d, causal = args.head_dim, args.causal
    if args.part == "blocks":
        n, heads = args.seq_lens[0], args.heads[0]
        return [
            Case("flash_v1", 1, heads, n, d, causal, 64, block_kv, "_forward_kernel")
            for block_kv in args.block_sizes
        ]
    if args.part == "l2":
        n = args.seq_lens[0]
        return [
            Case("flash_v1", 1, heads, n, d, causal, kernel="_forward_kernel")
            for heads in args.heads
        ]
    names = ["naive", "flash_v1"]
    if hasattr(flash_attention, "flash_attention_v2"):
        names.append("flash_v2")
    return [Case(name, 1, args.heads[0], n, d, causal) for n in args.seq_lens for name in names]


# The model ----------------------------------------------------------------------------------------


def modelled(case: Case, gpu: gpus.Gpu) -> list[Row]:
    """Forward, and backward unless one kernel is looked at, with the model's columns filled in.
    What the model does not know (flash_v2) is left empty."""
    directions = ["forward"] if case.kernel else ["forward", "backward"]
    rows = []
    for direction in directions:
        row = Row(
            case.attention, direction, case.batch, case.heads, case.seq_len, case.head_dim,
            case.causal, case.kernel or "all",
        )  # fmt: skip
        rows.append(row)
        if case.attention == "naive":
            count = io_model.naive_forward if direction == "forward" else io_model.naive_backward
            accesses = count(case.shape)
            row.flops = io_model.naive_flops(case.shape, direction == "backward")
        elif case.attention == "flash_v1":
            accesses = flash_v1(case, row, gpu)
        else:
            continue
        row.model_read, row.model_written = io_model.traffic(accesses, case.kernel)
        line = io_model.roofline(row.flops, row.model, gpu)
        row.intensity, row.bound = line.intensity, line.bound
        row.roofline_ms = 1e3 * line.seconds
    return rows


def flash_v1(case: Case, row: Row, gpu: gpus.Gpu) -> list[io_model.Access]:
    """The accesses of one direction, with the blocks and splits that the launcher takes."""
    backward = row.direction == "backward"
    choose = tiling.backward_blocks if backward else tiling.forward_blocks
    blocks = choose(case.head_dim, case.shape.element_size).override(case.block_q, case.block_kv)
    row.block_q, row.block_kv = sizes = blocks.block_q, blocks.block_kv
    row.flops = io_model.flash_flops(case.shape, *sizes, backward)
    if backward:
        return io_model.flash_backward(case.shape, *sizes, splits=-(-case.seq_len // sizes[1]))
    row_blocks = -(-case.seq_len // blocks.block_q)
    at_a_time = gpu.processors * blocks.per_processor
    splits = tiling.num_splits(case.batch * case.heads, row_blocks, at_a_time)
    return io_model.flash_forward(case.shape, *sizes, splits)


# The measurement ----------------------------------------------------------------------------------


def measure(case: Case, rows: list[Row], args: argparse.Namespace) -> None:
    """Fill in the times and the counters of a case, and its status."""
    try:
        times = timed(case, args.rounds)  # compiles, for ncu too
        kernels = ncu.profile(probe(case), args.cache_control, timeout_s=NCU_LIMIT_S)
        fill(rows, kernels, case.kernel)
    except (ncu.NcuError, torch.OutOfMemoryError, ValueError) as error:
        for row in rows:
            row.status = str(error).splitlines()[0]
        print(error, file=sys.stderr, flush=True)
        return
    for row, ms in zip(rows, times, strict=False):
        row.ms, row.status = ms, "ok"


def probe(case: Case) -> list[str]:
    """The command line that runs a case once for ncu."""
    command = [sys.executable, "-m", "scripts.io_probe"]
    for name in ("attention", "batch", "heads", "seq_len", "head_dim", "block_q", "block_kv"):
        if getattr(case, name) is not None:
            command.append(f"--{name.replace('_', '-')}={getattr(case, name)}")
    command += ["--causal"] * case.causal + ["--forward-only"] * (case.kernel is not None)
    return command


def fill(rows: list[Row], kernels: list[ncu.Kernel], only: str | None) -> None:
    """The counters of forward, before the probe's boundary, and of backward, after it.

    Raises:
        NcuError: the boundary, or the kernel that is looked at, was not among those counted.
    """
    names = [kernel.name for kernel in kernels]
    if "_boundary" not in names:
        raise ncu.NcuError(f"no boundary between forward and backward among {names}")
    at = names.index("_boundary")
    for row, part in zip(rows, (kernels[:at], kernels[at + 1 :]), strict=False):
        those = [kernel for kernel in part if only in (None, kernel.name)]
        if not those:
            raise ncu.NcuError(f"no kernel {only or ''} in {row.direction}; found {names}")
        for name in ("l2_read", "l2_written", "spilled", "dram_read", "dram_written"):
            setattr(row, name, sum(getattr(kernel, name) for kernel in those))
        row.ncu_ms = 1e3 * sum(kernel.seconds for kernel in those)


def timed(case: Case, rounds: int) -> list[float]:
    """Median milliseconds of forward and, unless one kernel is looked at, of backward, each with a
    cold L2, after a warm-up."""
    try:
        times = _rounds(case, rounds + 1)[1:]
    finally:
        torch.cuda.empty_cache()  # the probe is another process
    return [statistics.median(ms) for ms in zip(*times, strict=True)]


def _rounds(case: Case, rounds: int) -> list[list[float]]:
    from scripts.bench_attention import L2_BYTES, timed_call
    from scripts.io_probe import attend, inputs

    device = torch.device("cuda")
    attention = attend(case.attention, case.block_q, case.block_kv)
    q, k, v, do = inputs(case.batch, case.heads, case.seq_len, case.head_dim, device)
    cold = torch.empty(L2_BYTES, dtype=torch.int8, device=device)
    times = []
    for _ in range(rounds):
        cold.zero_()
        ms, o = timed_call(lambda: attention(q, k, v, case.causal), device)
        times.append([ms])
        if not case.kernel:
            cold.zero_()
            ms, _ = timed_call(lambda o=o: torch.autograd.grad(o, (q, k, v), do), device)
            times[-1].append(ms)
        o = None
    return times


# What is shown ------------------------------------------------------------------------------------


def table(rows: list[Row], part: str) -> Table:
    columns: dict[str, Callable[[Row], object]] = {
        "attention": lambda r: r.attention,
        "direction": lambda r: r.direction,
        "heads": lambda r: r.heads,
        "N": lambda r: f"{r.seq_len:,}",
        "Br x Bc": lambda r: f"{r.block_q} x {r.block_kv}" if r.block_q else None,
        "model": lambda r: _giga(r.model),
        "FLOP/byte": lambda r: r.intensity and f"{r.intensity:.0f}",
        "bound": lambda r: r.bound,
        "roofline ms": lambda r: r.roofline_ms and f"{r.roofline_ms:.3f}",
        "to L2": lambda r: _giga(r.l2),
        "spills": lambda r: _giga(r.spilled),
        "to DRAM": lambda r: _giga(r.dram),
        "DRAM / model": lambda r: f"{r.dram / r.model:.2f}" if r.dram and r.model else None,
        "ms": lambda r: r.ms and f"{r.ms:.3f}",
    }
    out = Table(title=f"bytes moved: {part}", title_justify="left")
    for name in columns:
        out.add_column(name, justify="left" if name in ("attention", "direction") else "right")
    for row in rows:
        out.add_row(*(str(f(row) or "") for f in columns.values()))
    return out


def _giga(count: float | None) -> str | None:
    return None if count is None else f"{count / 1e9:.3f}"


def write(rows: list[Row], path: Path, gpu: gpus.Gpu) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    about = {"gpu": gpu.name, **{p: versions()[p] for p in ("torch", "triton")}}
    with (
        replacing(path) as partial,
        open(partial, "w", newline="", encoding="utf-8") as file,
    ):
        writer = csv.DictWriter(file, [*asdict(rows[0]), *about])
        writer.writeheader()
        writer.writerows(asdict(row) | about for row in rows)


if __name__ == "__main__":
    sys.exit(main())
