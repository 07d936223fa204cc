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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, from anywhere

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from training.cards import CARDS, card_bytes
from training.cli import explain, fail
from training.errors import ConfigError
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
        "--multiple", type=int, default=128, help="what divides the longest seq_len (default: 128)"
    )
    parser.add_argument(
        "--no-longest", action="store_true", help="leave out the longest seq_len: less to wait for"
    )
    args = parser.parse_intermixed_args(argv)
    if args.multiple < 1:
        parser.error(f"--multiple={args.multiple} must be at least 1")
    # Imported here: PyTorch takes seconds that --help need not wait for.
    from training.compose import combinations, composed
    from training.console import console

    try:
        size = card_bytes(args.card)
        jobs = combinations(args.overrides)
        configs = [composed(job) for job in jobs]
        rows = [_row(cfg, size, 0 if args.no_longest else args.multiple) for cfg in configs]
    except (ConfigError, HydraException, OmegaConfBaseException) as error:
        fail(str(error) if isinstance(error, ConfigError) else explain(error))
    _print(console, _names(jobs), rows, args.card, size)
    return 0


def _row(cfg, size: int, multiple: int) -> dict[str, int]:
    from training.predict import longest_that_fits, predict_peak

    prediction = predict_peak(cfg)
    row = {"peak": prediction.peak_bytes, **prediction.parts}
    return row | ({"longest": longest_that_fits(cfg, size, multiple)} if multiple else {})


def _names(jobs: list[list[str]]) -> list[str]:
    """What tells the combinations apart."""
    shared = set(jobs[0]).intersection(*jobs)
    return [" ".join(o for o in job if o not in shared) for job in jobs]


def _print(console, names: list[str], rows: list[dict[str, int]], card: str, size: int) -> None:
    from rich.table import Table

    table = Table("", title="peak of a training step on a GPU (GiB)", title_justify="left")
    several = len(rows) > 1
    for i, name in enumerate(names):
        table.add_column(name if several else "", justify="right", overflow="fold")
        table.columns[i + 1].no_wrap = not several
    parts = {part: name.removeprefix("saved by ") for part, name in PARTS.items()}
    labels = {"peak": "peak allocated", **parts}
    for key, label in labels.items():
        table.add_row(label, *(in_gib(row[key]) for row in rows))
    if "longest" in rows[0]:
        where = f"longest seq_len in {size / GIB:.4g} GiB" + (f" ({card})" if card in CARDS else "")
        table.add_row(where, *(f"{row['longest']:,}" if row["longest"] else "-" for row in rows))
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
