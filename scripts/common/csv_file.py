"""Tables that the scripts write, as CSV files."""

import csv
from collections.abc import Iterable, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from training.run_folder import replacing


def write(
    path: Path,
    rows: Sequence[Any],
    about: dict[str, Any] | None = None,
    columns: Iterable[str] | None = None,
) -> None:
    """Writes rows, dataclasses or dicts, under a temporary name first; makes a missing folder.

    about: values that every row ends with. columns: those before them, where there may be no row to
    tell them.
    """
    about = about or {}
    dicts = [asdict(row) if is_dataclass(row) else row for row in rows]
    names = dicts[0] if columns is None else columns
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial, open(partial, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*names, *about], lineterminator="\n")
        writer.writeheader()
        writer.writerows(row | about for row in dicts)


def software() -> dict[str, str]:
    """What measured, for ``about``: the versions of PyTorch and Triton."""
    from training.devices import versions  # loads PyTorch

    return {name: versions()[name] for name in ("torch", "triton")}
