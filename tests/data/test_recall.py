"""The recall stream: what can be known, by whom, and what counts."""

import numpy as np
import pytest
import torch

from data.errors import DataError
from data.recall import FILLER, MARKER, Recall
from data.tokenizers import BPETokenizer
from models.loss import IGNORE

LAG, SYMBOLS, BLOCK = 24, 4, 5


def recall(**changes):
    settings = dict(lag=LAG, symbols=SYMBOLS, block=BLOCK, n_tokens=60_000, stream_seed=0)
    return Recall(**(settings | changes))


def rows(corpus, n):
    """The stream cut as PackedSequences cuts it, int64 [B, n + 1]."""
    stream = torch.from_numpy(corpus.stream().astype(np.int64))
    starts = range(0, len(stream) - n, n)
    return torch.stack([stream[start : start + n + 1] for start in starts])


def accuracy(predicted, tokens, corpus):
    counted = corpus.counted(tokens)
    return (predicted == tokens[:, 1:])[counted].float().mean().item()


def test_every_repeated_symbol_stood_lag_tokens_before():
    stream = recall().stream().tobytes()
    n_repeated = 0
    for at in range(len(stream) - BLOCK):
        if stream[at] == MARKER:
            block = stream[at + 1 : at + 1 + BLOCK]
            assert block == stream[at + 1 - LAG : at + 1 - LAG + BLOCK]
            assert all(ord("a") <= symbol < ord("a") + SYMBOLS for symbol in block)
            n_repeated += BLOCK
    assert n_repeated > 5000
    symbols = len(stream) - stream.count(FILLER) - stream.count(MARKER)
    assert abs(symbols - 2 * n_repeated) <= 2 * BLOCK  # each is there twice; the end may be cut


def test_who_looks_back_the_lag_is_always_right():
    corpus = recall()
    tokens = rows(corpus, 2 * LAG)
    # Predicts next what stands lag - 1 tokens before the current one.
    predicted = tokens[:, :-1].roll(LAG - 1, dims=1)
    assert accuracy(predicted, tokens, corpus) == 1.0


@pytest.mark.parametrize("offset", [1, 2, BLOCK, LAG - 1, LAG + 1, LAG + BLOCK])
def test_who_looks_back_another_distance_is_right_by_chance(offset):
    corpus = recall()
    tokens = rows(corpus, 3 * LAG)
    predicted = tokens[:, :-1].roll(offset - 1, dims=1)
    # Where no symbol stands it is never right: no better than chance in any case.
    assert accuracy(predicted, tokens, corpus) < corpus.chance + 0.03


def test_a_table_of_all_that_a_short_context_shows_stays_at_chance():
    """The best predictor from the last 3 tokens and the place in the row, counted over a half of
    the stream, on the other half."""
    corpus = recall(n_tokens=400_000)
    n = LAG - 1
    tokens = rows(corpus, n)
    counted = corpus.counted(tokens)
    row, at = counted.nonzero(as_tuple=True)
    context = torch.stack([tokens[row, (at - back).clamp(min=0)] for back in (0, 1, 2)] + [at])
    answers = tokens[row, at + 1]
    half = len(answers) // 2
    table: dict[tuple, np.ndarray] = {}
    for seen, answer in zip(context.T[:half].tolist(), answers[:half].tolist(), strict=True):
        table.setdefault(tuple(seen), np.zeros(256, int))[answer] += 1
    right = [
        int(table[tuple(seen)].argmax() == answer) if tuple(seen) in table else 0
        for seen, answer in zip(context.T[half:].tolist(), answers[half:].tolist(), strict=True)
    ]
    assert len(right) > 20_000
    error = (0.25 * 0.75 / len(right)) ** 0.5
    assert np.mean(right) == pytest.approx(corpus.chance, abs=5 * error)


def test_symbols_are_uniform_and_independent_of_the_one_before():
    stream = recall(symbols=4, n_tokens=400_000).stream()
    first = np.flatnonzero(stream == MARKER)
    first = first[first < len(stream) - BLOCK]
    blocks = stream[first[:, None] + 1 + np.arange(BLOCK)] - ord("a")
    pairs = np.zeros((4, 4))
    np.add.at(pairs, (blocks[:, :-1].ravel(), blocks[:, 1:].ravel()), 1)
    expected = pairs.sum() / 16
    chi2 = ((pairs - expected) ** 2 / expected).sum()
    assert chi2 < 45  # 15 degrees of freedom: 1 in 10,000


def test_blocks_stand_anywhere_in_a_sequence():
    n = 2 * LAG
    markers = rows(recall(n_tokens=400_000), n)[:, :n] == MARKER
    counts = markers.sum(0).double()
    expected = counts.mean()
    chi2 = ((counts - expected) ** 2 / expected).sum().item()
    assert chi2 < 110  # 47 degrees of freedom and rows that are not independent


def test_what_counts_has_its_marker_and_its_first_occurrence_in_the_row():
    corpus = recall()
    for n in (LAG - 1, LAG, LAG + 3, 3 * LAG):
        tokens = rows(corpus, n)[:200]
        counted = corpus.counted(tokens)
        for row, marks in zip(tokens.tolist(), counted.tolist(), strict=True):
            for t in range(1, n + 1):
                repeated = MARKER in row[max(0, t - BLOCK) : t]
                visible = t >= LAG or n < LAG
                assert marks[t - 1] == (repeated and visible)
        assert counted.any()


def test_the_loss_is_of_what_counts_or_else_of_the_last_token():
    corpus = recall()
    tokens = rows(corpus, 40)
    n_empty = 0
    for row, targets, counted in zip(
        tokens, corpus.targets(tokens), corpus.counted(tokens), strict=True
    ):
        if not counted.any():
            n_empty += 1
            counted[-1] = True
        assert targets[counted].tolist() == row[1:][counted].tolist()
        assert (targets[~counted] == IGNORE).all()
    assert 0 < n_empty < len(tokens)


def test_the_stream_is_decided_by_its_settings():
    assert (recall().stream() == recall().stream()).all()
    assert (recall().stream() != recall(stream_seed=1).stream()).any()
    changes = [{}, {"lag": 25}, {"symbols": 5}, {"block": 6}, {"n_tokens": 9}, {"stream_seed": 1}]
    assert len({recall(**change).fingerprint() for change in changes}) == len(changes)


def test_the_stream_has_its_length():
    assert [len(recall(n_tokens=n).stream()) for n in (1, 1000, 12345)] == [1, 1000, 12345]


def test_training_and_validation_are_two_parts_of_one_stream(recall_data):
    data = recall_data(n_tokens=20_000, val_fraction=0.25)
    train, val = (
        np.fromfile(data._folder / f"{name}.bin", "uint16")[:-1] for name in ("train", "val")
    )
    assert len(val) == 5_000
    assert (np.concatenate([train, val]) == recall(n_tokens=20_000).stream()).all()


def test_batches_hold_the_targets_that_count(recall_data):
    data = recall_data()
    for loader in (data.train_dataloader(), data.val_dataloader()):
        batch = next(iter(loader))
        assert batch["targets"].shape == (2, 2 * LAG)
        assert torch.equal(batch["targets"], recall().targets(batch["tokens"]))


def test_loader_processes_give_the_same_targets(recall_data):
    first = [next(iter(recall_data(num_workers=n).train_dataloader())) for n in (0, 1)]
    assert torch.equal(first[0]["targets"], first[1]["targets"])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"lag": 1}, r"data\.lag=1 is not accepted; give an integer of at least 2$"),
        ({"lag": "long"}, r"data\.lag='long' "),
        ({"symbols": 1}, r"data\.symbols=1 .* from 2 to 62$"),
        ({"symbols": 63}, r"data\.symbols=63 .* from 2 to 62$"),
        ({"block": 0}, r"data\.block=0 "),
        ({"block": LAG}, r"data\.block=24 .* from 1 to 23 \(less than data\.lag\)$"),
        ({"n_tokens": 0}, r"data\.n_tokens=0 "),
        ({"stream_seed": -1}, r"data\.stream_seed=-1 .* at least 0$"),
        ({"tokenizer": BPETokenizer(300)}, r"not those of BPETokenizer; give tokenizer=byte$"),
    ],
)
def test_bad_settings_are_named(recall_data, changes, says):
    with pytest.raises(DataError, match=says):
        recall_data(**changes)


def test_the_most_symbols_and_the_longest_block_are_accepted(recall_data):
    recall_data(symbols=62, block=LAG - 1)
