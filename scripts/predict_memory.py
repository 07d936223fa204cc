"""Says, without a GPU, how much memory a training step will take on one, and what fits a card.

python scripts/predict_memory.py attention=flash_v1 model=gpt2_small seq_len=131072 loss=chunked
python scripts/predict_memory.py attention=naive,flash_v1 model=gpt2_small seq_len=8192,16384
python scripts/predict_memory.py model=gpt2_xl precision=32-true --card a100_80

key=value: those of train.py; several values, separated by commas, make a row for each combination.
The peak is that of torch.cuda.max_memory_allocated over training steps; PyTorch's allocator holds
somewhat more (torch.cuda.max_memory_reserved). The longest seq_len is that of one sequence in a
forward pass.
"""

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, from anywhere

from scripts.common.arguments import positive
from scripts.common.ending import ended
from training.cards import CARDS, CONTEXT, card_bytes
from training.cli import one_sentence
from training.memory_names import PARTS
from training.units import GIB, in_gib


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of train.py")
    parser.add_argument(
        "--card",
        default="h200",
        help=f"a number of GiB, or one of {', '.join(CARDS)} (default: h200)",
    )
    parser.add_argument(
        "--multiple",
        type=positive,
        default=128,
        help="what divides the longest seq_len (default: 128)",
    )
    parser.add_argument(
        "--no-longest", action="store_true", help="leave out the longest seq_len: less to wait for"
    )
    args = parser.parse_intermixed_args(argv)
    # Imported here: PyTorch takes seconds that --help need not wait for.
    from training.compose import combinations, composed, distinctions

    with one_sentence():
        size = card_bytes(args.card)
        jobs = combinations(args.overrides)
        names, configs = distinctions(jobs), [composed(job) for job in jobs]
        rows = _rows(names, configs, size, 0 if args.no_longest else args.multiple)
    table = _table(names, rows, args.card, size)
    print("peak of a training step on a GPU, in GiB")
    print(
        _aligned(table if len(jobs) > 1 else [list(line) for line in zip(*table, strict=True)][1:])
    )
    return 0


def _rows(names: list[str], configs: list, size: int, multiple: int) -> list[dict[str, int]]:
    """Of each config, under a progress bar on stderr where that is a terminal."""
    from training.predict import longest_that_fits, predict_peak

    console = Console(stderr=True)
    columns = TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn()
    rows = []
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("", total=len(configs) * (2 if multiple else 1))
        for name, cfg in zip(names, configs, strict=True):
            progress.update(task, description=f"{name} peak".strip())
            prediction = predict_peak(cfg)
            rows.append({"peak": prediction.peak_bytes, **prediction.parts})
            progress.advance(task)
            if multiple:  # some ten more peaks
                progress.update(task, description=f"{name} longest seq_len".strip())
                rows[-1]["longest"] = longest_that_fits(cfg, size, multiple)
                progress.advance(task)
    return rows


def _table(names: list[str], rows: list[dict[str, int]], card: str, size: int) -> list[list[str]]:
    """A line for each combination under a line of headings."""
    parts = {part: name.removeprefix("saved by ") for part, name in PARTS.items()}
    headings = ["", "peak allocated", *parts.values()]
    lines = [
        [name, in_gib(row["peak"]), *(in_gib(row[part]) for part in parts)]
        for name, row in zip(names, rows, strict=True)
    ]
    if "longest" in rows[0]:
        known = card in CARDS
        named = f" ({card}: {CARDS[card]}, less {CONTEXT} for CUDA itself)" if known else ""
        headings.append(f"longest seq_len in {size / GIB:.4g} GiB{named}")
        for line, row in zip(lines, rows, strict=True):
            line.append(f"{row['longest']:,}" if row["longest"] else "none")
    return [headings, *lines]


def _aligned(table: list[list[str]]) -> str:
    """The first column to the left, the others to the right; no line is broken."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for first, *others in table:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(ended(main))
