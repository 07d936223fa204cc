"""Compares predicted with measured peaks of training steps on a GPU; needs no GPU itself.

python scripts/check_prediction.py multirun/2025-01-31/10-00-00-000000 --out results/prediction
python scripts/check_prediction.py results/h200_gpt2_small_8k.csv

A source is a run, a sweep, or a table: a CSV file with a row for each run, whose columns name
settings of train.py (attention, model, seq_len, model.n_layer, ...; tokens_per_step is
global_batch_tokens, overrides is the command line) and which has peak_allocated_bytes or
peak_allocated_gib. Writes OUT.csv and OUT.md.
"""

import argparse
import csv
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, from anywhere

from omegaconf import OmegaConf

from scripts.common import csv_file
from scripts.common.arguments import beside, check_out, file_name
from scripts.common.ending import ended
from scripts.compare_runs import find_runs
from training.cli import one_sentence
from training.compose import composed
from training.report import read_rows
from training.run_folder import replacing
from training.units import GIB

GROUPS = ("attention", "model", "loss", "tokenizer")
KEYS = ("seq_len", "precision", "micro_batch_tokens", "compile")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sources", nargs="+", type=Path, metavar="SOURCE")
    parser.add_argument(
        "--out",
        type=file_name,
        default="prediction",
        metavar="OUT",
        help="write OUT.csv and OUT.md (default: prediction)",
    )
    args = parser.parse_args(argv)
    for source in args.sources:
        if not source.exists():
            parser.error(f"SOURCE={source} does not exist; give a run, a sweep or a CSV file")
    check_out(args.out, beside(args.out, ".csv"), beside(args.out, ".md"))
    from training.predict import predict_peak  # loads Lightning, unlike --help

    rows = []
    for source in args.sources:
        with one_sentence(OSError, ValueError, about=f"SOURCE={source}: "):
            for name, cfg, measured in of_table(source) if source.is_file() else of_runs(source):
                rows.append(compared(name, predict_peak(cfg).peak_bytes, measured))
                if len(rows) == 1:
                    print(*rows[0], sep="  ")
                print(*rows[-1].values(), sep="  ")
    ratios = [float(row["ratio"]) for row in rows if row["ratio"]]
    if not ratios:
        parser.error("no SOURCE holds a peak that was measured on a GPU")
    write(rows, args.out)
    worst = max(abs(ratio - 1) for ratio in ratios)
    print(f"{len(ratios)} runs, largest error {worst:.1%}; {len(rows) - len(ratios)} out of memory")
    return 0


def compared(name: str, predicted: int, measured: int | None) -> dict[str, str]:
    """A row of the table; ``measured``: None of what ran out of memory."""
    return {
        "run": name,
        "measured_gib": f"{measured / GIB:.3f}" if measured else "out of memory",
        "predicted_gib": f"{predicted / GIB:.3f}",
        "ratio": f"{predicted / measured:.3f}" if measured else "",
    }


def of_runs(folder: Path) -> Iterator[tuple[str, Any, int]]:
    """Name, config and measured bytes of the runs in or below a folder that measured a GPU."""
    from training.predict import with_changes

    for row in read_rows(find_runs(folder)):
        if row.get("peak_allocated_bytes") and row["status"] in ("ok", "oom"):
            cfg = OmegaConf.load(row["path"] / ".hydra" / "config.yaml")
            cfg = with_changes(cfg, {"precision": row["precision"]})  # "auto" is resolved there
            name = " ".join(row["overrides"]) or row["folder"]
            yield name, cfg, row["peak_allocated_bytes"]


def _bytes(measured: str | float) -> int:
    if not 0 < float(measured) < math.inf:
        raise ValueError(f"a peak of {measured} is not a number of bytes above 0")
    return int(float(measured))


def of_table(file: Path) -> Iterator[tuple[str, Any, int | None]]:
    """Name, config and measured bytes of the rows of a CSV file that measured a GPU, or that ran
    out of its memory (None)."""
    with open(file, newline="", encoding="utf-8") as opened:
        for row in csv.DictReader(opened):
            gib = row.get("peak_allocated_gib")
            measured = row.get("peak_allocated_bytes") or (gib and float(gib) * GIB)
            if row.get("status") == "oom" or measured:
                overrides = _overrides(row)
                peak = None if row.get("status") == "oom" else _bytes(measured)
                yield " ".join(overrides), composed(overrides), peak


def _overrides(row: dict[str, str]) -> list[str]:
    found = {key: row[key] for key in (*GROUPS, *KEYS) if row.get(key)}
    found |= {key: value for key, value in row.items() if key and "." in key and value}
    if row.get("tokens_per_step"):
        found["global_batch_tokens"] = row["tokens_per_step"]
    typed = dict(o.split("=", 1) for o in (row.get("overrides") or "").split() if "=" in o)
    return [f"{key}={value}" for key, value in (found | typed).items()]


def write(rows: list[dict[str, str]], out: Path) -> None:
    """The table as OUT.csv and OUT.md."""
    csv_file.write(beside(out, ".csv"), rows)
    lines = [
        "| run | measured (GiB) | predicted (GiB) | predicted / measured |",
        "|---|---|---|---|",
    ]
    lines += [f"| {' | '.join(row.values())} |" for row in rows]
    with replacing(beside(out, ".md")) as partial:
        partial.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(ended(main))
