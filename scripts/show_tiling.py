"""Prints how the block sizes of FlashAttention V1 follow from a GPU's on-chip memory.

    python scripts/show_tiling.py --device h200 --head-dim 64
    python scripts/show_tiling.py                     # of the GPU that is here

Three plans: the paper's sizes for the shared memory of one program, the same where the scores are
counted too, and the tuned table's. Each item that one block step holds is listed with its bytes.
"""

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, from anywhere

from flash_attention import gpus, tiling
from flash_attention.v1 import tables
from scripts.common import gpu_option
from scripts.common.arguments import kernel_head_dim
from scripts.common.ending import ended

WHY = """\
Why the tuned sizes differ from the paper's:
 - Two memories, not one. The paper's M holds K, V, Q and O. Here the matrix unit leaves S and O in
   registers, a second memory as large as the first, and S (Br x Bc) needs room: in forward with d
   of 64 or 128 and 16 bits it is the largest item of all. The paper leaves it out: with Br = d it
   is as large as K_j or V_j, in their precision.
 - Powers of two, and in forward with 16 bits Br of at least 64 rows, to fill the matrix unit of a
   Hopper GPU.
 - In forward, O passes through HBM once per K/V block: Bc is as large as the registers allow.
 - In backward a program holds dK and dV too: smaller blocks, or nothing is left for P and dP.
 - Room is also time: half the room lets a second program run while the first waits (programs on a
   processor), or lets the next Q and dO be loaded ahead (stages)."""


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    gpu = args.gpu
    console = Console(width=None if sys.stdout.isatty() else 110)
    d, e = args.head_dim, args.element_size
    print(
        f"{gpu.name}: {gpu.processors} processors with {gpu.registers // gpus.KIB} KiB of "
        f"registers, {gpu.shared_memory // gpus.KIB} KiB of shared memory for a program; "
        f"L2 {gpu.l2 // gpus.MIB} MiB"
    )
    elements = gpu.shared_memory // e
    block_q, block_kv = tiling.paper_blocks(elements, d)
    print(f"M = {gpu.shared_memory:,} bytes / {e} = {elements:,} elements, d = {d}")
    print(f"  Bc = ceil(M / 4d) = {block_kv}, Br = min(Bc, d) = {block_q}\n")
    backward = tiling.tuned(tables.BACKWARD, d, e)
    plans = [
        ("forward, the paper's", tiling.Blocks(block_q, block_kv), tiling.forward_step),
        ("forward, tuned", tiling.tuned(tables.FORWARD, d, e), tiling.forward_step),
        ("backward, the paper's", tiling.Blocks(block_q, block_kv), tiling.backward_step),
        ("backward, tuned", backward, tiling.backward_step),
    ]
    for title, blocks, step in plans:
        items = step(blocks.block_q, blocks.block_kv, d, e)
        console.print(budget(title, blocks, items, gpu))
    print(WHY)
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", metavar="GPU", help=f"{', '.join(gpus.KNOWN)}; default: the one that is here")
    add("--head-dim", type=kernel_head_dim, default=64, metavar="D", help="default: %(default)s")
    add("--element-size", type=int, default=2, choices=(2, 4), help="bytes (default: %(default)s)")
    args = parser.parse_args(argv)
    try:
        args.gpu = gpu_option.find(args.device)
    except ValueError as error:
        parser.error(f"--device: {error}")
    return args


def budget(title: str, blocks: tiling.Blocks, items: list[tiling.Item], gpu: gpus.Gpu) -> Table:
    """The items of one block step, and whether all programs of a processor find room."""
    heading = f"{title}: Br = {blocks.block_q}, Bc = {blocks.block_kv}"
    if blocks.per_processor > 1:
        heading += f", {blocks.per_processor} programs on a processor"
    table = Table("item", "shape", "KiB", "where", title=heading, title_justify="left")
    table.columns[2].justify = "right"
    for item in items:
        table.add_row(item.name, item.shape, f"{item.bytes / gpus.KIB:,.1f}", item.place)
    table.add_section()
    for place, room in (("shared", gpu.shared_memory), ("registers", gpu.registers)):
        need = blocks.per_processor * tiling.held(items, place)
        says = "fits" if need <= room else "does not fit"
        table.add_row(
            f"all programs, of {room // gpus.KIB} KiB", "", f"{need / gpus.KIB:,.1f}",
            f"{place}: {says}",
        )  # fmt: skip
    return table


if __name__ == "__main__":
    sys.exit(ended(main))
