"""A made-up stream in which what comes next stood exactly `lag` tokens earlier, and nowhere else.

    ....qhbd........................?qhbd.......xxkq........................?xxkq...

Symbols are drawn independently and uniformly. `lag` tokens after a block of them, and behind a
marker, the block is repeated: there, and only there, the next symbol can be known, by who sees
`lag` tokens back. Whoever sees less is right once in `symbols` times, whatever it does. Gaps of
random length, as long as half a lag, keep blocks from any fixed place in a sequence.
"""

import string
from typing import TYPE_CHECKING

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from data.cache import fingerprint
from data.errors import DataError
from data.tokenizers import ByteTokenizer
from models.loss import IGNORE

if TYPE_CHECKING:
    from datasets import Dataset

FILLER, MARKER = ord("."), ord("?")
SYMBOLS = string.ascii_lowercase + string.ascii_uppercase + string.digits
FORMAT = 1  # of the stream; a new number makes every cache be built anew


class Recall:
    """The stream as a corpus of one document, a byte (a token) each symbol, filler and marker.

    lag: tokens from a symbol to its repetition; symbols: how many different ones there are, 2 to
    62; block: symbols repeated in a row, fewer than lag; n_tokens: length of the stream, its end
    is for validation; stream_seed: decides the stream. `fingerprint()`, `load()` and `check()`
    raise DataError for a setting or a tokeniser that makes no such stream.
    """

    name = "recall"

    def __init__(self, lag: int, symbols: int, block: int, n_tokens: int, stream_seed: int):
        self.lag = lag
        self.symbols = symbols
        self.block = block
        self.n_tokens = n_tokens
        self.stream_seed = stream_seed

    @property
    def chance(self) -> float:
        """The accuracy of the best guess without the lag."""
        return 1 / self.symbols

    def fingerprint(self) -> str:
        self._check()
        return fingerprint(
            corpus=self.name,
            format=FORMAT,
            lag=self.lag,
            symbols=self.symbols,
            block=self.block,
            n_tokens=self.n_tokens,
            stream_seed=self.stream_seed,
        )

    def load(self) -> "Dataset":
        from datasets import Dataset

        return Dataset.from_dict({"text": [self.stream().tobytes().decode("ascii")]})

    def check(self, tokenizer) -> None:
        """Raises DataError when a token is not a byte: the lag would be another one."""
        if not isinstance(tokenizer, ByteTokenizer):
            raise DataError(
                f"data=recall has one token for each byte, not those of {type(tokenizer).__name__};"
                " give tokenizer=byte"
            )

    def stream(self) -> np.ndarray:
        """The stream, uint8 [n_tokens]."""
        self._check()
        lag, block = self.lag, self.block
        rng = np.random.default_rng(self.stream_seed)
        n_blocks = -(-self.n_tokens // (lag + block))  # as many as fit if no gap has any length
        gaps = rng.integers(0, lag // 2 + 1, n_blocks)
        alphabet = np.frombuffer(SYMBOLS[: self.symbols].encode(), np.uint8)
        drawn = alphabet[rng.integers(0, self.symbols, (n_blocks, block))]

        ends = np.cumsum(gaps + lag + block)
        stream = np.full(ends[-1], FILLER, np.uint8)
        repeated = (ends - block)[:, None] + np.arange(block)  # [n_blocks, block]
        stream[repeated - lag] = drawn
        stream[repeated] = drawn
        stream[repeated[:, 0] - 1] = MARKER
        return stream[: self.n_tokens]

    def counted(self, tokens: Tensor) -> Tensor:
        """Which next tokens count for the accuracy of recall, bool [B, N], of tokens [B, N + 1].

        Repeated symbols whose marker is in the row and whose first occurrence is among its inputs.
        A row of fewer than `lag` inputs holds no such pair: there every repeated symbol counts.
        """
        n = tokens.shape[1] - 1
        marked = F.pad((tokens == MARKER).cumsum(1), (self.block + 1, 0))
        # Markers among the `block` tokens before each: counted up to it, less those farther back.
        near = marked[:, self.block :][:, : n + 1] - marked[:, : n + 1]
        repeated = (near > 0)[:, 1:]
        if n >= self.lag:
            repeated[:, : self.lag - 1] = False
        return repeated

    def targets(self, tokens: Tensor) -> Tensor:
        """What the loss is of, int64 [B, N], of tokens [B, N + 1]: IGNORE where nothing counts.

        Other tokens would only dilute the loss: most cannot be known. Of a row in which nothing
        counts the last one stays, so that no loss is that of nothing.
        """
        counted = self.counted(tokens)
        counted[:, -1] |= ~counted.any(1)
        return tokens[:, 1:].where(counted, IGNORE)

    def _check(self) -> None:
        for key, value, least, most in (
            ("lag", self.lag, 2, None),
            ("symbols", self.symbols, 2, len(SYMBOLS)),
            ("block", self.block, 1, self.lag - 1 if type(self.lag) is int else None),
            ("n_tokens", self.n_tokens, 1, None),
            ("stream_seed", self.stream_seed, 0, None),
        ):
            if type(value) is not int or value < least or (most is not None and value > most):
                accepted = f"from {least} to {most}" if most is not None else f"of at least {least}"
                below = " (less than data.lag)" if key == "block" else ""
                raise DataError(
                    f"data.{key}={value!r} is not accepted; give an integer {accepted}{below}"
                )
