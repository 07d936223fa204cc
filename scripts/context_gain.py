"""Draws what a longer context buys, from the folders of finished runs.

    python train.py -m experiment=recall seq_len=64,128,256
    python train.py -m experiment=context_gain seq_len=512,4096
    python scripts/context_gain.py multirun/*/*/ --out context_gain

A folder is a run's or a sweep's. Two figures, each if there are runs for it: PATH_recall.png, the
accuracy of recall over sequence length with the lag and the chance level; PATH_positions.png, the
validation loss over position in the sequence, one curve a run. What is drawn is printed too.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, from anywhere

from scripts.common.arguments import beside, check_out, file_name
from scripts.common.ending import ended
from training.cli import one_sentence
from training.figures import plot_positions, plot_recall
from training.report import POSITIONS, SUMMARY, read_rows

FIGURES = ("recall", "positions")
Row = dict[str, Any]


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    folders = run_folders(args.folders)
    with one_sentence():
        rows = [row for row in read_rows(folders) if row["status"] == "ok"]
    recall = [row for row in rows if row.get("recall_accuracy") is not None]
    positions = named([row for row in rows if row.get(POSITIONS) and "recall_lag" not in row])
    if not (recall or positions):
        print(
            f"error: none of the {len(folders)} runs found has recall_accuracy or {POSITIONS} in "
            f"its {SUMMARY}; give folders of runs with experiment=recall or context_gain",
            file=sys.stderr,
        )
        return 1
    console = Console(width=None if sys.stdout.isatty() else 120)
    if recall:
        console.print(recall_table(recall))
        plot_recall(recall, drawn(args.out, "recall"))
    if positions:
        console.print(positions_table(positions))
        plot_positions(positions, drawn(args.out, "positions"))
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="of a run or a sweep")
    parser.add_argument(
        "--out",
        type=file_name,
        default="context_gain",
        metavar="PATH",
        help="default: %(default)s",
    )
    args = parser.parse_args(argv)
    for folder in args.folders:
        if not folder.is_dir():
            parser.error(f"{folder} is no folder; give the folder of a run or a sweep")
    check_out(args.out, *(beside(args.out, f"_{what}.png") for what in FIGURES))
    return args


def run_folders(folders: list[Path]) -> list[Path]:
    """The runs in the folders, each once: those that hold a summary."""
    found = [file.parent.resolve() for folder in folders for file in folder.rglob(SUMMARY)]
    return sorted(dict.fromkeys(found), key=str)


def named(rows: list[Row]) -> dict[str, list[Row]]:
    """Loss by position of each run, by a name that tells the runs apart."""
    shared = set.intersection(*(set(row["overrides"]) for row in rows)) if rows else set()
    found: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["seq_len"]):
        own = [o for o in row["overrides"] if o not in shared and not o.startswith("seq_len=")]
        name = " ".join([f"seq_len={row['seq_len']:,}", *own])
        found[f"{name} ({row['folder']})" if name in found else name] = row[POSITIONS]
    return found


def drawn(out: Path, what: str) -> Path:
    path = beside(out, f"_{what}.png")
    print(f"drawn in {path}", flush=True)
    return path


def recall_table(rows: list[Row]) -> Table:
    table = Table("lag", "seq_len", "accuracy", "by chance", "symbols", title="recall")
    for row in sorted(rows, key=lambda row: (row["recall_lag"], row["seq_len"])):
        table.add_row(
            f"{row['recall_lag']:,}",
            f"{row['seq_len']:,}",
            f"{row['recall_accuracy']:.4f}",
            f"{row['recall_chance']:.4f}",
            f"{row['recall_symbols']:,}",
        )
    return table


def positions_table(runs: dict[str, list[Row]]) -> Table:
    headings = (
        "run",
        "positions",
        "loss",
        "of a document as long",
        "its tokens",
        "documents as long",
    )
    table = Table(*headings, title="loss by position")
    for name, rows in runs.items():
        for row in rows:
            table.add_row(
                name,
                f"{row['first']:,}-{row['last']:,}",
                f"{row['loss']:.4f}",
                "-" if row["loss_own"] is None else f"{row['loss_own']:.4f}",
                f"{row['tokens_own']:,}",
                f"{row['documents_longer']:,}",
            )
            name = ""
    return table


if __name__ == "__main__":
    sys.exit(ended(main))
