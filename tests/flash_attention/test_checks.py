"""Every bad argument is refused with a message that names it, by every backend."""

import pytest
import torch

from flash_attention import (
    FlashAttentionV1,
    checks,
    flash_attention_v1,
    flash_attention_v2,
    naive_attention,
    sdpa_attention,
)

BACKENDS = [naive_attention, sdpa_attention, flash_attention_v1, flash_attention_v2]


def tensors(**changes):
    shapes = {"q": (2, 4, 8, 16), "k": (2, 2, 8, 16), "v": (2, 2, 8, 16), **changes}
    return {name: torch.zeros(shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("attention", BACKENDS)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (tensors(q=(4, 8, 16)), "q must be .batch, heads, N, D"),
        (tensors(k=(2, 2, 9, 16)), "k and v must have the same shape"),
        (tensors(k=(1, 2, 8, 16), v=(1, 2, 8, 16)), "same batch size"),
        (tensors(k=(2, 2, 8, 32), v=(2, 2, 8, 32)), "same head dim"),
        (tensors(k=(2, 3, 8, 16), v=(2, 3, 8, 16)), "must divide that of q; got 3 and 4"),
        (
            tensors(q=(1, 1, 8, 257), k=(1, 1, 8, 257), v=(1, 1, 8, 257)),
            "head dim must be 1 to 256; got 257",
        ),
        ({**tensors(), "k": torch.zeros(2, 2, 8, 16).half()}, "same dtype"),
        ({**tensors(), "dropout_p": 1.0}, "dropout_p must be in .0, 1.; got 1.0"),
        ({**tensors(), "dropout_p": -0.1}, "dropout_p must be"),
        ({**tensors(), "scale": float("nan")}, "scale must be between .* got nan"),
        ({**tensors(), "scale": float("-inf")}, "scale must be between .* got -inf"),
        ({**tensors(), "scale": 2.4e38}, r"scale must be between .* got 2\.4e\+38"),
        ({**tensors(), "segment_ids": torch.zeros(2, 7, dtype=torch.int64)}, r"\(2, 8\)"),
        (
            {**tensors(q=(2, 4, 9, 16)), "segment_ids": torch.zeros(2, 8, dtype=torch.int64)},
            "as many queries as keys; got 9 and 8",
        ),
    ],
)
def test_a_bad_value_is_named(attention, arguments, message):
    with pytest.raises(ValueError, match=message):
        attention(**arguments)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("attention", BACKENDS)
def test_the_largest_scale_computes(attention, sign):
    """Scores of 23 and 25.3, of q and k that are as small as the scale is large."""
    scale = sign * checks.MAX_SCALE
    q, k = torch.ones(1, 1, 1, 1) * 1e-19, torch.tensor([1e-18, 1.1e-18]).reshape(1, 1, 2, 1)
    v = torch.tensor([0.0, 1.0]).reshape(1, 1, 2, 1)
    weight = torch.sigmoid(torch.tensor(sign * 2.3))
    torch.testing.assert_close(attention(q, k, v, scale=scale), weight.reshape(1, 1, 1, 1))


@pytest.mark.parametrize("attention", BACKENDS)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({**tensors(), "q": [1.0]}, "q must be a tensor; got list"),
        ({**tensors(), "dropout_p": None}, "dropout_p must be a number; got None"),
        ({**tensors(), "scale": "x"}, "scale must be a number; got 'x'"),
        ({name: t.long() for name, t in tensors().items()}, "float16, bfloat16"),
        ({**tensors(), "segment_ids": torch.zeros(2, 8)}, "segment_ids must be a tensor of int"),
        ({**tensors(), "segment_ids": torch.zeros(2, 8, dtype=torch.uint16)}, "got torch.uint16"),
        ({**tensors(), "segment_ids": [[0] * 8] * 2}, "got list"),
    ],
)
def test_a_wrong_type_is_named(attention, arguments, message):
    with pytest.raises(TypeError, match=message):
        attention(**arguments)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"block_q": 100}, "block_q must be 16, 32, 64, 128 or 256; got 100"),
        ({"block_kv": 512}, "block_kv must be"),
        ({"block_q": 16.0}, "block_q must be 16, 32, 64, 128 or 256; got 16.0"),
    ],
)
def test_a_bad_block_size_is_named(flash, knobs, message):
    with pytest.raises(ValueError, match=message):
        flash(**tensors(), **knobs)
    with pytest.raises(ValueError, match=message):
        flash.module(**knobs)


def test_a_flag_that_is_neither_true_nor_false_is_named(flash):
    for name in ("causal", "deterministic"):
        with pytest.raises(TypeError, match=f"{name} must be True or False; got 'yes'"):
            flash(**tensors(), **{name: "yes"})
    with pytest.raises(TypeError, match="deterministic must be True or False; got None"):
        flash.module(deterministic=None)


@pytest.mark.parametrize("q_splits", [0, "many", True, 2**31, 10**30])
def test_a_bad_split_is_named(q_splits):
    with pytest.raises(ValueError, match="q_splits must be"):
        flash_attention_v1(**tensors(), q_splits=q_splits)
    with pytest.raises(ValueError, match="q_splits must be"):
        FlashAttentionV1(q_splits=q_splits)
