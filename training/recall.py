"""How many of the symbols that data=recall repeats the model knows."""

from typing import Any

import lightning as L
import torch

from data.recall import Recall
from training.console import console, step_text


class RecallAccuracy(L.Callback):
    """Logs and prints, with each validation on data=recall, the share of symbols recalled.

    A symbol is recalled when its logit is the largest of the whole vocabulary; which symbols count
    is ``Recall.counted``. Other data: nothing happens.

    Attributes:
        accuracy: of the last validation; None before it, or when it held no symbol that counts.
        n_symbols: how many counted.
    """

    def __init__(self) -> None:
        self.accuracy: float | None = None
        self.n_symbols = 0
        self._corpus: Recall | None = None
        self._right: torch.Tensor | int = 0
        self._counted: torch.Tensor | int = 0

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        corpus = getattr(trainer.datamodule, "corpus", None)
        self._corpus = corpus if isinstance(corpus, Recall) else None
        self._right = self._counted = 0

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self._corpus is None:
            return
        tokens = batch["tokens"]
        counted = self._corpus.counted(tokens)
        with trainer.precision_plugin.forward_context():
            predicted = pl_module.model(tokens[:, :-1]).argmax(-1)
        # Sums stay on the device: nothing waits for it between batches.
        self._right = self._right + ((predicted == tokens[:, 1:]) & counted).sum()
        self._counted = self._counted + counted.sum()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._corpus is None:
            return
        self.n_symbols = int(self._counted)
        self.accuracy = int(self._right) / self.n_symbols if self.n_symbols else None
        if self.accuracy is None:
            return
        row = {"val/recall_accuracy": self.accuracy, "val/recall_chance": self._corpus.chance}
        for logger in trainer.loggers:
            logger.log_metrics(row, step=trainer.global_step)
            logger.save()
        console.print(
            f"{step_text(trainer, trainer.global_step)}  recall accuracy {self.accuracy:.3f} of "
            f"{self.n_symbols:,} symbols, by chance {self._corpus.chance:.3g}"
        )

    def summary(self) -> dict[str, float | int | None]:
        """Of data=recall: the last accuracy, that of the best guess, how many symbols, the lag."""
        if self._corpus is None:
            return {}
        return {
            "recall_accuracy": self.accuracy,
            "recall_chance": self._corpus.chance,
            "recall_symbols": self.n_symbols,
            "recall_lag": self._corpus.lag,
        }
