"""Tokenisers: text to token numbers and back.

Each has `vocab_size`, `eot` (the end-of-text token's number), `encode(texts) -> list of integer
arrays` (no eot in them), `decode(ids) -> str` (eot left out), `fingerprint()`, and two steps to
become usable: `fit(texts, folder)` once for a corpus, `load(folder)` in every later run.
"""

import hashlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import tokenizers

from data.cache import fingerprint
from data.errors import DataError, damaged, first_line

EOT_TOKEN = "<|endoftext|>"
FILE = "tokenizer.json"
STOP_WAIT = 1.0  # seconds an interrupted training has to end by itself


class ByteTokenizer:
    """A token is a byte of UTF-8. 0xFF, which UTF-8 never contains, is the end of text."""

    vocab_size = 256
    eot = 0xFF

    def fingerprint(self) -> str:
        return fingerprint(tokenizer="byte")

    def fit(self, texts: Iterable[str], folder: Path) -> None:
        """Nothing to learn."""

    def load(self, folder: Path) -> None:
        """Nothing to read."""

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        # A model's vocabulary may be padded, so numbers past the bytes can be sampled: left out.
        return bytes(i for i in map(int, ids) if i < self.eot).decode("utf-8", errors="replace")


class _LibraryTokenizer:
    """What the tokenisers of the `tokenizers` library share: a tokenizer.json in the folder."""

    eot_token: str
    vocab_size: int
    eot: int

    def load(self, folder: Path) -> None:
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(Path(folder) / FILE))
        except Exception as error:  # the library raises a bare Exception for whatever is wrong
            raise damaged(folder) from error
        self._use(tokenizer)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([i for i in map(int, ids) if i != self.eot])

    def _save(self, tokenizer: tokenizers.Tokenizer, folder: Path) -> None:
        # Not by the library, whose error for a full disk is no OSError.
        (Path(folder) / FILE).write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
        self.load(folder)

    def _use(self, tokenizer: tokenizers.Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        # A document that spells out "<|endoftext|>" does not end there.
        tokenizer.encode_special_tokens = True
        eot = tokenizer.token_to_id(self.eot_token)
        if eot is None:
            special = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
            raise DataError(
                f"tokenizer.eot_token={self.eot_token!r} is not a token of this tokeniser; "
                f"its special tokens are {', '.join(special) or 'none'}"
            )
        self.eot = eot
        self.vocab_size = max(tokenizer.get_vocab().values()) + 1
        self._tokenizer = tokenizer


class BPETokenizer(_LibraryTokenizer):
    """Byte-level BPE trained on the corpus's own training split.

    vocab_size: tokens wanted, at least 257 (the bytes and the end of text); a small corpus may give
    fewer, and after `fit` or `load` the attribute holds what there is.
    """

    eot_token = EOT_TOKEN

    def __init__(self, vocab_size: int):
        self.wanted = vocab_size

    def fingerprint(self) -> str:
        if not isinstance(self.wanted, int) or self.wanted < 257:
            raise DataError(
                f"tokenizer.vocab_size={self.wanted!r} is too small for byte-level BPE; "
                "give an integer of at least 257 (the bytes and the end of text)"
            )
        return fingerprint(tokenizer="bpe", size=self.wanted, library=tokenizers.__version__)

    def fit(self, texts: Iterable[str], folder: Path) -> None:
        byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.pre_tokenizer = byte_level
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=self.wanted,
            special_tokens=[EOT_TOKEN],
            initial_alphabet=byte_level.alphabet(),
            show_progress=False,
        )
        _train(tokenizer, trainer, texts)
        self._save(tokenizer, folder)


class PretrainedTokenizer(_LibraryTokenizer):
    """A tokeniser somebody trained: the path of a tokenizer.json, or a name on the Hub.

    It is copied into the token cache, so later runs on the same corpus need no network.
    """

    def __init__(self, name: str | None, eot_token: str):
        self.name = name
        self.eot_token = eot_token

    def fingerprint(self) -> str:
        if not self.name:
            raise DataError(
                "tokenizer.name is not set; give the path of a tokenizer.json or a Hub name, "
                "e.g. tokenizer.name=gpt2"
            )
        path = self._path()
        try:
            content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
        except OSError as error:
            raise DataError(
                f"tokenizer.name={self.name!r} cannot be read ({error.strerror}); "
                "give a tokenizer.json you can read, or a Hub name"
            ) from error
        return fingerprint(
            tokenizer="pretrained", name=self.name, content=content, eot=self.eot_token
        )

    def fit(self, texts: Iterable[str], folder: Path) -> None:
        path = self._path()
        try:
            if path.is_file():
                tokenizer = tokenizers.Tokenizer.from_file(str(path))
            else:
                tokenizer = tokenizers.Tokenizer.from_pretrained(self.name)
        except Exception as error:  # the library raises a bare Exception for a malformed file
            raise DataError(
                f"tokenizer.name={self.name!r} is neither a readable tokenizer.json nor a name "
                f"that the Hub answers to: {first_line(error)}"
            ) from error
        self._save(tokenizer, folder)

    def _path(self) -> Path:
        return Path(self.name).expanduser()


class _Stopped(Exception):
    """Ends the library's reading of the texts."""


def _train(
    tokenizer: tokenizers.Tokenizer,
    trainer: tokenizers.trainers.Trainer,
    texts: Iterable[str],
) -> None:
    """`tokenizer.train_from_iterator` that Ctrl-C stops.

    Python handles signals in its main thread, which the library keeps until all is read and
    merged (it reads in threads of its own). So it works in another thread here. After an interrupt
    the reading ends with the next text. Merging cannot be ended: its thread, which touches nothing
    but its own tokeniser, is left behind and ends with the process.
    """
    stopped, finished = threading.Event(), threading.Event()
    errors = []

    def stoppable() -> Iterator[str]:
        for text in texts:
            if stopped.is_set():
                raise _Stopped
            yield text

    def work() -> None:
        try:
            tokenizer.train_from_iterator(stoppable(), trainer)
        except BaseException as error:
            errors.append(error)
        finally:
            finished.set()

    threading.Thread(target=work, name="tokenizer-training", daemon=True).start()
    try:
        finished.wait()  # not Thread.join, which after an interrupt takes the thread for ended
    except BaseException:
        stopped.set()
        # No thread may ask for the next text while Python shuts down.
        finished.wait(STOP_WAIT)
        raise
    if errors:
        raise errors[0]
