"""Figures of what longer context buys: recall over length, and loss over position."""

import math
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.run_folder import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = dict[str, Any]


def plot_positions(runs: dict[str, list[Row]], path: Path) -> None:
    """Mean loss over position in the sequence, one colour a run, as PNG.

    runs: a name and the rows of its loss_by_position (training.positions.Bucket). Each bucket is a
    level line over its positions; dashed, the same over the tokens whose document reaches back at
    least as far as the bucket starts.
    """
    figure, axes = _new_figure()
    for index, (name, rows) in enumerate(runs.items()):
        for key, style, label in (
            ("loss", "-", "all tokens" if len(runs) == 1 else name),
            ("loss_own", "--", "documents that reach as far back" if len(runs) == 1 else None),
        ):
            known = [row for row in rows if row[key] is not None]
            _draw_buckets(axes, known, key, style, label, f"C{index}")
    ends = sorted({row["last"] + 1 for rows in runs.values() for row in rows})
    start = ends[0] / 2  # a log axis has no 0: the first bucket is drawn as wide as the others
    axes.set(xscale="log", xlim=(start, ends[-1]), ylabel="validation loss (nats/token)")
    axes.set_xlabel("position in the sequence (tokens before)")
    axes.set_xticks([start, *ends], ["0", *(f"{end:,}" for end in ends)], rotation=30)
    title = "Loss by position" if len(runs) > 1 else f"Loss by position, {next(iter(runs))}"
    if len(runs) > 1:
        title += " (dashed: documents that reach as far back)"
    axes.set_title(title, fontsize="medium")
    _finish(figure, axes, path)


def _draw_buckets(
    axes: "Axes", rows: list[Row], key: str, style: str, label: str | None, color: str
) -> None:
    """A step for each bucket, the first one from half its end."""
    if not rows:
        return
    x, y = [], []
    for row in rows:
        end = row["last"] + 1
        x += [row["first"] or end / 2, end]
        y += [row[key], row[key]]
    short = label and textwrap.shorten(label, 50, placeholder=" ...")
    axes.plot(x, y, style, color=color, label=short, lw=1.8)


def plot_recall(runs: Iterable[Row], path: Path) -> None:
    """Accuracy of recall over the sequence length, with each lag and the chance level, as PNG.

    runs: summaries of runs on data=recall; those of one lag are a line.
    """
    figure, axes = _new_figure()
    lags: dict[int, list[Row]] = {}
    for run in sorted(runs, key=lambda run: run["seq_len"]):
        lags.setdefault(run["recall_lag"], []).append(run)
    for index, (lag, rows) in enumerate(sorted(lags.items())):
        color = f"C{index}"
        lengths = sorted({row["seq_len"] for row in rows})
        means = [_mean(r["recall_accuracy"] for r in rows if r["seq_len"] == n) for n in lengths]
        axes.plot(lengths, means, "-", color=color, label=f"recalled, lag {lag:,}")
        axes.plot(*_columns(rows, "seq_len", "recall_accuracy"), "o", color=color, alpha=0.6)
        axes.axvline(lag, color=color, ls=":", label=f"lag {lag:,}")
    for chance in sorted({run["recall_chance"] for rows in lags.values() for run in rows}):
        axes.axhline(chance, color="grey", ls="--", label=f"by chance {chance:.3g}")
    lengths = sorted({row["seq_len"] for rows in lags.values() for row in rows})
    axes.set(xscale="log", ylim=(0, 1.03), ylabel="accuracy of recalled symbols")
    axes.set_xlabel("sequence length (tokens)")
    axes.set_xticks(lengths, [f"{n:,}" for n in lengths], rotation=30)
    axes.set_title("Recall needs a context longer than the lag", fontsize="medium")
    _finish(figure, axes, path)


def _columns(rows: list[Row], *keys: str) -> list[list[float]]:
    return [[row[key] for row in rows] for key in keys]


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return math.fsum(values) / len(values)


def _new_figure() -> tuple["Figure", "Axes"]:
    # Imported here: every run loads this module, few draw.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots()


def _finish(figure: "Figure", axes: "Axes", path: Path) -> None:
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    with replacing(path) as partial:
        figure.savefig(partial, format="png", dpi=130)
