"""The dropout mask: Philox by its published answers, the dropped fraction, any tiling."""

import pytest
import torch

from flash_attention import dropout


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # Random123's known answers for philox4x32-10
        (
            (0, 0, 0, 0),
            (0, 0),
            (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
        ),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_its_published_answers(counter, key, words):
    seed = key[0] | key[1] << 32
    seed = torch.tensor([seed - 2**64 if seed >= 2**63 else seed])
    got = dropout.philox(seed, *(torch.tensor([c]) for c in counter))
    assert tuple(int(word) for word in got) == words


@pytest.mark.parametrize("p", [0.1, 0.17, 0.5, 0.9])
def test_the_dropped_fraction_is_p(p):
    seed = torch.tensor([1234567])
    keep = dropout.keep_mask(
        seed, p, torch.arange(4).view(4, 1, 1), torch.arange(300)[:, None], 0, 300
    )
    assert abs(1 - keep.double().mean().item() - p) < 0.01
    for axis in (0, 1, 2):  # no head, row or column repeats its neighbour
        a, b = keep.narrow(axis, 0, 1), keep.narrow(axis, 1, 1)
        assert not torch.equal(a, b)


def test_a_tile_holds_what_the_whole_holds_there():
    seed, head = torch.tensor([99]), torch.tensor(3)
    whole = dropout.keep_mask(seed, 0.4, head, torch.arange(50)[:, None], 0, 70)
    tile = dropout.keep_mask(seed, 0.4, head, torch.arange(20, 30)[:, None], 7, 33)
    assert torch.equal(tile, whole[20:30, 7:33])


@pytest.mark.parametrize("p", [0.1, 1 / 3, 1e-4, 0.9999999])
def test_what_is_kept_is_scaled_so_that_nothing_is_lost_on_average(p):
    """By the share of the 65,536 equally likely draws that keep an entry."""
    kept = sum(bits >= dropout.threshold(p) for bits in range(2**16)) / 2**16
    assert kept > 0
    assert abs(kept * dropout.keep_scale(p) - 1) < 1e-12
    assert abs(kept - (1 - p)) <= 2**-16


def test_the_eight_columns_of_a_counter_are_independent():
    seed, head, rows = torch.tensor([5]), torch.tensor(0), torch.arange(4000)[:, None]
    keep = dropout.keep_mask(seed, 0.5, head, rows, 0, 16).double()
    correlation = torch.corrcoef(keep.T) - torch.eye(16)
    assert correlation.abs().max() < 0.08  # five standard deviations of chance


def test_the_seed_follows_torch_manual_seed():
    torch.manual_seed(0)
    first = dropout.draw_seed(torch.device("cpu"))
    second = dropout.draw_seed(torch.device("cpu"))
    torch.manual_seed(0)
    assert torch.equal(first, dropout.draw_seed(torch.device("cpu")))
    assert not torch.equal(first, second)
