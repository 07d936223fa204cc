"""Tables and the memory plot of many runs, from the summary.json in each run's folder."""

import csv
import io
import json
import math
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf
from rich.table import Table
from rich.text import Text

from training.run_folder import replacing
from training.units import GIB, in_gib

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUMMARY = "summary.json"
FINISHED = ("ok", "oom")  # running out of memory is a result, not a failure

Row = dict[str, Any]
Point = tuple[int, float]  # sequence length, bytes

# Of summary.json; they lead the CSV, which also has every other plain value a summary holds.
_CSV_FIRST = ("folder", "overrides", "status", "attention", "model", "seq_len", "tokens_per_step")


def read_rows(folders: Iterable[Path | str]) -> list[Row]:
    """One row per run folder: its summary.json and what is derived from it.

    Added are ``folder`` (its name), ``overrides`` (its command line), ``peak_bytes`` (the peak
    allocated on a GPU, resident on a CPU) and ``saved_attention_bytes_per_sequence``; None when not
    measured.
    """
    rows = []
    for folder in map(Path, folders):
        row = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
        row["folder"] = folder.name
        row["overrides"] = _overrides(folder)
        row["peak_bytes"] = row.get("peak_allocated_bytes") or row.get("peak_rss_bytes")
        row["saved_attention_bytes_per_sequence"] = _per_sequence(row)
        rows.append(row)
    return rows


def _per_sequence(row: Row) -> float | None:
    saved, sequences = row.get("saved_attention_bytes"), row.get("micro_batch_size")
    return saved / sequences if saved and sequences else None


def _overrides(folder: Path) -> list[str]:
    saved = folder / ".hydra" / "overrides.yaml"
    return [str(o) for o in OmegaConf.load(saved)] if saved.exists() else []


def longest_lengths(rows: list[Row]) -> dict[str, int]:
    """Per backend the longest ``seq_len`` whose run ended ok."""
    longest: dict[str, int] = {}
    for row in rows:
        if row["status"] == "ok" and row.get("seq_len"):
            backend = row["attention"]
            longest[backend] = max(longest.get(backend, 0), row["seq_len"])
    return longest


# Tables


def to_csv(rows: list[Row]) -> str:
    """All plain values, in full precision and in bytes; one line per run."""
    plain = []
    for row in rows:
        values = {**row, "overrides": " ".join(row["overrides"])}
        if row.get("error"):
            values["error"] = " ".join(row["error"].split())
        plain.append({k: v for k, v in values.items() if not isinstance(v, dict | list)})
    keys = list(dict.fromkeys([*_CSV_FIRST, *(key for row in plain for key in row)]))
    text = io.StringIO()
    writer = csv.DictWriter(text, keys, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(plain)
    return text.getvalue()


# Heading, key of the row, number to text.
_NUMBERS = (
    ("seq_len", "seq_len", "{:,}".format),
    ("tokens per step", "tokens_per_step", "{:,}".format),
    ("saved by attention (GiB)", "saved_attention_bytes", in_gib),
    ("saved in all (GiB)", "saved_total_bytes", in_gib),
    ("peak (GiB)", "peak_bytes", in_gib),
    ("tokens/s", "tokens_per_s", "{:,.0f}".format),
    ("MFU", "mfu", "{:.1%}".format),
    ("train loss", "train_loss_last", "{:.4f}".format),
    ("val loss", "val_loss", "{:.4f}".format),
    ("bits/byte", "bits_per_byte", "{:.4f}".format),
    ("recall", "recall_accuracy", "{:.4f}".format),
    ("by chance", "recall_chance", "{:.4f}".format),
)


def _columns(rows: list[Row]) -> dict[str, list[str]]:
    """The table's columns by heading; numbers that no run has are left out."""
    columns = {
        "run": _run_names(rows),
        "status": [row["status"] for row in rows],
        "attention": [str(row.get("attention") or "-") for row in rows],
    }
    for heading, key, text in _NUMBERS:
        values = [row.get(key) for row in rows]
        if any(value is not None for value in values):
            columns[heading] = ["-" if value is None else text(value) for value in values]
    return columns


def _run_names(rows: list[Row]) -> list[str]:
    """Each run's number in the sweep and the overrides not all runs share."""
    shared = set.intersection(*(set(row["overrides"]) for row in rows)) if len(rows) > 1 else set()
    in_a_column = ("attention=", "seq_len=")
    return [
        " ".join(
            [_run_number(row)]
            + [o for o in row["overrides"] if o not in shared and not o.startswith(in_a_column)]
        )
        for row in rows
    ]


def _run_number(row: Row) -> str:
    return row["folder"].split("_")[0]


def to_markdown(rows: list[Row]) -> str:
    """The table to read: GiB (2**30 bytes), the overrides that differ, notes below."""
    columns = _columns(rows)
    lines = [list(columns), ["---"] * len(columns), *zip(*columns.values(), strict=True)]
    escaped = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    table = "".join(f"| {' | '.join(line)} |\n" for line in escaped)
    return table + "\n" + "".join(f"- {note}\n" for note in notes(rows))


def to_rich(rows: list[Row]) -> Table:
    """The same table for the terminal."""
    columns = _columns(rows)
    table = Table()
    for heading in columns:
        table.add_column(heading, justify="left" if heading in ("run", "attention") else "right")
    styles = {"ok": "green", "oom": "yellow"}
    for row, cells in zip(rows, zip(*columns.values(), strict=True), strict=True):
        texts = [Text(cell) for cell in cells]  # "[...]" in an override is no markup
        texts[1].stylize(styles.get(row["status"], "red"))
        table.add_row(*texts)
    return table


def notes(rows: list[Row]) -> list[str]:
    """Sentences below the table: longest lengths, what does not compare, what went wrong."""
    lines = [
        f"longest seq_len that trained with {backend}: {length:,}"
        for backend, length in sorted(longest_lengths(rows).items())
    ]
    tokens = {row["tokens_per_step"] for row in rows if row.get("tokens_per_step")}
    if len(tokens) > 1:
        lines.append(
            "losses do not compare: tokens per step differ; "
            f"give global_batch_tokens={_common_step(rows)}"
        )
    lines += [
        f"run {_run_number(row)} ({row['status']}): {first_line(row['error'])}"
        for row in rows
        if row["status"] != "ok" and row.get("error")
    ]
    return lines


def _common_step(rows: list[Row]) -> int:
    """Tokens that are whole sequences of every length, at least as many as any run's step."""
    known = [row for row in rows if row.get("tokens_per_step")]
    unit = math.lcm(*(row["seq_len"] for row in known))
    return -(-max(row["tokens_per_step"] for row in known) // unit) * unit


def first_line(text: str) -> str:
    """The first line of an error message; allocators add paragraphs of advice."""
    return text.strip().splitlines()[0] if text.strip() else ""


# Plot


def plot_memory(rows: list[Row], path: Path) -> None:
    """Memory over sequence length, both on log scales, one line per backend, as PNG.

    Left: bytes that attention saves for the backward pass of one sequence, with the line's exponent
    between its two longest lengths. Right: the run's peak. A cross marks a run that ran out of
    memory; on the right it stands at what a micro-batch would have had to save.
    """
    # Imported here: every run loads this module, few draw.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator

    figure = Figure(figsize=(11, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for index, (label, runs) in enumerate(_series(rows).items()):
        ok = [row for row in runs if row["status"] == "ok"]
        oom = [row for row in runs if row["status"] == "oom"]
        saved = "saved_attention_bytes_per_sequence"
        slope = exponent(_points(ok, saved))
        text = label if slope is None else f"{label}: N^{slope:.2f}"
        missed = f"{label}: out of memory"
        _draw(left, _points(ok, saved), _points(oom, saved), text, missed, f"C{index}")
        peaks, needed = _points(ok, "peak_bytes"), _points(oom, "saved_total_bytes")
        missed = f"{label}: would save for backward (out of memory)"
        _draw(right, peaks, needed, label, missed, f"C{index}")
    on_gpu = any(row.get("peak_allocated_bytes") for row in rows)
    left.set_title("Saved for backward by attention, per sequence")
    right.set_title("Peak allocated on the GPU" if on_gpu else "Peak resident memory (CPU)")
    lengths = sorted({row["seq_len"] for row in rows if row.get("seq_len")})
    for axes in (left, right):
        axes.set(xscale="log", yscale="log", xlabel="N: sequence length (tokens)", ylabel="GiB")
        axes.set_xticks(lengths, [f"{n:,}" for n in lengths], rotation=30)
        axes.minorticks_off()
        # Memory often spans less than a decade: ticks at powers of 10 alone would leave it bare.
        axes.set_ylim(*_whole_steps(axes.get_ylim()))
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    with replacing(path) as partial:
        figure.savefig(partial, format="png", dpi=130)


def _whole_steps(limits: tuple[float, float]) -> tuple[float, float]:
    """The limits widened to 1, 2 or 5 times a power of 10."""
    steps = [d * 10.0**e for e in range(-12, 13) for d in (1, 2, 5)]
    low = max((step for step in steps if step <= limits[0]), default=limits[0])
    high = min((step for step in steps if step >= limits[1]), default=limits[1])
    return low, high


def _series(rows: list[Row]) -> dict[str, list[Row]]:
    """Runs by backend (and model, if there are several), those of unknown length left out."""
    several_models = len({row.get("model") for row in rows}) > 1
    series = defaultdict(list)
    for row in sorted(rows, key=lambda row: row.get("seq_len") or 0):
        if row.get("seq_len"):
            name = str(row["attention"])
            series[f"{name}, {row['model']}" if several_models else name].append(row)
    return dict(sorted(series.items()))


def _draw(
    axes: "Axes", points: list[Point], crosses: list[Point], fitted: str, missed: str, color: str
) -> None:
    """One backend's line and crosses for what did not fit, with their names in the legend."""
    if points:
        axes.plot(*_in_gib(points), "o-", color=color, label=fitted)
    if crosses:
        axes.plot(*_in_gib(crosses), "x", color=color, ms=10, label=missed)


def _in_gib(points: list[Point]) -> tuple[list[int], list[float]]:
    return [n for n, _ in points], [value / GIB for _, value in points]


def _points(rows: list[Row], key: str) -> list[Point]:
    """(length, bytes) by length; of several runs at one length the highest."""
    highest: dict[int, float] = {}
    for row in rows:
        if row.get(key):
            highest[row["seq_len"]] = max(highest.get(row["seq_len"], 0), row[key])
    return sorted(highest.items())


def exponent(points: list[Point]) -> float | None:
    """b of bytes = a * N^b through the two longest lengths; None for fewer than two points.

    The longest, because shorter lengths show the smaller powers of N as well.
    """
    if len(points) < 2:
        return None
    (n0, low), (n1, high) = points[-2:]
    return math.log(high / low) / math.log(n1 / n0)


def write_text(path: Path, text: str) -> None:
    """Write a file at once: a reader never sees half of it."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")
