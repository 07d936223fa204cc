"""Makes the report of a sweep from any run folders and sweep folders: tables and plots.

python scripts/compare_runs.py multirun/2025-01-31/10-00-00-000000
python scripts/compare_runs.py outputs/a outputs/b --out comparison
"""

import argparse
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, from anywhere

from scripts.common.arguments import check_out
from scripts.common.ending import ended
from training.cli import one_sentence
from training.comparison import TABLES, print_report, write_report
from training.plots import PLOTS
from training.report import SUMMARY, read_rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="a run or a sweep")
    parser.add_argument(
        "--out", type=Path, default=Path("comparison"), help="folder to write (default: comparison)"
    )
    args = parser.parse_args(argv)
    runs: list[Path] = []
    for folder in args.folders:
        found = find_runs(folder)
        if not found:
            parser.error(f"DIR={folder} has no {SUMMARY} in or below it; give a run or a sweep")
        runs += [run for run in found if run not in runs]
    check_out(args.out, *(args.out / name for name in [*TABLES, *PLOTS]))
    with one_sentence():
        rows = read_rows(runs)
    write_report(rows, args.out)
    print_report(rows, args.out)
    return 0


def find_runs(folder: Path) -> list[Path]:
    """The folder itself if it is a run's, and all below it that are, in the order of their jobs."""
    runs = [file.parent.resolve() for file in folder.rglob(SUMMARY)]
    return sorted(runs, key=_by_numbers)


def _by_numbers(path: Path) -> list[tuple[int, str]]:
    """10_x comes after 9_x."""
    return [(int(n or 0), text) for n, text in re.findall(r"(\d*)(\D*)", str(path))]


if __name__ == "__main__":
    sys.exit(ended(main))
