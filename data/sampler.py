"""The order in which a run sees the training sequences."""

from collections.abc import Callable, Iterator

import numpy as np
from torch.utils.data import Sampler


def epoch_order(epoch: int, n_sequences: int, seed: int) -> np.ndarray:
    """A permutation of range(n_sequences) that depends on the seed and the epoch alone."""
    return np.random.default_rng([seed, epoch]).permutation(n_sequences)


class EndlessBatches(Sampler):
    """Batches of sequence numbers, for ever, from position `start()` of the run's order.

    `len` is the number of batches of the whole run, wherever it starts: that is what the trainer
    counts to, and it counts a resumed run on from where it stopped.
    """

    def __init__(
        self, n_sequences: int, batch_size: int, n_batches: int, seed: int, start: Callable[[], int]
    ):
        self.n_sequences = n_sequences
        self.batch_size = batch_size
        self.n_batches = n_batches
        self.seed = seed
        self.start = start

    def __len__(self) -> int:
        return self.n_batches

    def __iter__(self) -> Iterator[list[int]]:
        epoch, first = divmod(self.start(), self.n_sequences)
        batch = []
        while True:
            for i in epoch_order(epoch, self.n_sequences, self.seed)[first:]:
                batch.append(int(i))
                if len(batch) == self.batch_size:
                    yield batch
                    batch = []
            epoch, first = epoch + 1, 0
