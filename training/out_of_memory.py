"""What was being allocated when memory ran out: how much, where, and what was allocated already."""

import re
import traceback
from pathlib import Path
from types import FrameType

import torch
from torch import nn

from training.memory import check_fits_in_ram, current

ROOT = Path(__file__).resolve().parents[1]
# "Tried to allocate 2.00 GiB" (PyTorch on a GPU), "you tried to allocate 64 bytes" (on a CPU),
# "Unable to allocate 8.00 EiB" (NumPy).
_TRIED = re.compile(r"(?:tried|unable) to allocate ([\d.]+) ?(bytes|[KMGTPE]iB)", re.IGNORECASE)
_POWERS = {"bytes": 0, "kib": 1, "mib": 2, "gib": 3, "tib": 4, "pib": 5, "eib": 6}


def describe(error: BaseException, device: torch.device) -> dict[str, int | str | None]:
    """What is known of an out-of-memory; call it while the error's tensors are still alive.

    * oom_tried_bytes: the allocation that failed, as far as the message says it (three digits),
    * oom_where: the part of the model that ran, like ``blocks.3.attention.kernel``; "loss";
      "backward", with the part where it runs Python; "optimizer step"; "before the first step" (it
      was refused); else a function's name,
    * oom_frame: the innermost line of this project, like ``models/gpt.py:24 in forward``,
    * oom_allocated_bytes: live tensors on the GPU, or the resident set of the process on a CPU.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    own = [(frame, line) for frame, line in frames if _is_own(frame)]
    last = own[-1] if own else None
    return {
        "oom_tried_bytes": tried_bytes(str(error)),
        "oom_where": _where([frame for frame, _ in frames], last and last[0]),
        "oom_frame": last and f"{_relative(last[0])}:{last[1]} in {last[0].f_code.co_name}",
        "oom_allocated_bytes": current(device),
    }


def tried_bytes(message: str) -> int | None:
    """The size in an allocator's message."""
    found = _TRIED.search(message)
    if found is None:
        return None
    return round(float(found.group(1)) * 1024 ** _POWERS[found.group(2).lower()])


def _where(frames: list[FrameType], own: FrameType | None) -> str | None:
    files = [frame.f_code.co_filename.replace("\\", "/") for frame in frames]
    names = [frame.f_code.co_name for frame in frames]
    # The Trainer has the optimizer call forward and backward: its step is what runs no module.
    optimizer = max((i for i, file in enumerate(files) if "/torch/optim/" in file), default=-1)
    inside = frames[optimizer + 1 :]
    if optimizer >= 0 and not _modules(inside) and "_engine_run_backward" not in names[optimizer:]:
        return "optimizer step"
    if "_engine_run_backward" in names:
        # Python runs inside of it for checkpoints computed again, and for custom operators.
        inside = _module_path(frames[names.index("_engine_run_backward") :], _root(frames))
        return f"backward, {inside}" if inside else "backward"
    if any("torchinductor" in file or "/torch/_inductor/" in file for file in files):
        return "compiled model"
    path = _module_path(frames, _root(frames))
    if path or own is None:
        return path
    if own.f_code is check_fits_in_ram.__code__:
        return "before the first step"
    if _relative(own).name == "loss.py" or own.f_code.co_name == "loss":
        return "loss"
    return own.f_code.co_name.strip("_")


def _root(frames: list[FrameType]) -> nn.Module | None:
    """The outermost module that runs."""
    return next(iter(_modules(frames)), None)


def _modules(frames: list[FrameType]) -> list[nn.Module]:
    selves = (frame.f_locals.get("self") for frame in frames)
    return [module for module in selves if isinstance(module, nn.Module)]


def _module_path(frames: list[FrameType], root: nn.Module | None) -> str | None:
    """The name of the innermost module that runs, as ``named_modules`` has it.

    Found step by step, because one attention module is shared by all blocks.
    """
    if root is None:
        return None
    names: list[str] = []
    parent = root
    for module in _modules(frames):
        inside = parent.named_modules()
        name = next((name for name, child in inside if child is module), "")
        if name:
            names.append(name)
            parent = module
    path = ".".join(names)
    return "" if path == "model" else path.removeprefix("model.")  # the LightningModule's


def _is_own(frame: FrameType) -> bool:
    path = Path(frame.f_code.co_filename)
    return path.is_relative_to(ROOT) and "site-packages" not in path.parts


def _relative(frame: FrameType) -> Path:
    return Path(frame.f_code.co_filename).relative_to(ROOT)
