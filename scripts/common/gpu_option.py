"""--gpu and --measure, of the scripts that set a model of a GPU beside measurements on one."""

import argparse

import torch

from flash_attention import gpus

WITHOUT_GPU = "h200"  # the model's, where there is none to ask


def add(parser: argparse.ArgumentParser) -> None:
    cuda = torch.cuda.is_available()
    add = parser.add_argument
    default = f"default: the one that is here, or {WITHOUT_GPU}"
    add("--gpu", metavar="GPU", help=f"of the model: {', '.join(gpus.KNOWN)}; {default}")
    add("--measure", action=argparse.BooleanOptionalAction, default=cuda, help="default: on a GPU")


def check(parser: argparse.ArgumentParser, args: argparse.Namespace, device: str = "cuda") -> None:
    """Makes args.gpu a :class:`gpus.Gpu`. device: where --measure would."""
    cuda = torch.cuda.is_available()
    if args.measure and device.startswith("cuda") and not cuda:
        parser.error("--measure, but there is no CUDA GPU here; leave it out")
    try:
        args.gpu = find(args.gpu or (None if cuda else WITHOUT_GPU), device)
    except ValueError as error:
        parser.error(f"--gpu: {error}")


def find(name: str | None, device: str = "cuda") -> gpus.Gpu:
    """The table's GPU of that name; None: the one that is here, the first if device is the CPU.

    Raises:
        ValueError: the name is not in the table, or no GPU is here to be asked.
    """
    if name is not None:
        return gpus.known(name)
    if not torch.cuda.is_available():
        raise ValueError(f"there is no CUDA GPU here; give one of {', '.join(gpus.KNOWN)}")
    return gpus.query(torch.device(device if device.startswith("cuda") else "cuda"))
