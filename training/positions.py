"""What a longer context buys: the validation loss by a token's position in its sequence."""

import csv
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

from training import figures
from training.report import POSITIONS
from training.run_folder import replacing


@dataclass(frozen=True)
class Bucket:
    """Mean loss of the tokens predicted at positions first to last of a sequence, from 0.

    Position p is predicted from the p + 1 tokens before it. ``own``: of those tokens alone whose
    document reaches back at least ``first`` tokens, so that the context is not another document's.
    None where there is no such token.
    """

    first: int
    last: int
    loss: float | None  # nats per token
    tokens: int
    loss_own: float | None
    tokens_own: int
    documents_longer: int  # validation documents of more than ``first`` tokens


class LossByPosition(L.Callback):
    """Writes each validation's loss by position, in buckets that double, to every logger and to
    loss_by_position.csv; draws loss_by_position.png at the end.

    Sequences of at most ``first`` tokens are one bucket: nothing to compare, nothing happens. The
    losses are those that validation computes anyway; 3 numbers a position are added to its memory.

    Args:
        folder: of the run.
        first: positions of the first bucket.

    Attributes:
        buckets: of the last validation; empty before it.
    """

    def __init__(self, folder: str | Path, first: int = 128) -> None:
        if first < 1:
            raise ValueError(f"first={first} must be at least 1")
        self.folder = Path(folder)
        self.first = first
        self.buckets: list[Bucket] = []
        self._sums: PositionSums | None = None

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        data = trainer.datamodule
        seq_len = getattr(data, "seq_len", 0)
        self._sums = None
        # Where only some tokens count, as in data=recall, the mean loss by position says nothing.
        if seq_len > self.first and not hasattr(data.corpus, "targets"):
            eot = trainer.datamodule.tokenizer.eot
            self._sums = PositionSums(seq_len, self.first, eot, pl_module.device)

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self._sums is not None:
            self._sums.add(outputs["losses"], batch["tokens"])

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._sums is None:
            return
        self.buckets = self._sums.buckets(trainer.datamodule.val_document_lengths())
        write_csv(self.buckets, self.folder / f"{POSITIONS}.csv")
        row = {}
        for b in self.buckets:
            where = f"{b.first}-{b.last}"
            row |= {f"val/loss_at/{where}": b.loss, f"val/loss_at_own/{where}": b.loss_own}
        for logger in trainer.loggers:
            logger.log_metrics(
                {key: loss for key, loss in row.items() if loss is not None},
                step=trainer.global_step,
            )
            logger.save()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if not self.buckets:
            return
        path = self.folder / f"{POSITIONS}.png"
        rows = [asdict(bucket) for bucket in self.buckets]
        figures.plot_positions({f"seq_len={rows[-1]['last'] + 1:,}": rows}, path)
        for logger in trainer.loggers:
            if hasattr(logger, "log_image"):  # W&B
                logger.log_image(f"val/{POSITIONS}", [str(path)])

    def summary(self) -> dict[str, list[dict[str, float | int | None]]]:
        """The buckets of the last validation, if there are any."""
        return {POSITIONS: [asdict(bucket) for bucket in self.buckets]} if self.buckets else {}


class PositionSums:
    """Sums losses by position, on their device and without waiting for it."""

    def __init__(self, seq_len: int, first: int, eot: int, device: torch.device) -> None:
        self.edges = edges(seq_len, first)
        self.eot = eot
        widths = torch.tensor([last - first + 1 for first, last in self.edges])
        starts = torch.tensor([first for first, _ in self.edges])
        # [N]: the first position of each position's bucket
        self.starts = starts.repeat_interleave(widths).to(device)
        zeros = torch.zeros(3, seq_len, dtype=torch.float64, device=device)
        self.loss, self.loss_own, self.n_own = zeros
        self.n_sequences = 0

    def add(self, losses: Tensor, tokens: Tensor) -> None:
        """losses float ``[B, N]`` of the tokens int64 ``[B, N + 1]`` after the first."""
        own = own_context(tokens, self.eot) >= self.starts
        losses = losses.double()
        self.loss += losses.sum(0)
        self.loss_own += losses.where(own, 0).sum(0)
        self.n_own += own.sum(0)
        self.n_sequences += len(tokens)

    def buckets(self, document_lengths: Tensor) -> list[Bucket]:
        """document_lengths: int64, of the documents that the sequences hold."""
        loss, loss_own, n_own = (x.cpu() for x in (self.loss, self.loss_own, self.n_own))

        def mean(total: Tensor, n: int) -> float | None:
            value = float(total) / n if n else math.nan
            return value if math.isfinite(value) else None

        found = []
        for first, last in self.edges:
            where = slice(first, last + 1)
            n, own = self.n_sequences * (last - first + 1), int(n_own[where].sum())
            found.append(
                Bucket(
                    first=first,
                    last=last,
                    loss=mean(loss[where].sum(), n),
                    tokens=n,
                    loss_own=mean(loss_own[where].sum(), own),
                    tokens_own=own,
                    documents_longer=int((document_lengths > first).sum()),
                )
            )
        return found


def edges(seq_len: int, first: int) -> list[tuple[int, int]]:
    """First and last position of each bucket: 0 to first - 1, first to 2 first - 1, ..."""
    found, start, end = [], 0, first
    while start < seq_len:
        found.append((start, min(end, seq_len) - 1))
        start, end = end, 2 * end
    return found


def own_context(tokens: Tensor, eot: int) -> Tensor:
    """How many tokens before each in ``tokens[:, 1:]`` are of its own document, int64 ``[B, N]``.

    tokens int64 ``[B, N + 1]``; a document ends with ``eot``. Counted within the row.
    """
    at = torch.arange(tokens.shape[1], device=tokens.device)
    last_end = torch.where(tokens == eot, at, -1).cummax(1).values[:, :-1]
    return at[1:] - 1 - last_end


def write_csv(buckets: list[Bucket], path: Path) -> None:
    with replacing(path) as partial, open(partial, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(asdict(buckets[0])), lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(bucket) for bucket in buckets)
