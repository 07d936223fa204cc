"""The figures of io_complexity.py: bytes over N, over the block size, and over the heads."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from flash_attention import gpus

Row = Any  # scripts.io_complexity.Row

COLORS = {"naive": "C0", "flash_v1": "C1", "flash_v2": "C2"}


def lengths(rows: list[Row], gpu: gpus.Gpu, path: Path) -> None:
    """Bytes over N, forward and backward, and each shape's place on the roofline."""
    figure, (forward, backward, roof) = _new_figure(3)
    names = list(dict.fromkeys(row.attention for row in rows))
    for direction, axis in (("forward", forward), ("backward", backward)):
        for name in names:
            here = [r for r in rows if (r.attention, r.direction) == (name, direction)]
            _draw(axis, here, lambda r: r.seq_len, name)
        _powers_of_two(axis, {row.seq_len for row in rows})
        axis.set(title=direction, xlabel="N", ylabel="GB", yscale="log")
        plain_ticks(axis.yaxis, (1.0,))
    _legend_below(figure, [forward], 9)
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
    for name in names:
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
                color=COLORS[name],
                label=f"{name}, {direction}" if here else None,
            )
    for name in names:
        for row in rows:
            if row.attention == name and row.intensity:
                axis.axvline(row.intensity, ymax=0.04, color=COLORS[name], lw=1)
    axis.set(xscale="log", yscale="log", title="roofline (ticks: the model's intensity)")
    axis.set(xlabel="FLOP per byte of DRAM", ylabel="TFLOP/s")
    plain_ticks(axis.xaxis, (1.0,))
    plain_ticks(axis.yaxis)
    axis.grid(alpha=0.3)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=8)


def blocks(rows: list[Row], gpu: gpus.Gpu, path: Path) -> None:
    """The paper's figure 2: bytes and time of the forward kernels over the rows of the block that
    stays on the chip."""
    figure, (moved, times) = _new_figure(2)
    for name in dict.fromkeys(row.attention for row in rows):
        here = [row for row in rows if row.attention == name]
        _draw(moved, here, _staying, name)
        for key, style, label in (
            ("roofline_ms", ":", "roofline of the model"),
            ("ncu_ms", "s-", "measured"),
        ):
            known = [row for row in here if getattr(row, key)]
            if known:
                times.plot(
                    [_staying(row) for row in known],
                    [getattr(row, key) for row in known],
                    style,
                    color=COLORS[name],
                    label=f"{name} {label}",
                )
    for axis, ylabel in ((moved, "GB"), (times, "ms of the kernel")):
        _powers_of_two(axis, {_staying(row) for row in rows})
        axis.set(xlabel="rows of the block that stays on the chip", ylabel=ylabel, yscale="log")
    plain_ticks(moved.yaxis, (1.0,))
    plain_ticks(times.yaxis)
    _legend_below(figure, [moved, times], 5)
    title = f"forward kernels, N = {rows[0].seq_len:,}, {_about(rows[0])}"
    _finish(figure, f"{title}, {gpu.name}", path)


def _staying(row: Row) -> int:
    return row.block_q if row.attention == "flash_v2" else row.block_kv


def l2(rows: list[Row], gpu: gpus.Gpu, path: Path) -> None:
    """Measured bytes over the model's, against the size of the O that flash_v1 carries."""
    figure, (axis,) = _new_figure(1)

    def size(row: Row) -> float:
        return row.batch * row.heads * row.seq_len * row.head_dim * 4 / gpus.MIB

    for name in dict.fromkeys(row.attention for row in rows):
        for key, style, label in (
            ("l2", "x--", "between processors and L2"),
            ("dram", "o-", "between L2 and DRAM"),
        ):
            known = [r for r in rows if r.attention == name and getattr(r, key)]
            if known:
                ratios = [getattr(r, key) / r.model for r in known]
                label = f"{name}, {label}"
                axis.plot([size(r) for r in known], ratios, style, color=COLORS[name], label=label)
    axis.axhline(1.0, color="black", lw=1, label="the model")
    axis.axvline(gpu.l2 / gpus.MIB, color="grey", ls=":", label=f"L2: {gpu.l2 / gpus.MIB:.0f} MiB")
    _powers_of_two(axis, {size(row) for row in rows})
    axis.set(xlabel="O in float32, MiB", ylabel="bytes counted / bytes of the model")
    axis.set_ylim(0, max(1.1, axis.get_ylim()[1]))
    axis.legend(fontsize=8)
    title = f"forward kernels, N = {rows[0].seq_len:,}, D = {rows[0].head_dim}"
    _finish(figure, f"{title}, {gpu.name}", path)


PLOTS = {"lengths": lengths, "blocks": blocks, "l2": l2}


def _draw(axis, rows: list[Row], x: Callable[[Row], float], name: str) -> None:
    """The model as a line, the counters of DRAM and L2 as marks."""
    for key, style, label in (
        ("model", "-", "model"),
        ("dram", "o", "DRAM"),
        ("l2", "x", "L2"),
    ):
        known = [row for row in rows if getattr(row, key)]
        if known:
            values = [getattr(row, key) / 1e9 for row in known]
            at = [x(row) for row in known]
            axis.plot(at, values, style, color=COLORS[name], label=f"{name} {label}")


def _powers_of_two(axis, ticks: set[float]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(sorted(ticks), [f"{tick:,.0f}" for tick in sorted(ticks)])
    axis.grid(alpha=0.3)


def plain_ticks(axis, steps: tuple[float, ...] = (1.0, 2.0, 5.0)) -> None:
    """Numbers in place of powers of ten on a logarithmic axis, at these steps of a decade."""
    axis.set_major_locator(LogLocator(subs=steps))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def _legend_below(figure: Figure, axes: list, columns: int) -> None:
    """One legend under all panels, where it hides no point."""
    handles = [handle for axis in axes for handle in axis.get_legend_handles_labels()[0]]
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize=8)


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
