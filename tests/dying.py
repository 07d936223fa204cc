"""A callback that ends its run at its first step: its process, or with memory running out."""

import ctypes

import lightning as L
import torch


class Die(L.Callback):
    """At its first step, in the way that ``ways`` has for this run's ``seq_len``; else not."""

    def __init__(self, seq_len: int, ways: dict[int, str]) -> None:
        self.way = {int(n): way for n, way in ways.items()}.get(seq_len)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if self.way == "segv":
            ctypes.string_at(0)
        if self.way == "memory":
            torch.empty(2**60, dtype=torch.uint8)
