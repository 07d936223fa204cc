"""Times whole training steps of nanoGPT, to set beside the tokens/s and peaks of train.py.

    git clone https://github.com/karpathy/nanoGPT
    python scripts/nanogpt_step.py nanoGPT --seq-lens 1024 4096 16384

nanoGPT's own ``model.py``: GPT-2 small with a vocabulary of 50,304, SDPA, its AdamW (fused on a
GPU), gradients clipped to 1, bfloat16 autocast, torch.compile, random tokens. For each length, a
step has --tokens tokens, or one sequence if that is longer. The median step counts.

PyTorch chooses among SDPA's backends (on Hopper cuDNN before FlashAttention-2); --sdpa leaves it
one.
"""

import argparse
import importlib.util
import statistics
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from rich.console import Console
from rich.progress import track
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, from anywhere

from scripts.common import csv_file
from scripts.common.arguments import check_out, file_name, positive, present_device
from scripts.common.ending import ended
from training import memory
from training.devices import versions
from training.throughput import device_name, synchronize

VOCAB_SIZE = 50304  # GPT-2's 50,257 tokens, rounded up to a multiple of 64
SDPA = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
console = Console(highlight=False, soft_wrap=True, markup=False)
WARMUP_STEPS = 3  # the first one compiles, and makes the optimizer's state


@dataclass
class Row:
    """One length; peak in bytes, of PyTorch's allocator on a GPU, resident on a CPU."""

    seq_len: int
    batch: int
    sdpa: str
    parameters: int
    tokens_per_s: float
    peak_bytes: int
    device_name: str
    torch: str


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="a clone of nanoGPT")
    parser.add_argument("--seq-lens", type=positive, nargs="+", default=[1024], metavar="N")
    parser.add_argument(
        "--tokens", type=positive, default=32768, help="tokens per step (default: 32768)"
    )
    parser.add_argument(
        "--steps", type=positive, default=10, help="timed steps of each length (default: 10)"
    )
    parser.add_argument(
        "--sdpa",
        choices=["any", *SDPA],
        default="any",
        help="the backend of SDPA (default: any, PyTorch's choice)",
    )
    parser.add_argument(
        "--device",
        type=present_device,
        default="cuda",
        help="cpu, cuda, cuda:1, ... (default: cuda)",
    )
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=True, help="torch.compile"
    )
    parser.add_argument(
        "--out", type=file_name, default="nanogpt_step.csv", help="(default: nanogpt_step.csv)"
    )
    args = parser.parse_args(argv)
    if not (args.folder / "model.py").is_file():
        parser.error(f"{args.folder} has no model.py; give the folder of a clone of nanoGPT")
    if args.device == "cpu" and args.sdpa not in ("any", "flash"):
        parser.error(f"--sdpa: {args.sdpa} is not on the CPU; give any or flash")
    check_out(args.out, args.out)
    model = load(args.folder)
    rows = []
    for seq_len in track(args.seq_lens, description="nanoGPT", console=console):
        # A compiled graph has SDPA's backend in it, and the caches of graphs do not ask which one
        # is wanted: an earlier run's would be taken, whatever --sdpa says.
        uncached = torch.compiler.config.patch(force_disable_caches=True)
        backend = sdpa_kernel(SDPA[args.sdpa]) if args.sdpa in SDPA else nullcontext()
        with uncached, backend:
            rows.append(measure(model, seq_len, args))
        csv_file.write(args.out, rows)
        console.print(
            f"N={seq_len:,}  batch {rows[-1].batch}  {rows[-1].tokens_per_s:,.0f} tokens/s  "
            f"peak {rows[-1].peak_bytes / 2**30:.2f} GiB"
        )
    return 0


def load(folder: Path) -> ModuleType:
    """nanoGPT's model.py as a module."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", folder / "model.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks itself up there
    spec.loader.exec_module(module)
    return module


def measure(nanogpt: ModuleType, seq_len: int, args: argparse.Namespace) -> Row:
    """Train on random tokens for a few steps."""
    torch._dynamo.reset()  # lets the last length's model go
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = torch.device(args.device)
    batch = max(1, args.tokens // seq_len)
    config = nanogpt.GPTConfig(block_size=seq_len, vocab_size=VOCAB_SIZE, dropout=0.0)
    model = nanogpt.GPT(config).to(device)
    optimizer = model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), device.type)
    step_of = torch.compile(model) if args.compile else model
    seconds = []
    for step in range(WARMUP_STEPS + args.steps):
        tokens = torch.randint(VOCAB_SIZE, (batch, seq_len + 1), device=device)
        if step == WARMUP_STEPS:
            memory.reset_peaks(device)
        synchronize(device)
        began = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16):
            _, loss = step_of(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    peaks = memory.peaks(device)
    return Row(
        seq_len=seq_len,
        batch=batch,
        sdpa=args.sdpa,
        parameters=sum(p.numel() for p in model.parameters()),
        tokens_per_s=batch * seq_len / statistics.median(seconds[WARMUP_STEPS:]),
        peak_bytes=peaks.get("allocated") or peaks["rss"],
        device_name=device_name(device),
        torch=versions()["torch"],
    )


if __name__ == "__main__":
    sys.exit(ended(main))
