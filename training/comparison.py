"""The report of many runs: its files in one folder, and its table on the console."""

import sys
from pathlib import Path

from rich.console import Console

from training import report
from training.plots import PLOTS, save_plots

TABLES = ("sweep.csv", "sweep.md")


def write_tables(rows: list[report.Row], folder: Path) -> None:
    report.write_text(folder / "sweep.csv", report.to_csv(rows))
    report.write_text(folder / "sweep.md", report.to_markdown(rows))


def write_report(rows: list[report.Row], folder: Path) -> list[Path]:
    """Writes tables and plots; the paths of the plots."""
    write_tables(rows, folder)
    return save_plots(rows, folder)


def print_report(rows: list[report.Row], folder: Path) -> None:
    # Into a file or a pipe, rich would cut the table at 80 columns.
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    console.print()
    console.print(report.to_rich(rows))
    for line in report.notes(rows):
        console.print(line, markup=False)
    console.print(f"{', '.join([*TABLES, *PLOTS])} in {folder}", markup=False)
