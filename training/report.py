"""Tables of many runs, from the summary.json in each run's folder; training.plots draws them."""

import csv
import io
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from rich.table import Table
from rich.text import Text

from training.errors import ConfigError
from training.run_folder import replacing
from training.scaling import Scaling, scaling_of_peak, scaling_of_saved
from training.units import in_gib

SUMMARY = "summary.json"
POSITIONS = "loss_by_position"  # a key of the summary, and a CSV and PNG file
FINISHED = ("ok", "oom")  # running out of memory is a result, not a failure

Row = dict[str, Any]

# Of summary.json; they lead the CSV, which also has every other plain value a summary holds.
_CSV_FIRST = ("folder", "overrides", "status", "attention", "model", "seq_len", "tokens_per_step")


def read_rows(folders: Iterable[Path | str]) -> list[Row]:
    """One row per run folder: its summary.json and what is derived from it.

    Added are ``folder`` (its name, after its parent's where numbers repeat), ``path``,
    ``overrides`` (its command line), ``peak_bytes`` (the peak allocated on a GPU, resident on a
    CPU) and ``saved_attention_bytes_per_sequence``; None when not measured.

    Raises:
        ConfigError: a summary.json that no run has written.
    """
    rows = []
    folders = list(map(Path, folders))
    names = [folder.name for folder in folders]
    repeated = len({_number(name) for name in names}) < len(names)
    for folder in folders:
        row = _summary(folder / SUMMARY)
        row["folder"] = f"{folder.parent.name}/{folder.name}" if repeated else folder.name
        row["path"] = folder
        row["overrides"] = _overrides(folder)
        row["peak_bytes"] = row.get("peak_allocated_bytes") or row.get("peak_rss_bytes")
        row["saved_attention_bytes_per_sequence"] = _per_sequence(row)
        rows.append(row)
    return rows


def _summary(file: Path) -> Row:
    try:
        row = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON ({error}); give folders of runs") from error
    if not (isinstance(row, dict) and "status" in row):
        raise ConfigError(f"{file} is no summary of a run; give folders of runs")
    return row


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


def plain(rows: list[Row]) -> list[Row]:
    """The values of each run that are numbers or texts, in full precision and in bytes."""
    plain = []
    for row in rows:
        values = {**row, "overrides": " ".join(row["overrides"])}
        if row.get("error"):
            values["error"] = " ".join(row["error"].split())
        plain.append({k: v for k, v in values.items() if not isinstance(v, dict | list | Path)})
    return plain


def to_csv(rows: list[Row]) -> str:
    """All plain values; one line per run."""
    lines = plain(rows)
    keys = list(dict.fromkeys([*_CSV_FIRST, *(key for row in lines for key in row)]))
    text = io.StringIO()
    writer = csv.DictWriter(text, keys, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
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
    return [
        " ".join([_run_number(row), *different])
        for row, different in zip(rows, _differences(rows), strict=True)
    ]


def _differences(rows: list[Row]) -> list[list[str]]:
    """Each run's overrides that not all runs share, without those that have a column."""
    shared = set.intersection(*(set(row["overrides"]) for row in rows)) if len(rows) > 1 else set()
    in_a_column = ("attention=", "seq_len=")
    return [
        [o for o in row["overrides"] if o not in shared and not o.startswith(in_a_column)]
        for row in rows
    ]


def _run_number(row: Row) -> str:
    parent, slash, name = row["folder"].rpartition("/")
    return parent + slash + _number(name)


def _number(name: str) -> str:
    """Of a folder called <number>_<overrides>; another folder's whole name."""
    number = name.split("_")[0]
    return number if number.isdigit() else name


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
    trained = [r for r in rows if r.get("train_loss_last") is not None and r.get("tokens_per_step")]
    if len({row["tokens_per_step"] for row in trained}) > 1:
        lines.append(
            "losses do not compare: tokens per step differ; "
            f"give global_batch_tokens={_common_step(trained)}"
        )
    lines += [scaling.note(name) for name, scaling in scalings(rows)]
    lines += [
        f"run {_run_number(row)} ({row['status']}): {_what_happened(row)}"
        for row in rows
        if row["status"] != "ok" and row.get("error")
    ]
    return lines


def _what_happened(row: Row) -> str:
    if not row.get("oom_tried_bytes"):
        return first_line(row["error"])
    return (
        f"no room for {in_gib(row['oom_tried_bytes'])} GiB in "
        f"{place(row.get('oom_where'), row.get('oom_frame'))} "
        f"beside {in_gib(row['oom_allocated_bytes'])} GiB"
    )


def place(where: str | None, frame: str | None) -> str:
    """Where memory ran out; autograd's own backward has no line of this project."""
    return f"{where or 'the step'} ({frame})" if frame else where or "the step"


def _common_step(rows: list[Row]) -> int:
    """Tokens that are whole sequences of every length, at least as many as any run's step."""
    unit = math.lcm(*(row["seq_len"] for row in rows))
    return -(-max(row["tokens_per_step"] for row in rows) // unit) * unit


def first_line(text: str) -> str:
    """The first line of an error message; allocators add paragraphs of advice."""
    return text.strip().splitlines()[0] if text.strip() else ""


# Series: what a plot joins with a line and a fit goes through


def series(rows: list[Row]) -> dict[str, list[Row]]:
    """Runs by backend and by all that differs beside the length; those of unknown length left out.

    By length within a series.
    """
    several_models = len({row.get("model") for row in rows}) > 1
    found = defaultdict(list)
    for row, different in zip(rows, _differences(rows), strict=True):
        if row.get("seq_len"):
            model = [str(row.get("model"))] if several_models else []
            different = [o for o in different if not o.startswith("model=")]
            found[", ".join([str(row.get("attention")), *model, *different])].append(row)
    return {name: sorted(found[name], key=lambda row: row["seq_len"]) for name in sorted(found)}


def scalings(rows: list[Row]) -> Iterator[tuple[str, Scaling]]:
    """Each series of several lengths with the fits of its memory."""
    for name, runs in series(rows).items():
        if len({row["seq_len"] for row in runs}) > 1:
            yield name, scaling_of_saved(runs)
            yield name, scaling_of_peak(runs)


def write_text(path: Path, text: str) -> None:
    """Write a file at once: a reader never sees half of it."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")
