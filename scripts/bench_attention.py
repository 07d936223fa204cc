"""Times every attention backend and peer side by side: forward, backward and peak memory.

    python scripts/bench_attention.py --head-dims 64 128 --seq-lens 1024 4096 16384
    python scripts/bench_attention.py --backends flash_v1 sdpa_flash --no-causal

All backends of one shape are timed in turns, round after round, so that a change of the device's
clock meets all alike; the median over the rounds counts. Times are the device's: it is kept busy
while Python launches, as within a training step; how long that takes is a column of its own. Before
a backend is timed, its output and its gradients are compared with standard attention in float64:
some rows of the first and of the last head. FLOP/s: a forward has 4 B H N^2 D FLOPs, half of it
when causal, a backward 2.5 times as many, whatever a backend really spends.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

# Naive attention comes near a whole GPU: without this, what is free may be in pieces too small.
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, from anywhere

from flash_attention import flash_attention_v1, flash_attention_v2, launch, naive_attention
from scripts.common import csv_file
from scripts.common.arguments import (
    beside,
    check_out,
    file_name,
    fill,
    kernel_head_dim,
    positive,
    present_device,
    two_defaults,
)
from scripts.common.attention_check import is_right
from scripts.common.attention_peers import peers
from scripts.common.ending import ended
from scripts.common.measured_table import measured_table
from scripts.common.timing import cold_buffer, timed_call
from training import memory
from training.errors import fail
from training.run_folder import replacing
from training.throughput import device_name

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# A CPU's take two cores half a minute; the PyTorch tiles have one program, whatever q_splits says.
ON_GPU = dict(
    seq_lens=[1024, 2048, 4096, 8192, 16384],
    tokens=16384,
    width=2048,
    dtype="bf16",
    rounds=20,
    q_splits=["auto", "1"],
)
ON_CPU = dict(
    seq_lens=[256, 512, 1024], tokens=1024, width=512, dtype="fp32", rounds=5, q_splits=["auto"]
)
# Of a backend's line, by name: the same in every plot, whatever it is drawn beside.
COLORS = {
    "naive": "tab:blue",
    "flash_v1": "tab:orange",
    "flash_v2": "tab:green",
    "sdpa": "tab:red",
    "sdpa_flash": "tab:purple",
    "sdpa_cudnn": "tab:brown",
    "sdpa_efficient": "tab:pink",
    "flex": "tab:gray",
    "fa3": "tab:olive",
    "fa4": "tab:cyan",
}


@dataclass
class Row:
    """One backend at one shape; times in ms, None where it failed."""

    backend: str
    head_dim: int
    seq_len: int
    causal: bool
    batch: int
    heads: int
    dtype: str
    status: str = "ok"
    forward_ms: float | None = None
    backward_ms: float | None = None
    forward_launch_ms: float | None = None  # Python's share; on a CPU the same again
    backward_launch_ms: float | None = None
    forward_tflops: float | None = None
    backward_tflops: float | None = None
    total_tflops: float | None = None
    forward_vs_naive: float | None = None  # how many times as fast as naive, forward
    total_vs_naive: float | None = None  # and forward + backward
    forward_vs_sdpa_flash: float | None = None  # and as PyTorch's FlashAttention-2
    backward_vs_sdpa_flash: float | None = None
    peak_mib: float | None = None

    @property
    def launch_ms(self) -> float | None:
        if self.forward_launch_ms is None or self.backward_launch_ms is None:
            return None
        return self.forward_launch_ms + self.backward_launch_ms


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    device = torch.device(args.device)
    backends = available(args)
    rows: list[Row] = []
    shapes = [
        (head_dim, n, causal)
        for causal in args.causal
        for head_dim in args.head_dims
        for n in args.seq_lens
    ]
    for head_dim, n, causal in track(shapes, "timing", console=Console(stderr=True)):
        rows += bench_shape(backends, head_dim, n, causal, args, device)
        if args.out:  # after every shape: a crash loses none of those before it
            write(rows, args.out, device)
    Console(width=None if sys.stdout.isatty() else 150).print(table(rows))
    print(f"{device_name(device)}, torch {torch.__version__}; TFLOP/s: causal halves the FLOPs,")
    print("backward counts 2.5 forwards. Peak: of forward + backward, inputs left out.")
    return int(any(row.status == "wrong" for row in rows))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, default = parser.add_argument, partial(two_defaults, ON_GPU, ON_CPU)
    add("--backends", nargs="+", metavar="NAME", help="default: all that import and run here")
    add("--head-dims", nargs="+", type=kernel_head_dim, default=[64, 128], metavar="D")
    add("--seq-lens", nargs="+", type=positive, metavar="N", help=default("seq_lens"))
    add("--tokens", type=positive, help=f"batch x seq_len ({default('tokens')})")
    add("--width", type=positive, help=f"heads x head dim ({default('width')})")
    add("--causal", action=argparse.BooleanOptionalAction, help="default: both")
    add("--dtype", choices=DTYPES, help=default("dtype"))
    here = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", type=present_device, default=here, help="default: %(default)s")
    add("--rounds", type=positive, help=f"timings of each backend ({default('rounds')})")
    splits = f"of flash_v1: auto, 1, 2, ... ({default('q_splits')})"
    add("--q-splits", nargs="+", metavar="S", help=splits)
    add("--out", type=file_name, metavar="PATH", help="write PATH.csv and PATH.png")
    args = parser.parse_args(argv)
    fill(args, ON_CPU if args.device == "cpu" else ON_GPU)
    args.causal = [True, False] if args.causal is None else [args.causal]
    try:
        args.q_splits = [s if s == "auto" else positive(s) for s in args.q_splits]
    except argparse.ArgumentTypeError as error:
        parser.error(f"--q-splits: {error}, or auto")
    if args.out:
        check_out(args.out, beside(args.out, ".csv"), beside(args.out, ".png"))
    return args


def available(args: argparse.Namespace) -> dict[str, Callable]:
    """Name -> f(q, k, v, causal) -> o; a name that is not here ends the program with a sentence."""
    found: dict[str, Callable] = {"naive": partial(_call, naive_attention)}
    for splits in args.q_splits:
        name = "flash_v1" if splits == "auto" else f"flash_v1_q{splits}"
        found[name] = partial(_call, partial(flash_attention_v1, q_splits=splits))
    found["flash_v2"] = partial(_call, flash_attention_v2)
    found |= peers(torch.device(args.device))
    for name in args.backends or ():
        if name not in found:
            fail(f"--backends: {name} is not here; give some of {', '.join(found)}")
    return {name: f for name, f in found.items() if not args.backends or name in args.backends}


def _call(attention: Callable, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return attention(q, k, v, causal=causal)


def bench_shape(
    backends: dict[str, Callable],
    head_dim: int,
    n: int,
    causal: bool,
    args: argparse.Namespace,
    device: torch.device,
) -> list[Row]:
    """All backends at one shape, each checked, then timed in turns."""
    batch, heads = batch_and_heads(args, head_dim, n)
    rows = [Row(name, head_dim, n, causal, batch, heads, args.dtype) for name in backends]
    pairs = list(zip(rows, backends.values(), strict=True))
    try:
        tensors = inputs(rows[0], device)
        cold = cold_buffer(device)
    except RuntimeError as error:
        for row in rows:
            row.status = failure(error)
        return rows
    with launch.on_device(cold):  # the timing's events, too, are of the current device
        for row, attention in pairs:
            try:
                row.status = "ok" if is_right(attention, *tensors, causal) else "wrong"
                row.peak_mib = peak_mib(attention, *tensors, causal)
            except Exception as error:
                row.status = failure(error)
        interleave(pairs, tensors, cold, args.rounds)
    flops = 4 * batch * heads * n * n * head_dim * (0.5 if causal else 1.0)
    timed = [row for row in rows if row.status == "ok"]
    for row in timed:
        row.forward_tflops = flops / row.forward_ms / 1e9
        row.backward_tflops = 2.5 * flops / row.backward_ms / 1e9
        row.total_tflops = 3.5 * flops / (row.forward_ms + row.backward_ms) / 1e9
    compare(timed)
    return rows


def batch_and_heads(args: argparse.Namespace, head_dim: int, n: int) -> tuple[int, int]:
    return max(1, args.tokens // n), max(1, args.width // head_dim)


def inputs(row: Row, device: torch.device) -> tuple[Tensor, ...]:
    """q, k, v, which require gradients, and dO of the row's shape."""
    shape = row.batch, row.heads, row.seq_len, row.head_dim
    generator = torch.Generator(device).manual_seed(0)
    made = [
        torch.randn(shape, dtype=DTYPES[row.dtype], device=device, generator=generator)
        for _ in range(4)
    ]
    return tuple(t.requires_grad_(i < 3) for i, t in enumerate(made))


def failure(error: Exception) -> str:
    """The status of a backend that raised this: a peer may not take the shape or the device."""
    return "out of memory" if memory.is_out_of_memory(error) else f"refused: {type(error).__name__}"


def compare(rows: list[Row]) -> None:
    """Fill in how many times as fast the rows of one shape are as those two, where they ran."""
    by_name = {row.backend: row for row in rows}
    naive, flash = by_name.get("naive"), by_name.get("sdpa_flash")
    for row in rows:
        if naive:
            row.forward_vs_naive = row.forward_tflops / naive.forward_tflops
            row.total_vs_naive = row.total_tflops / naive.total_tflops
        if flash:
            row.forward_vs_sdpa_flash = row.forward_tflops / flash.forward_tflops
            row.backward_vs_sdpa_flash = row.backward_tflops / flash.backward_tflops


def peak_mib(attention: Callable, q, k, v, do, causal: bool) -> float | None:
    """Peak of one forward + backward above what was allocated before; None on a CPU."""
    if not q.is_cuda:
        return None
    torch.autograd.grad(attention(q, k, v, causal), (q, k, v), do)  # compiles, fills workspaces
    memory.reset_peaks(q.device)
    before = memory.current(q.device)
    torch.autograd.grad(attention(q, k, v, causal), (q, k, v), do)
    return (memory.peaks(q.device)["allocated"] - before) / 2**20


def interleave(
    backends: list[tuple[Row, Callable]], tensors: tuple[Tensor, ...], cold: Tensor, rounds: int
) -> None:
    """Fill in the median milliseconds of forward and backward of each backend that is ok so far.

    In each round every backend runs once, and only its own graph is alive; the first warms up. A
    backend that fails, as one short of memory does, is left out from there on. cold: see
    :func:`timed_call`.
    """
    q, k, v, do = tensors
    timings: dict[str, list[tuple[float, ...]]] = {row.backend: [] for row, _ in backends}
    for r in range(rounds + 1):
        for row, attention in backends:
            if row.status != "ok":
                continue
            try:
                forward = timed_call(partial(attention, q, k, v, row.causal), cold)
                grad = partial(torch.autograd.grad, forward.result, (q, k, v), do)
                backward = timed_call(grad, cold)
            except Exception as error:
                row.status = failure(error)
            else:
                if r:
                    timings[row.backend].append((*forward[:2], *backward[:2]))
            forward = grad = backward = None
    for row, _ in backends:
        if row.status == "ok":
            medians = map(statistics.median, zip(*timings[row.backend], strict=True))
            row.forward_ms, row.forward_launch_ms, row.backward_ms, row.backward_launch_ms = medians


def table(rows: list[Row]) -> Table:
    headings = "head dim,N,causal,backend,forward,backward,both"
    headings += ",forward / naive,both / naive,forward / sdpa_flash,backward / sdpa_flash"
    headings += ",launch ms,peak MiB"
    title = "TFLOP/s, and how many times as fast as others"
    return measured_table(title, headings.split(","), map(_line, rows), left=["backend"])


def _line(row: Row) -> list[str]:
    numbers = (
        row.forward_tflops,
        row.backward_tflops,
        row.total_tflops,
        row.forward_vs_naive,
        row.total_vs_naive,
        row.forward_vs_sdpa_flash,
        row.backward_vs_sdpa_flash,
        row.launch_ms,
        row.peak_mib,
    )
    shown = ["" if x is None else f"{x:.3g}" if x < 10 else f"{x:,.0f}" for x in numbers]
    if row.status != "ok":
        shown[0] = row.status
    causal = "yes" if row.causal else "no"
    return [str(row.head_dim), str(row.seq_len), causal, row.backend, *shown]


def write(rows: list[Row], out: Path, device: torch.device) -> None:
    """OUT.csv and OUT.png, each under a temporary name first."""
    about = {"device": device_name(device), **csv_file.software()}
    csv_file.write(beside(out, ".csv"), rows, about)
    with replacing(beside(out, ".png")) as partial:
        plot(rows, partial, device_name(device))


def look(backend: str) -> dict[str, str | int]:
    """Of a backend's line: its colour; flash_v1 with S splits is dashed and its points are S."""
    base, _, splits = backend.partition("_q")
    style = {"color": COLORS.get(base, "black")}
    if splits:
        return style | {"linestyle": "--", "marker": f"${splits}$", "markersize": 8}
    return style | {"linestyle": "-", "marker": "o"}


def plot(rows: list[Row], path: Path, title: str) -> None:
    """Forward + backward TFLOP/s over N, a panel for each head dim and mask."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = sorted({(row.head_dim, row.causal) for row in rows})
    figure, axes = plt.subplots(
        1, len(panels), figsize=(2.2 + 4.2 * len(panels), 4), squeeze=False, sharey=True
    )
    for axis, (head_dim, causal) in zip(axes[0], panels, strict=True):
        here = [row for row in rows if (row.head_dim, row.causal) == (head_dim, causal)]
        for name in dict.fromkeys(row.backend for row in here):
            line = [r for r in here if r.backend == name and r.total_tflops is not None]
            axis.plot(
                [r.seq_len for r in line],
                [r.total_tflops for r in line],
                label=name,
                **look(name),
            )
        axis.set(title=f"head dim {head_dim}, {'causal' if causal else 'full'}", xlabel="N")
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylim(bottom=0)  # after all lines: it stops the shared axis from growing
    axes[0][0].set_ylabel("forward + backward, TFLOP/s")
    axes[0][-1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=110, format="png")
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(ended(main))
