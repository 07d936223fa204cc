"""The Lightning data module: tokens on disk to micro-batches, at the right place after a resume."""

import hashlib
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from data.errors import DataError, damaged
from data.packing import PackedSequences, WithTargets
from data.prepare import TokenSplit, open_split, prepare
from data.sampler import EndlessBatches

DEFAULT_CACHE = Path(__file__).resolve().parent.parent / ".cache" / "tokens"
HASHED = 256 * 2**20  # bytes up to which a token file is read whole to see whether it is intact
BLOCK = 2**20  # tokens looked at on either end of a larger one


class TokenDataModule(LightningDataModule):
    """Batches {"tokens": int64 [micro_batch_size, seq_len + 1]} of a tokenised corpus.

    Where only some tokens count for the loss, they also hold "targets", int64
    [micro_batch_size, seq_len], with models.loss.IGNORE for the others: `corpus.targets` says.

    corpus              makes the corpus from `corpus_settings`: a class of data.corpora
    tokenizer           one of data.tokenizers
    seq_len             tokens a sequence, the target of the last one not counted
    val_fraction        part of the documents for validation, between 0 and 1
    val_tokens          validate on at most so many tokens (one sequence at least); None: on all
    cache_dir           folder of the token files; None: .cache/tokens of this repository
    num_workers         loader processes; 0: none
    seed                of the order of the training sequences
    micro_batch_size    sequences a forward pass
    sequences_per_step  sequences an optimizer step, a multiple of micro_batch_size
    max_steps           optimizer steps of the whole run

    After `prepare_data(); setup("fit")`: tokenizer, vocab_size, n_train_tokens (of the training
    split), n_val_tokens (that validation predicts) and bytes_per_token (UTF-8 bytes those stand
    for, per token). Both raise DataError for what the user must mend.

    Checkpoints hold how many sequences were seen, counted by whole optimizer steps, so a resumed
    run goes on with the very next one, whatever its micro_batch_size and sequences_per_step.
    """

    def __init__(
        self,
        *,
        corpus: Callable,
        tokenizer,
        seq_len: int,
        val_fraction: float,
        val_tokens: int | None,
        cache_dir: str | Path | None,
        num_workers: int,
        seed: int,
        micro_batch_size: int,
        sequences_per_step: int,
        max_steps: int,
        **corpus_settings,
    ):
        super().__init__()
        if sequences_per_step % micro_batch_size:
            raise ValueError(
                f"sequences_per_step={sequences_per_step} is not a multiple of "
                f"micro_batch_size={micro_batch_size}"
            )
        self.corpus = corpus(**corpus_settings)
        self.tokenizer = tokenizer
        self.seq_len = seq_len
        self.val_fraction = val_fraction
        self.val_tokens = val_tokens
        self.cache_dir = Path(cache_dir).expanduser() if cache_dir else DEFAULT_CACHE
        self.num_workers = num_workers
        self.seed = seed
        self.micro_batch_size = micro_batch_size
        self.sequences_per_step = sequences_per_step
        self.max_steps = max_steps
        # Where the counting of seen sequences starts: a resume moves both.
        self._seen_at_start = 0
        self._step_at_start = 0

    def prepare_data(self) -> None:
        """Tokenise the corpus unless that was done before."""
        _ = self._folder

    def setup(self, stage: str) -> None:
        """Open the token files."""
        self.tokenizer.load(self._folder)
        self.vocab_size = self.tokenizer.vocab_size
        train, val = self._open("train"), self._open("val")
        if train.n_tokens == val.n_tokens == 0:
            raise DataError(
                f"data={self.corpus.name} has no text; give at least one document with text"
            )
        self._check_length(train, "training")
        self._check_length(val, "validation")
        if not (_is_intact(train, self.vocab_size) and _is_intact(val, self.vocab_size)):
            raise damaged(self._folder)
        self.n_train_tokens = train.n_tokens
        self._train_sha256 = train.sha256
        self._train = PackedSequences(train.path, train.dtype, self.seq_len)
        self._val = PackedSequences(val.path, val.dtype, self.seq_len)
        self.n_val_tokens = self._n_val_sequences() * self.seq_len
        targets = self._val.tokens[1 : self.n_val_tokens + 1]
        n_bytes = len(self.tokenizer.decode(targets).encode("utf-8"))
        self.bytes_per_token = n_bytes / self.n_val_tokens

    def val_document_lengths(self) -> torch.Tensor:
        """Tokens that validation reads of each document, its end of text included, int64."""
        tokens = self._val.tokens[: self.n_val_tokens + 1]
        ends = np.flatnonzero(tokens == self.tokenizer.eot)
        lengths = np.diff(ends, prepend=-1, append=len(tokens) - 1)
        return torch.from_numpy(lengths[lengths > 0])  # the last is 0 if a document ends there

    def train_dataloader(self) -> DataLoader:
        """All micro-batches of the run, from the first that it has not seen."""
        self._align_trainer()
        batches = EndlessBatches(
            n_sequences=len(self._train),
            batch_size=self.micro_batch_size,
            n_batches=self.max_steps * self._micro_batches_per_step,
            seed=self.seed,
            start=lambda: self.sequences_seen,
        )
        return self._loader(self._train, batch_sampler=batches)

    def val_dataloader(self) -> DataLoader:
        """The first sequences of the validation split; the last batch may be smaller."""
        val = torch.utils.data.Subset(self._val, range(self._n_val_sequences()))
        return self._loader(val, batch_size=self.micro_batch_size)

    @property
    def sequences_seen(self) -> int:
        """Training sequences of all finished optimizer steps, those before a resume included."""
        step = self.trainer.global_step if self.trainer else 0
        # Until a resume has restored the trainer's step, that is smaller than ours.
        steps = max(0, step - self._step_at_start)
        return self._seen_at_start + steps * self.sequences_per_step

    def state_dict(self) -> dict:
        return {
            "sequences_seen": self.sequences_seen,
            "global_step": self.trainer.global_step,
            "seq_len": self.seq_len,
            **self._same_data,
        }

    def load_state_dict(self, state: dict) -> None:
        """Go on where the checkpoint was; with another seq_len, after as many tokens.

        Raises DataError when the checkpoint's training data are not those of this run.
        """
        differing = [name for name, value in self._same_data.items() if state[name] != value]
        if differing:
            changes = ", ".join(
                f"{name} was {state[name]} and is {self._same_data[name]}" for name in differing
            )
            raise DataError(
                f"resume: the training data are not the checkpoint's ({changes}); give the data.* "
                "settings, files and seed of the run that made it, or resume=null"
            )
        self._seen_at_start = state["sequences_seen"] * state["seq_len"] // self.seq_len
        self._step_at_start = state["global_step"]

    @cached_property
    def _folder(self) -> Path:
        self._check_settings()
        return prepare(self.corpus, self.tokenizer, self.val_fraction, self.cache_dir)

    @property
    def _same_data(self) -> dict:
        """What must be the same for a resumed run to see no sequence twice."""
        return {"seed": self.seed, "tokens_sha256": self._train_sha256[:16]}

    @property
    def _micro_batches_per_step(self) -> int:
        return self.sequences_per_step // self.micro_batch_size

    def _n_val_sequences(self) -> int:
        if self.val_tokens is None:
            return len(self._val)
        return min(len(self._val), max(1, self.val_tokens // self.seq_len))

    def _loader(self, dataset, **order) -> DataLoader:
        if hasattr(self.corpus, "targets"):
            dataset = WithTargets(dataset, self.corpus.targets)
        cuda = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        return DataLoader(
            dataset,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=cuda,
            # Without one of its own a loader draws from the global generator, so that the dropout
            # of a resumed run, which makes a loader more, would differ.
            generator=torch.Generator().manual_seed(self.seed),
            **order,
        )

    def _align_trainer(self) -> None:
        """Make the trainer's count of micro-batches that of its finished optimizer steps.

        Lightning restores the number of micro-batches, and accumulates gradients by it: wrong after
        a resume with another micro-batch size, or from a checkpoint amid an accumulation (whose
        gradients are lost). It asks for the loader after it has restored its counters.
        """
        if self.trainer is None or not self.trainer.fit_loop.epoch_loop.restarting:
            return
        progress = self.trainer.fit_loop.epoch_loop.batch_progress
        done = self.trainer.global_step * self._micro_batches_per_step
        for count in (progress.total, progress.current):
            # A checkpoint written in on_train_batch_end has its batch processed, not yet completed;
            # Lightning recognises it by that.
            lag = count.processed - count.completed
            count.ready = count.started = count.processed = done
            count.completed = done - lag

    def _check_settings(self) -> None:
        if hasattr(self.corpus, "check"):
            self.corpus.check(self.tokenizer)
        fraction, tokens, workers = self.val_fraction, self.val_tokens, self.num_workers
        if not (isinstance(fraction, int | float) and 0 < fraction < 1):
            raise DataError(
                f"data.val_fraction={fraction!r} is not accepted; give a number between 0 and 1"
            )
        if not (tokens is None or (isinstance(tokens, int) and tokens >= 1)):
            raise DataError(
                f"data.val_tokens={tokens!r} is not accepted; "
                "give an integer of at least 1, or null"
            )
        if not (isinstance(workers, int) and workers >= 0):
            raise DataError(
                f"data.num_workers={workers!r} is not accepted; give an integer of at least 0"
            )

    def _open(self, name: str) -> TokenSplit:
        try:
            return open_split(self._folder, name)
        except DataError:
            raise
        except PermissionError as error:
            raise DataError(
                f"data.cache_dir={str(self.cache_dir)!r} cannot be read ({error.strerror}: "
                f"{error.filename!r}); give a folder of your own"
            ) from error
        # meta.json is no JSON, holds something else, or a file is missing
        except (ValueError, LookupError, TypeError, OSError) as error:
            raise damaged(self._folder) from error

    def _check_length(self, split: TokenSplit, name: str) -> None:
        if split.n_tokens <= self.seq_len:
            longest = split.n_tokens - 1
            shorter = f"seq_len={longest} or less, " if longest >= 1 else ""
            raise DataError(
                f"seq_len={self.seq_len} is too long for the {name} split of {split.n_tokens} "
                f"tokens; give {shorter}more text, "
                f"or another data.val_fraction (now {self.val_fraction})"
            )


def _is_intact(split: TokenSplit, vocab_size: int) -> bool:
    """Whether the tokens are those that were written; of a large file, whether they can be."""
    tokens = np.memmap(split.path, split.dtype, mode="r")
    if tokens.nbytes < HASHED:
        return hashlib.sha256(tokens).hexdigest() == split.sha256
    return all(block.max() < vocab_size for block in (tokens[:BLOCK], tokens[-BLOCK:]))
