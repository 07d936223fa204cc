"""The spans that decide which blocks are skipped, against a count over all pairs."""

import pytest
import torch

from flash_attention import masks

N = 70
GENERATOR = torch.Generator().manual_seed(0)
IDS = {
    "one": torch.zeros(2, N, dtype=torch.int64),
    "packed": torch.stack([torch.arange(N) // 16, torch.arange(N) // 23]),
    "any order": torch.randint(-3, 3, (2, N), generator=GENERATOR),
    "int32": (torch.arange(N, dtype=torch.int32) // 10).expand(2, N).contiguous(),
    "returning": torch.tensor([7] * 20 + [-5] * 30 + [7] * 20).expand(2, N).contiguous(),
}


def blocks_of(ids: torch.Tensor, size: int):
    """Of each batch entry and block of keys: the rows whose id lies within the keys' range."""
    for b in range(ids.shape[0]):
        for c0 in range(0, N, size):
            keys = ids[b, c0 : c0 + size].tolist()
            yield keys, [r for r in range(N) if min(keys) <= ids[b, r] <= max(keys)]


@pytest.mark.parametrize("name", IDS)
@pytest.mark.parametrize("size", [16, 32, 128])
@pytest.mark.parametrize("where", ["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_spans_hold_every_row_that_may_see_a_key_and_know_single_segments(
    name, size, where, monkeypatch
):
    pytest.importorskip("triton")
    if where == "interpreter":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    from flash_attention import segments

    monkeypatch.setattr(segments, "CHUNK", 32)  # several turns
    ids = IDS[name].to("cuda" if where == "cuda" else "cpu")
    got = segments.spans(ids, size).flatten(0, 1).tolist()
    for (first, stop, one), (keys, rows) in zip(got, blocks_of(IDS[name], size), strict=True):
        assert (first, stop) == (rows[0], rows[-1] + 1)
        assert one == (len(set(keys)) == 1 and len(rows) == stop - first)


@pytest.mark.parametrize("name", IDS)
@pytest.mark.parametrize("size", [16, 32, 128])
def test_the_tiles_take_the_rows_of_all_batch_entries(name, size):
    rows = [rows for _, rows in blocks_of(IDS[name], size)]
    per_entry = len(rows) // 2
    for j, c0 in enumerate(range(0, N, size)):
        both = rows[j] + rows[j + per_entry]
        got = masks.rows_of_segments(IDS[name], c0, min(c0 + size, N))
        assert got == (min(both), max(both) + 1)
