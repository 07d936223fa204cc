"""Command line arguments that several scripts have: their types, and the check of --out.

What is wrong with one is said in a sentence, and before anything is measured.
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from training.errors import fail
from training.run_folder import check_replacing

LARGEST_HEAD_DIM = 256  # of the tuned tables, and of the kernels
LONGEST = 2**20  # tokens; the IO model walks all blocks of a sequence


def positive(text: str) -> int:
    """An integer of at least 1; for argparse, as all below."""
    return _number(text, int, lambda value: value >= 1, "an integer of at least 1")


def positive_number(text: str) -> float:
    return _number(text, float, lambda value: 0 < value < math.inf, "a number above 0")


def fraction(text: str) -> float:
    return _number(text, float, lambda value: 0 <= value < 1, "a number of at least 0 and below 1")


def kernel_head_dim(text: str) -> int:
    accepted = f"an integer from 1 to {LARGEST_HEAD_DIM}"
    return _number(text, int, lambda value: 1 <= value <= LARGEST_HEAD_DIM, accepted)


def length(text: str) -> int:
    """Tokens of a sequence that the IO model counts in seconds."""
    accepted = f"an integer from 1 to {LONGEST}"
    return _number(text, int, lambda value: 1 <= value <= LONGEST, accepted)


def present_device(text: str) -> str:
    """The CPU, or a CUDA GPU that is here, as PyTorch names it."""
    import torch  # takes seconds that --help need not wait for

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    here = ["cpu", *(["cuda"] if gpus else []), *(f"cuda:{i}" for i in range(gpus))]
    if text not in here:
        raise argparse.ArgumentTypeError(f"{text!r} is not here; give {' or '.join(here)}")
    return text


def two_defaults(usual: dict[str, Any], on_cpu: dict[str, Any], key: str) -> str:
    """The text of --help for an argument whose default is another one on a CPU."""
    texts = (
        " ".join(map(str, value)) if isinstance(value, list) else value
        for value in (usual[key], on_cpu[key])
    )
    return "default: {}; on a CPU: {}".format(*texts)


def fill(args: argparse.Namespace, defaults: dict[str, Any]) -> None:
    """Give the arguments that were not given their defaults."""
    for key, value in defaults.items():
        if getattr(args, key) is None:
            setattr(args, key, value)


def file_name(text: str) -> Path:
    """A path whose last part names a file, or what files begin with."""
    path = Path(text)
    if path.name in ("", ".."):
        raise argparse.ArgumentTypeError(f"{text!r} names no file; give a path that ends in a name")
    return path


def beside(out: Path, ending: str) -> Path:
    """``out`` with an ending, such as ".csv": what is after a dot in its name stays."""
    return out.with_name(f"{out.name}{ending}")


def check_out(out: Path, *files: Path) -> None:
    """Ends the program with one sentence where a file that --out stands for cannot be written;
    missing folders are made."""
    for file in files:
        try:
            check_replacing(file)
        except OSError as error:
            fail(unwritable(out, error, file))


def unwritable(out: Path, error: OSError, file: Path) -> str:
    """One sentence for an --out that the system refuses."""
    return f"--out={out} cannot be written ({error.strerror}: {file}); give another path"


def _number(text: str, kind: type, accepts: Callable[[Any], bool], accepted: str) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not accepts(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not accepted; give {accepted}")
    return value
