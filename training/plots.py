"""Plots of many runs as PNG: memory, speed and loss over length, and what the memory is made of.

GiB are 2**30 bytes. A cross marks what ran out of memory.
"""

import csv
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from training.memory_names import PARTS
from training.report import Row, scaling_of_peak, scaling_of_saved, series
from training.run_folder import replacing
from training.units import GIB, in_gib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Point = tuple[int, float]  # sequence length, value

LEGEND_LINE = 0.2  # inches

SAVED = "saved_attention_bytes_per_sequence"


def save_plots(rows: list[Row], folder: Path) -> list[Path]:
    """Draws every plot of ``PLOTS`` into the folder; their paths."""
    paths = []
    for name, draw in PLOTS.items():
        paths.append(folder / name)
        with replacing(folder / name) as partial:
            draw(rows).savefig(partial, format="png", dpi=130)
    return paths


def plot_memory(rows: list[Row]) -> "Figure":
    """Memory over sequence length, both on log scales, one line per series.

    Left: bytes that attention saves for the backward pass of one sequence. Right: the run's peak;
    a cross there stands at what a micro-batch would have had to save. The legends give the fitted
    exponents: on the right, those of the part that grows with N.
    """
    figure = _figure(12.5, 5)
    left, right = figure.subplots(1, 2)
    for index, (label, runs) in enumerate(series(rows).items()):
        ok = [row for row in runs if row["status"] == "ok"]
        oom = [row for row in runs if row["status"] == "oom"]
        saved, peak = scaling_of_saved(runs), scaling_of_peak(runs)
        text, missed = f"{label}: {saved.legend()}", f"{label}: out of memory"
        _draw(left, _points(ok, SAVED), _points(oom, SAVED), text, missed, index)
        peaks, needed = _points(ok, "peak_bytes"), _points(oom, "saved_total_bytes")
        text = f"{label}: {peak.legend()} above the constant part" if peak.power else label
        missed = f"{label}: would save for backward (out of memory)"
        _draw(right, peaks, needed, text, missed, index)
    left.set_title("Saved for backward by attention, per sequence")
    on_gpu = any(row.get("peak_allocated_bytes") for row in rows)
    right.set_title("Peak allocated on the GPU" if on_gpu else "Peak resident memory (CPU)")
    for axes, side in ((left, "left"), (right, "right")):
        _log_axes(axes, rows, "GiB")
        _legend_below(axes, side)
    return figure


def plot_speed(rows: list[Row]) -> "Figure":
    """Tokens per second over sequence length; a cross at the lower edge is out of memory."""
    figure = _figure(7.5, 5)
    axes = figure.subplots()
    for index, (label, runs) in enumerate(series(rows).items()):
        ok = [row for row in runs if row["status"] == "ok"]
        points = _points(ok, "tokens_per_s")
        if points:
            axes.plot(*zip(*points, strict=True), "o-", color=f"C{index}", label=label)
        missed = sorted({row["seq_len"] for row in runs if row["status"] == "oom"})
        if missed:
            edge = axes.get_xaxis_transform()  # x in tokens, y in heights of the plot
            heights = [0.03 + 0.04 * index] * len(missed)
            style = {"color": f"C{index}", "ms": 10, "mew": 2.5, "transform": edge}
            axes.plot(missed, heights, "x", label=f"{label}: out of memory", **style)
    axes.set_title("Training speed")
    _log_axes(axes, rows, "tokens per second")
    _legend_below(axes, "center")
    return figure


def plot_losses(rows: list[Row]) -> "Figure":
    """Training loss over optimizer steps, from each run's metrics.csv: a colour for each length, a
    line style for each series; the first is broad and pale, so that those on it are seen."""
    from matplotlib import colormaps

    figure = _figure(9.5, 5)
    axes = figure.subplots()
    lengths = sorted({row["seq_len"] for row in rows if row.get("seq_len")})
    colors = colormaps["viridis"].resampled(max(2, len(lengths) + 1))
    for index, (label, runs) in enumerate(series(rows).items()):
        for row in runs:
            points = _losses(row["path"] / "metrics.csv")
            if points:
                axes.plot(
                    *zip(*points, strict=True),
                    color=colors(lengths.index(row["seq_len"])),
                    linestyle=("-", "--", ":", "-.")[index % 4],
                    linewidth=1.5 if index else 6,
                    alpha=1 if index else 0.4,
                    marker="o" if len(points) == 1 else None,
                    label=f"{label}, N = {row['seq_len']:,}",
                )
    axes.set(title="Training loss", xlabel="optimizer step", ylabel="nats per token")
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside right upper", fontsize=8, handlelength=3)
    return figure


def plot_parts(rows: list[Row]) -> "Figure":
    """What each run's memory is made of: each part in GiB, on a log scale, and its share.

    Left: a dot for each part, each at a height of its own, as parts may be equal, with the measured
    peak; a cross is the sum of the parts of a run out of memory.
    """
    shown = [
        (f"{label}, N = {row['seq_len']:,}", row)
        for label, runs in series(rows).items()
        for row in runs
        if row.get("memory_parts_bytes")
    ]
    figure = _figure(12.5, 2.2 + 0.36 * len(shown))
    left, right = figure.subplots(1, 2, sharey=True)
    total = [sum(row["memory_parts_bytes"].values()) for _, row in shown]
    names = [f"{name}: {in_gib(size)} GiB" for (name, _), size in zip(shown, total, strict=True)]
    heights = range(len(shown))
    start = [0.0] * len(shown)
    for index, part in enumerate(PARTS if shown else ()):
        size = [row["memory_parts_bytes"].get(part, 0) for _, row in shown]
        color = f"C{index}"
        y = [i + 0.1 * (index - (len(PARTS) - 1) / 2) for i in heights]
        gib = [b / GIB or math.nan for b in size]  # a log scale has no 0
        left.plot(gib, y, "o", color=color, ms=6, label=PARTS[part])
        right.barh(
            heights,
            [100 * b / all for b, all in zip(size, total, strict=True)],
            left=[100 * b / all for b, all in zip(start, total, strict=True)],
            color=color,
            height=0.72,
        )
        start = [a + b for a, b in zip(start, size, strict=True)]
    ok = [i for i, (_, r) in enumerate(shown) if r["status"] == "ok" and r["peak_bytes"]]
    if ok:
        on_gpu = any(shown[i][1].get("peak_allocated_bytes") for i in ok)
        label = "peak allocated (measured)" if on_gpu else "peak of the process (measured)"
        peaks = [shown[i][1]["peak_bytes"] / GIB for i in ok]
        left.plot(peaks, ok, "kD", ms=6, mfc="white", label=label)
    missed = [i for i, (_, row) in enumerate(shown) if _oom(row)]
    if missed:
        style = {"color": "black", "ms": 10, "mew": 2.5, "zorder": 1}
        left.plot([total[i] / GIB for i in missed], missed, "x", label="out of memory", **style)
    left.set(title="Memory by part (counted)", xlabel="GiB")
    right.set(title="Share of each part", xlabel="%", xlim=(0, 100))
    if shown:
        left.set(xscale="log", ylim=(len(shown) - 0.5, -0.5))  # the first run on top
        left.set_xlim(*_whole_steps(left.get_xlim(), digits=(1,)))  # to powers of 10
        left.set_yticks(heights, names)
        for i in heights[1:]:
            left.axhline(i - 0.5, color="0.85", lw=0.8, label="_")
        left.grid(alpha=0.3, axis="x")
        left.minorticks_off()
        left.xaxis.set_major_formatter(_tick)
        figure.legend(loc="outside lower center", ncols=5, fontsize=9)
    return figure


PLOTS: dict[str, Callable[[list[Row]], "Figure"]] = {
    "memory_vs_length.png": plot_memory,
    "tokens_per_s_vs_length.png": plot_speed,
    "loss_curves.png": plot_losses,
    "memory_parts.png": plot_parts,
}


def _figure(width: float, height: float) -> "Figure":
    # Imported here: every run loads this module, few draw.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _log_axes(axes: "Axes", rows: list[Row], ylabel: str) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    lengths = sorted({row["seq_len"] for row in rows if row.get("seq_len")})
    axes.set(xscale="log", yscale="log", xlabel="N: sequence length (tokens)", ylabel=ylabel)
    axes.set_xticks(lengths, [f"{n:,}" for n in lengths], rotation=30)
    axes.minorticks_off()
    # Memory often spans less than a decade: ticks at powers of 10 alone would leave it bare.
    axes.set_ylim(*_whole_steps(axes.get_ylim()))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(_tick))
    axes.grid(alpha=0.3)


def _tick(value: float, _: int) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _legend_below(axes: "Axes", side: str) -> None:
    """Outside of the axes, where it hides no point, in room that the figure gains for it."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure, room = axes.figure, LEGEND_LINE * len(handles)
        if not figure.legends:  # of two panels, both have as many lines, or nearly
            figure.set_figheight(figure.get_figheight() + room)
        figure.legend(handles, labels, loc=f"outside lower {side}", fontsize=9)


def _whole_steps(
    limits: tuple[float, float], digits: tuple[int, ...] = (1, 2, 5)
) -> tuple[float, float]:
    """The limits widened to a digit times a power of 10."""
    steps = [d * 10.0**e for e in range(-12, 13) for d in digits]
    low = max((step for step in steps if step <= limits[0]), default=limits[0])
    high = min((step for step in steps if step >= limits[1]), default=limits[1])
    return low, high


def _draw(
    axes: "Axes", points: list[Point], crosses: list[Point], fitted: str, missed: str, index: int
) -> None:
    """One series' line and crosses for what did not fit, with their names in the legend."""
    if points:
        axes.plot(*_in_gib(points), "o-", color=f"C{index}", label=fitted)
    if points and crosses:
        between = [points[-1], next((c for c in crosses if c > points[-1]), points[-1])]
        axes.plot(*_in_gib(between), ":", color=f"C{index}", label="_")  # "_": not in the legend
    if crosses:
        axes.plot(*_in_gib(crosses), "x", color=f"C{index}", ms=11, mew=2.5, label=missed)


def _in_gib(points: list[Point]) -> tuple[list[int], list[float]]:
    return [n for n, _ in points], [value / GIB for _, value in points]


def _points(rows: list[Row], key: str) -> list[Point]:
    """(length, value) by length; of several runs at one length the highest."""
    highest: dict[int, float] = {}
    for row in rows:
        if row.get(key):
            highest[row["seq_len"]] = max(highest.get(row["seq_len"], 0), row[key])
    return sorted(highest.items())


def _losses(file: Path) -> list[tuple[int, float]]:
    """(step, loss) of a metrics.csv; none where the run wrote none."""
    if not file.exists():
        return []
    with open(file, newline="", encoding="utf-8") as lines:
        rows = csv.DictReader(line for line in lines if line.endswith("\n"))
        return [(int(r["step"]), float(r["train/loss"])) for r in rows if r.get("train/loss")]


def _oom(row: Row) -> bool:
    return row["status"] == "oom"
