"""Sets the bytes that attention moves beside the IO model: over N, over the block size, over L2.

    python scripts/io_complexity.py lengths --out results/h200_io    # naive, flash_v1, flash_v2
    python scripts/io_complexity.py blocks --out results/h200_io     # the paper's figure 2
    python scripts/io_complexity.py l2 --out results/h200_io         # where model and DRAM part
    python scripts/io_complexity.py lengths --gpu h200               # without a GPU: the model
    python scripts/io_complexity.py lengths --attentions flash_v2 --seq-lens 4096

On a GPU Nsight Compute (ncu) counts what goes between L2 and DRAM and between the processors and
L2, in one process for each attention; times are taken without it. "lengths" looks at forward and
backward of one call, operations around the kernels included; "blocks" and "l2" at the forward
kernels of flash_v1 and flash_v2 alone. Inputs are bfloat16.

"blocks" is over the rows of the block that stays on the chip while the other tensors pass: of K and
V in flash_v1, of Q in flash_v2. The blocks that pass have 64 rows.

The model has no cache. The processors ask L2 for what the model counts, plus what the compiler
spills out of registers, less what programs of one head ask for together (flash_v2, few heads); DRAM
is asked for what L2 does not hold. ncu empties the caches before each
kernel (--cache-control none leaves them), and what a kernel leaves unwritten in L2 when it ends is
not counted.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, from anywhere

from flash_attention import gpus, io_model, tiling
from flash_attention.v1 import tables as v1_tables
from flash_attention.v2 import tables
from scripts.common import csv_file, gpu_option, io_plots, ncu
from scripts.common.arguments import beside, check_out, file_name, kernel_head_dim, length, positive
from scripts.common.ending import ended
from scripts.common.measured_table import measured_table
from scripts.common.timing import cold_buffer, timed_call
from training.run_folder import replacing

PARTS = ("lengths", "blocks", "l2")
ATTENTIONS = ("naive", "flash_v1", "flash_v2")
PASSING_BLOCK = 64  # of "blocks"
NCU_LIMIT_S = 240  # for all cases of one attention
WHOLE = "whole calls with tuned blocks: forward of flash_v1 sets O, m, l first and rounds O last"
ALONE = "forward kernels alone, ms by ncu: that flash_v1 sets O, m, l and rounds O is not counted"
LEFT_OUT = {  # of the table: what is the same in all rows, and what is least missed
    "lengths": ("heads", "Br x Bc", "q_\nsplits", "spilled\nGB"),
    "blocks": ("N", "heads", "FLOP\n/byte"),
    "l2": ("N", "Br x Bc", "FLOP\n/byte"),
}
COUNTED = {"lengths": WHOLE, "blocks": ALONE, "l2": ALONE}


@dataclass(frozen=True)
class Case:
    """One call to look at. Blocks: of a flash attention's kernels; None takes the tables'."""

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
    dq_block_q: int | None = None  # of the kernel that flash_v2 has for dQ
    dq_block_kv: int | None = None
    q_splits: int | None = None  # of flash_v1's forward: programs that share the rows of a head
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

    @property
    def shown_ms(self) -> float | None:
        """Of what the row's bytes are of: of the kernel looked at, or of the whole call."""
        return self.ms if self.kernel == "all" else self.ncu_ms


def _sum(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a + b


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    todo = [(case, modelled(case, args.gpu)) for case in cases(args)]
    rows = [row for _, these in todo for row in these]
    console = Console(width=None if sys.stdout.isatty() else 100)
    if args.measure:
        measure(todo, rows, args)
    save(rows, args)
    if args.out:
        with replacing(beside(args.out, f"_{args.part}.png")) as partial:
            io_plots.PLOTS[args.part](rows, args.gpu, partial)
    console.print(table(rows, args.part))
    print(COUNTED[args.part])
    measured = "" if args.measure else "; counters and times: not measured"
    print(f"{args.gpu.name}; GB: 10^9 bytes; L2 {args.gpu.l2 / gpus.MIB:.0f} MiB{measured}")
    failed = [row for row in rows if row.status not in ("model", "ok")]
    for row in failed:
        print(f"{row.attention} {row.direction}, N = {row.seq_len}: {row.status}")
    return int(bool(failed))


def save(rows: list[Row], args: argparse.Namespace) -> None:
    if args.out:
        about = {"gpu": args.gpu.name, **csv_file.software()}
        csv_file.write(beside(args.out, f"_{args.part}.csv"), rows, about)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("part", choices=PARTS)
    gpu_option.add(parser)
    others = ", ".join(ATTENTIONS[1:])
    default = f"default: all, {', '.join(ATTENTIONS)}; blocks, l2: {others}, and no others"
    add("--attentions", nargs="+", choices=ATTENTIONS, metavar="NAME", help=default)
    add("--head-dim", type=kernel_head_dim, default=64, metavar="D")
    add("--heads", nargs="+", type=positive, help="lengths, blocks: one; l2: several")
    add("--seq-lens", nargs="+", type=length, metavar="N", help="lengths: several; else one")
    add("--block-sizes", nargs="+", type=int, default=[16, 32, 64, 128, 256], metavar="ROWS")
    add("--causal", action=argparse.BooleanOptionalAction, default=False)
    add("--rounds", type=positive, default=10, help="timings of each case (default: 10)")
    add("--cache-control", choices=("all", "none"), default="all", help="ncu's, before a kernel")
    add("--out", type=file_name, metavar="PATH", help="write PATH_<part>.csv and PATH_<part>.png")
    args = parser.parse_args(argv)
    if bad := set(args.block_sizes) - set(tiling.BLOCK_SIZES):
        parser.error(f"--block-sizes: {min(bad)}; give some of {tiling.BLOCK_SIZES}")
    heads = {"lengths": [32], "blocks": [32], "l2": [4, 8, 16, 32, 64, 128, 256]}
    lengths = {"lengths": [1024, 2048, 4096, 8192], "blocks": [8192], "l2": [4096]}
    known = ATTENTIONS if args.part == "lengths" else ATTENTIONS[1:]
    args.attentions = args.attentions or known
    if not set(args.attentions) <= set(known):
        given = " ".join(args.attentions)
        parser.error(f"--attentions: {args.part} takes {', '.join(known)}; got {given}")
    args.heads = args.heads or heads[args.part]
    args.seq_lens = args.seq_lens or lengths[args.part]
    if args.part != "l2" and len(args.heads) > 1:
        parser.error(f"--heads: {args.part} takes one number; got {_listed(args.heads)}")
    if args.part != "lengths" and len(args.seq_lens) > 1:
        parser.error(f"--seq-lens: {args.part} takes one length; got {_listed(args.seq_lens)}")
    gpu_option.check(parser, args)
    if args.out:
        check_out(args.out, *(beside(args.out, f"_{args.part}{end}") for end in (".csv", ".png")))
    return args


def _listed(numbers: list[int]) -> str:
    return " ".join(map(str, numbers))


def cases(args: argparse.Namespace) -> list[Case]:
    d, causal = args.head_dim, args.causal
    if args.part == "blocks":
        return [
            Case(name, 1, args.heads[0], args.seq_lens[0], d, causal, *sizes, "_forward_kernel")
            for name in args.attentions
            for sizes in (staying(name, size) for size in args.block_sizes)
        ]
    if args.part == "l2":
        return [
            Case(name, 1, heads, args.seq_lens[0], d, causal, kernel="_forward_kernel")
            for name in args.attentions
            for heads in args.heads
        ]
    return [
        Case(name, 1, args.heads[0], n, d, causal)
        for n in args.seq_lens
        for name in args.attentions
    ]


def staying(attention: str, rows: int) -> tuple[int, int]:
    """block_q and block_kv where the block that stays on the chip has so many rows."""
    return (rows, PASSING_BLOCK) if attention == "flash_v2" else (PASSING_BLOCK, rows)


# The model ----------------------------------------------------------------------------------------


def modelled(case: Case, gpu: gpus.Gpu) -> list[Row]:
    """Forward, and backward unless one kernel is looked at, with the model's columns filled in."""
    count = {"naive": naive, "flash_v1": flash_v1, "flash_v2": flash_v2}[case.attention]
    rows = []
    for direction in ["forward"] if case.kernel else ["forward", "backward"]:
        row = Row(
            case.attention, direction, case.batch, case.heads, case.seq_len, case.head_dim,
            case.causal, case.kernel or "all",
        )  # fmt: skip
        rows.append(row)
        accesses = count(case, row, gpu)
        row.model_read, row.model_written = io_model.traffic(accesses, case.kernel)
        line = io_model.roofline(row.flops, row.model, gpu)
        row.intensity, row.bound = line.intensity, line.bound
        row.roofline_ms = 1e3 * line.seconds
    return rows


def naive(case: Case, row: Row, gpu: gpus.Gpu) -> list[io_model.Access]:
    """The accesses of one direction; fills in the row's FLOPs."""
    backward = row.direction == "backward"
    row.flops = io_model.naive_flops(case.shape, backward)
    return (io_model.naive_backward if backward else io_model.naive_forward)(case.shape)


def flash_v1(case: Case, row: Row, gpu: gpus.Gpu) -> list[io_model.Access]:
    """As :func:`naive`, with the blocks and splits that the launcher takes."""
    backward = row.direction == "backward"
    table = v1_tables.BACKWARD if backward else v1_tables.FORWARD
    blocks = tiling.tuned(table, case.head_dim, case.shape.element_size)
    blocks = blocks.override(case.block_q, case.block_kv)
    row.block_q, row.block_kv = sizes = blocks.block_q, blocks.block_kv
    row.flops = io_model.flash_flops(case.shape, *sizes, backward)
    if backward:
        return io_model.flash_backward(case.shape, *sizes, splits=-(-case.seq_len // sizes[1]))
    batch_heads = case.batch * case.heads
    splits = tiling.forward_splits(batch_heads, case.seq_len, blocks, gpu.processors)
    row.q_splits = splits
    return io_model.flash_forward(case.shape, *sizes, splits)


def flash_v2(case: Case, row: Row, gpu: gpus.Gpu) -> list[io_model.Access]:
    """As :func:`naive`, with the blocks that the launcher takes."""

    def sizes(table: dict) -> tuple[int, int]:
        blocks = tiling.tuned(table, case.head_dim, case.shape.element_size)
        blocks = blocks.override(case.block_q, case.block_kv)
        return blocks.block_q, blocks.block_kv

    if row.direction == "forward":
        row.block_q, row.block_kv = sizes(tables.FORWARD)
        row.flops = io_model.flash_flops(case.shape, row.block_q, row.block_kv)
        return io_model.flash_v2_forward(case.shape, row.block_q, row.block_kv)
    row.block_q, row.block_kv = sizes(tables.DK_DV)
    row.dq_block_q, row.dq_block_kv = sizes(tables.DQ)
    both = (row.block_q, row.block_kv, row.dq_block_q, row.dq_block_kv)
    row.flops = io_model.flash_v2_backward_flops(case.shape, *both)
    return io_model.flash_v2_backward(case.shape, *both)


# The measurement ----------------------------------------------------------------------------------


def measure(todo: list[tuple[Case, list[Row]]], rows: list[Row], args) -> None:
    """Fill in the times of each case, then the counters of those that ran, and their status."""
    progress = Console(stderr=True)
    for case, these in track(todo, f"{args.part}: times", console=progress):
        take_times(case, these, args.rounds)  # compiles, for ncu too
        save(rows, args)  # at once: a crash loses nothing that is known
    for name in track(args.attentions, f"{args.part}: counters", console=progress):
        ran = [(c, these) for c, these in todo if c.attention == name and these[0].ms]
        if ran:
            take_counters(ran, args.cache_control)
            save(rows, args)


def take_times(case: Case, rows: list[Row], rounds: int) -> None:
    try:
        times = timed(case, rounds)
    except (torch.OutOfMemoryError, ValueError) as error:  # too large; blocks that do not fit
        return refuse(rows, error)
    for row, ms in zip(rows, times, strict=True):
        row.ms = ms


def take_counters(todo: list[tuple[Case, list[Row]]], cache_control: str) -> None:
    """One process for all these cases: its start costs more than what ncu counts in it."""
    try:
        program = probe([case for case, _ in todo])
        parts = directions(ncu.profile(program, cache_control, NCU_LIMIT_S), len(todo))
    except ncu.NcuError as error:
        return refuse([row for _, rows in todo for row in rows], error)
    for (case, rows), part in zip(todo, parts, strict=True):
        try:
            fill(rows, part, case.kernel)
        except ncu.NcuError as error:
            refuse(rows, error)


def refuse(rows: list[Row], error: Exception) -> None:
    for row in rows:
        row.status = str(error).splitlines()[0]
    print(error, file=sys.stderr, flush=True)


def probe(todo: list[Case]) -> list[str]:
    """The command line that runs each case once for ncu."""
    command = [sys.executable, "-m", "scripts.common.io_probe"]
    for case in todo:
        given = {key: value for key, value in asdict(case).items() if value is not None}
        given["forward_only"] = given.pop("kernel", None) is not None
        command.append(json.dumps(given))
    return command


def directions(kernels: list[ncu.Kernel], count: int) -> list[list[list[ncu.Kernel]]]:
    """The kernels of ``count`` cases, of each: those of forward, those of backward. A boundary of
    the probe ends each of the two.

    Raises:
        NcuError: there are more or fewer boundaries.
    """
    parts = [[]]
    for kernel in kernels:
        if kernel.name == "_boundary":
            parts.append([])
        else:
            parts[-1].append(kernel)
    if len(parts) != 2 * count + 1 or parts.pop():
        names = [kernel.name for kernel in kernels]
        raise ncu.NcuError(f"no forward and backward of {count} cases between boundaries: {names}")
    return [parts[i : i + 2] for i in range(0, 2 * count, 2)]


def fill(rows: list[Row], parts: list[list[ncu.Kernel]], only: str | None) -> None:
    """The counters of a case's forward and backward.

    Raises:
        NcuError: no kernel, or not the one that is looked at, was among those counted.
    """
    for row, part in zip(rows, parts, strict=False):  # one kernel alone: there is no backward
        those = [kernel for kernel in part if only in (None, kernel.name)]
        if not those:
            names = [kernel.name for kernel in part]
            raise ncu.NcuError(f"no kernel {only or ''} in {row.direction}; found {names}")
        for name in ("l2_read", "l2_written", "spilled", "dram_read", "dram_written"):
            setattr(row, name, sum(getattr(kernel, name) for kernel in those))
        row.ncu_ms = 1e3 * sum(kernel.seconds for kernel in those)
        row.status = "ok"


def timed(case: Case, rounds: int) -> list[float]:
    """Median milliseconds of forward and, unless one kernel is looked at, of backward, each with a
    cold L2, after a warm-up."""
    try:
        times = _rounds(case, rounds + 1)[1:]
    finally:
        torch.cuda.empty_cache()  # the probe is another process
    return [statistics.median(ms) for ms in zip(*times, strict=True)]


def _rounds(case: Case, rounds: int) -> list[list[float]]:
    from scripts.common.io_probe import attend, inputs

    device = torch.device("cuda")
    attention = attend(case.attention, case.block_q, case.block_kv)
    q, k, v, do = inputs(case.batch, case.heads, case.seq_len, case.head_dim, device)
    cold = cold_buffer(device)
    times = []
    for _ in range(rounds):
        forward = timed_call(partial(attention, q, k, v, case.causal), cold)
        times.append([forward.ms])
        if not case.kernel:
            grad = partial(torch.autograd.grad, forward.result, (q, k, v), do)
            times[-1].append(timed_call(grad, cold).ms)
        forward = grad = None
    return times


# What is shown ------------------------------------------------------------------------------------


def table(rows: list[Row], part: str) -> Table:
    """What fits into 100 columns; the CSV has all."""
    columns: dict[str, Callable[[Row], object]] = {
        "attention": lambda r: f"{r.attention} {r.direction}" if part == "lengths" else r.attention,
        "N": lambda r: f"{r.seq_len:,}",
        "heads": lambda r: r.heads,
        "Br x Bc": lambda r: f"{r.block_q} x {r.block_kv}" if r.block_q else None,
        "q_\nsplits": lambda r: r.q_splits,
        "model\nGB": lambda r: _giga(r.model),
        "FLOP\n/byte": lambda r: r.intensity and f"{r.intensity:.0f}",
        "roof-\nline ms": lambda r: r.roofline_ms and f"{r.roofline_ms:.3f}",
        "to L2\nGB": lambda r: _giga(r.l2),
        "spilled\nGB": lambda r: _giga(r.spilled),
        "to DRAM\nGB": lambda r: _giga(r.dram),
        "DRAM\n/model": lambda r: f"{r.dram / r.model:.2f}" if r.dram and r.model else None,
        "ms": lambda r: r.shown_ms and f"{r.shown_ms:.3f}",
    }
    for name in LEFT_OUT[part]:
        del columns[name]
    row = rows[0]
    same = {"blocks": f"N = {row.seq_len:,}, {row.heads} heads", "l2": f"N = {row.seq_len:,}"}
    title = f"bytes moved: {part}, {same.get(part, f'{row.heads} heads')}, D = {row.head_dim}"
    lines = ([str(f(row) or "") for f in columns.values()] for row in rows)
    return measured_table(title, list(columns), lines, left=["attention"])


def _giga(count: float | None) -> str | None:
    return None if count is None else f"{count / 1e9:.3f}"


if __name__ == "__main__":
    sys.exit(ended(main))
