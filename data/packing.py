"""Sequences of one length cut out of a flat file of tokens."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset


class PackedSequences(Dataset):
    """Sequence i is tokens[i * seq_len : (i + 1) * seq_len + 1].

    The last token of a sequence is the first of the next, so every token but the file's first is
    predicted exactly once; a remainder shorter than a sequence is left out. Documents follow one
    another with an end-of-text token between them, so a sequence may hold several or a part of one.
    """

    def __init__(self, path: Path, dtype: str, seq_len: int):
        self.path, self.dtype, self.seq_len = path, dtype, seq_len
        self.tokens = np.memmap(path, dtype=dtype, mode="r")

    def __reduce__(self):
        # Loader processes open the file themselves: a pickled memmap would be a copy of all of it.
        return PackedSequences, (self.path, self.dtype, self.seq_len)

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.seq_len

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        """{"tokens": int64 [seq_len + 1]}"""
        if not 0 <= i < len(self):
            raise IndexError(f"sequence {i} of {len(self)}")
        start = i * self.seq_len
        tokens = self.tokens[start : start + self.seq_len + 1].astype(np.int64)
        return {"tokens": torch.from_numpy(tokens)}


class WithTargets(Dataset):
    """The sequences of another data set with what of them counts for the loss.

    targets: makes int64 [B, N] of tokens [B, N + 1].
    """

    def __init__(self, sequences: Dataset, targets: Callable[[torch.Tensor], torch.Tensor]):
        self.sequences, self.targets = sequences, targets

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        """{"tokens": int64 [seq_len + 1], "targets": int64 [seq_len]}"""
        tokens = self.sequences[i]["tokens"]
        return {"tokens": tokens, "targets": self.targets(tokens[None])[0]}
