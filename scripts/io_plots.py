"""The figures of io_complexity.py: bytes over N, over the block size, and over the size of O."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from flash_attention import gpus

Row = Any  # scripts.io_complexity.Row


def lengths(rows: list[Row], gpu: gpus.Gpu, path: Path) -> None:
    """Bytes over N, forward and backward, and each shape's place on the roofline."""
    figure, (forward, backward, roof) = _new_figure(3)
    names = list(dict.fromkeys(row.attention for row in rows))
    for direction, axis in (("forward", forward), ("backward", backward)):
        for i, name in enumerate(names):
            here = [r for r in rows if (r.attention, r.direction) == (name, direction)]
            _draw(axis, here, lambda r: r.seq_len, f"C{i}", name)
        _powers_of_two(axis, {row.seq_len for row in rows})
        axis.set(title=direction, xlabel="N", ylabel="bytes", yscale="log")
        axis.legend(fontsize=8)
    _draw_roof(roof, rows, names, gpu)
    _finish(figure, f"bytes moved by attention, {_about(rows[0])}, {gpu.name}", path)


def _draw_roof(axis, rows: list[Row], names: list[str], gpu: gpus.Gpu) -> None:
    ridge = gpu.flops / gpu.bandwidth
    low, high = min([r.intensity for r in rows if r.intensity], default=1.0) / 2, 20 * ridge
    axis.plot(
        [low, ridge, high],
        [low * gpu.bandwidth / 1e12, gpu.flops / 1e12, gpu.flops / 1e12],
        "k-",
        lw=1,
    )
    for i, name in enumerate(names):
        for direction, marker in (("forward", "o"), ("backward", "s")):
            here = [
                r
                for r in rows
                if (r.attention, r.direction) == (name, direction) and r.flops and r.ms
            ]
            axis.plot(
                [r.flops / (r.dram or r.model) for r in here],
                [r.flops / r.ms / 1e9 for r in here],
                marker,
                color=f"C{i}",
                label=f"{name}, {direction}" if here else None,
            )
    for i, name in enumerate(names):
        for row in rows:
            if row.attention == name and row.intensity:
                axis.axvline(row.intensity, ymax=0.04, color=f"C{i}", lw=1)
    axis.set(xscale="log", yscale="log", title="roofline (ticks: the model's intensity)")
    axis.set(xlabel="FLOP per byte of DRAM", ylabel="TFLOP/s")
    axis.grid(alpha=0.3)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=8)


def blocks(rows: list[Row], gpu: gpus.Gpu, path: Path) -> None:
    """The paper's figure 2: bytes and time of the forward kernel over Bc."""
    figure, (axis,) = _new_figure(1)
    _draw(axis, rows, lambda r: r.block_kv, "C0", "")
    _powers_of_two(axis, {row.block_kv for row in rows})
    axis.set(xlabel="Bc, rows of a K/V block", ylabel="bytes", yscale="log")
    times = axis.twinx()
    for key, style, label in (
        ("ncu_ms", "C1s-", "time of the kernel"),
        ("roofline_ms", "C1:", "time, roofline of the model"),
    ):
        known = [r for r in rows if getattr(r, key)]
        if known:
            times.plot([r.block_kv for r in known], [getattr(r, key) for r in known], style,
                       label=label)  # fmt: skip
    times.set(ylabel="ms")
    times.set_ylim(bottom=0)
    handles, labels = zip(
        *(pair for a in (axis, times) for pair in zip(*a.get_legend_handles_labels(), strict=True)),
        strict=True,
    )
    axis.legend(handles, labels, fontsize=8)
    title = f"flash_v1 forward, Br = {rows[0].block_q}, N = {rows[0].seq_len:,}, {_about(rows[0])}"
    _finish(figure, f"{title}, {gpu.name}", path)


def l2(rows: list[Row], gpu: gpus.Gpu, path: Path) -> None:
    """Measured bytes over the model's, against the size of the O that is carried."""
    figure, (axis,) = _new_figure(1)

    def size(row: Row) -> float:  # float32
        return row.batch * row.heads * row.seq_len * row.head_dim * 4 / gpus.MIB

    for key, style, label in (
        ("l2", "C1x-", "between processors and L2"),
        ("dram", "C0o-", "between L2 and DRAM"),
    ):
        known = [r for r in rows if getattr(r, key)]
        if known:
            ratios = [getattr(r, key) / r.model for r in known]
            axis.plot([size(r) for r in known], ratios, style, label=label)
    axis.axhline(1.0, color="black", lw=1, label="the model")
    axis.axvline(gpu.l2 / gpus.MIB, color="grey", ls=":", label=f"L2: {gpu.l2 / gpus.MIB:.0f} MiB")
    _powers_of_two(axis, {size(row) for row in rows})
    axis.set(xlabel="O in float32, MiB", ylabel="bytes counted / bytes of the model")
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=8)
    title = f"flash_v1 forward kernel, N = {rows[0].seq_len:,}, D = {rows[0].head_dim}"
    _finish(figure, f"{title}, {gpu.name}", path)


PLOTS = {"lengths": lengths, "blocks": blocks, "l2": l2}


def _draw(axis, rows: list[Row], x: Callable[[Row], float], color: str, name: str) -> None:
    """The model as a line, the counters of DRAM and L2 as marks."""
    for key, style, label in (
        ("model", "-", "model"),
        ("dram", "o", "DRAM"),
        ("l2", "x", "L2"),
    ):
        known = [row for row in rows if getattr(row, key)]
        if known:
            values = [getattr(row, key) for row in known]
            axis.plot([x(r) for r in known], values, style, color=color, label=f"{name} {label}")


def _powers_of_two(axis, ticks: set[float]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(sorted(ticks), [f"{tick:,.0f}" for tick in sorted(ticks)])
    axis.grid(alpha=0.3)


def _about(row: Row) -> str:
    mask = ", causal" if row.causal else ""
    return f"{row.batch * row.heads} heads, D = {row.head_dim}{mask}"


def _new_figure(panels: int):
    figure = Figure(figsize=(1.5 + 4.5 * panels, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, panels, squeeze=False)[0]


def _finish(figure: Figure, title: str, path: Path) -> None:
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, format="png", dpi=120)
