import math

import pytest
import torch

from flash_attention import FlashAttentionV1, FlashAttentionV2, NaiveAttention
from models.attention import CausalSelfAttention, apply_rotary, rotary_tables
from models.loss import cross_entropy


def rotate_constant(vector, n, base=10000.0):
    """``vector`` [D] placed at each of n positions and rotated: [n, D]."""
    cos, sin = rotary_tables(n, vector.numel(), base)
    return apply_rotary(vector.expand(1, n, 1, -1), cos, sin)[0, :, 0]


def test_rotary_scores_depend_on_the_distance_only():
    q, k = torch.randn(2, 16, generator=torch.Generator().manual_seed(0))
    scores = rotate_constant(q, 40) @ rotate_constant(k, 40).T  # [40, 40]
    torch.testing.assert_close(scores[1:, 1:], scores[:-1, :-1], atol=1e-4, rtol=0)
    assert (scores[0] - scores[0, 0]).abs().max() > 0.5  # and they do depend on it


def test_rotary_keeps_the_norm():
    x = torch.randn(2, 50, 3, 8, generator=torch.Generator().manual_seed(0))
    rotated = apply_rotary(x, *rotary_tables(64, 8))
    torch.testing.assert_close(rotated.norm(dim=-1), x.norm(dim=-1))


def test_rotary_is_multiplication_by_a_unit_complex_number():
    x = torch.randn(8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    got = rotate_constant(x, 30, base=100.0)
    for position in range(30):
        for i in range(4):
            z = complex(x[i], x[i + 4]) * complex(
                math.cos(position * 100.0 ** (-i / 4)), math.sin(position * 100.0 ** (-i / 4))
            )
            assert got[position, i].item() == pytest.approx(z.real, abs=1e-6)
            assert got[position, i + 4].item() == pytest.approx(z.imag, abs=1e-6)


def test_rotary_angles_stay_exact_at_a_million_tokens():
    cos, _ = rotary_tables(1_000_001, 4)
    assert cos[1_000_000, 1].item() == pytest.approx(math.cos(1e6 * 10000.0**-0.5), abs=1e-6)
    assert cos[999_999, 0].item() == pytest.approx(math.cos(999_999), abs=1e-6)


def test_rotary_keeps_a_half_precision_dtype():
    x = torch.randn(1, 4, 2, 8).bfloat16()
    assert apply_rotary(x, *rotary_tables(4, 8)).dtype == torch.bfloat16


@pytest.mark.parametrize("positions", ["rotary", "learned"])
@pytest.mark.parametrize("n_kv_head", [4, 2])
def test_the_kernel_holds_no_more_memory_than_q_k_v(make_gpt, tokens, spy, positions, n_kv_head):
    make_gpt(positions=positions, n_kv_head=n_kv_head, attention=spy)(tokens)
    storages = [spy.calls[0][name].untyped_storage() for name in "qkv"]
    kept = {storage.data_ptr(): storage.nbytes() for storage in storages}
    assert sum(kept.values()) == 4 * tokens.numel() * (4 + 2 * n_kv_head) * 8  # float32


def test_learned_positions_pass_views_of_the_projection(make_gpt, tokens, spy):
    make_gpt(positions="learned", attention=spy)(tokens)
    call = spy.calls[0]
    assert len({call[name].untyped_storage().data_ptr() for name in "qkv"}) == 1


def test_the_kernel_is_called_causally_with_head_shapes(make_gpt, tokens, spy):
    make_gpt(n_kv_head=2, attention=spy)(tokens)
    assert [call["causal"] for call in spy.calls] == [True, True]  # one call per layer
    assert spy.calls[0]["q"].shape == (3, 4, 16, 8)
    assert spy.calls[0]["k"].shape == spy.calls[0]["v"].shape == (3, 2, 16, 8)


def test_values_are_not_rotated(make_gpt, spy):
    layer = make_gpt(positions="rotary", attention=spy).blocks[0].attention
    x = torch.randn(1, 16, 32)
    layer(x)
    layer(x, rotary_tables(16, 8))
    plain, rotated = spy.calls
    assert torch.equal(plain["v"], rotated["v"])
    assert not torch.allclose(plain["q"][:, :, 1:], rotated["q"][:, :, 1:])
    assert not torch.allclose(plain["k"][:, :, 1:], rotated["k"][:, :, 1:])


def test_a_permutation_of_earlier_tokens_matters_with_rotary_only():
    torch.manual_seed(0)
    layer = CausalSelfAttention(width=32, n_head=4, n_kv_head=4, attention=NaiveAttention())
    x = torch.randn(1, 6, 32)
    swapped = x[:, [1, 0, 2, 3, 4, 5]]
    torch.testing.assert_close(layer(x)[:, -1], layer(swapped)[:, -1])
    tables = rotary_tables(6, 8)
    assert not torch.allclose(layer(x, tables)[:, -1], layer(swapped, tables)[:, -1], atol=1e-4)


def test_grouped_heads_equal_full_heads_with_repeated_keys_and_values(make_gpt, tokens):
    grouped = make_gpt(n_kv_head=2)
    full = make_gpt(n_kv_head=4)
    state = grouped.state_dict()
    for name, value in state.items():
        if ".qkv." in name:
            q, k, v = value.split((32, 16, 16))  # rows: 4 query, 2 key, 2 value heads of 8
            repeat = [part.unflatten(0, (2, 8)).repeat_interleave(2, 0) for part in (k, v)]
            state[name] = torch.cat((q, *(part.flatten(0, 1) for part in repeat)))
    full.load_state_dict(state)
    torch.testing.assert_close(full(tokens), grouped(tokens))


def test_attention_dropout_reaches_the_kernel_in_training_only(make_gpt, tokens, spy):
    model = make_gpt(dropout=0.3, attention=spy)
    model.train()(tokens)
    model.eval()(tokens)
    assert [call["dropout_p"] for call in spy.calls] == [0.3, 0.3, 0.0, 0.0]


@pytest.mark.parametrize("backend", [NaiveAttention, FlashAttentionV1, FlashAttentionV2])
@pytest.mark.parametrize("n_kv_head", [4, 2])
def test_a_checkpoint_computes_the_same_with_another_backend(make_gpt, tokens, backend, n_kv_head):
    reference = make_gpt(n_kv_head=n_kv_head)
    other = make_gpt(seed=1, n_kv_head=n_kv_head, attention=backend())
    other.load_state_dict(reference.state_dict())
    losses = [cross_entropy(model(tokens), tokens) for model in (reference, other)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    for expected, got in zip(reference.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(got.grad, expected.grad, atol=1e-5, rtol=1e-4)
