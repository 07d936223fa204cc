import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel

from flash_attention import FlashAttentionV1, NaiveAttention, SDPAttention
from models.gpt import GPT
from models.loss import ChunkedLoss, FullLoss, cross_entropy
from tests.models.live_bytes import LiveBytes

# our name -> transformers' name, and whether it is a Conv1D weight (stored [in, out])
OUTER = {
    "token_embedding.weight": "transformer.wte.weight",
    "position_embedding.weight": "transformer.wpe.weight",
    "norm.weight": "transformer.ln_f.weight",
    "norm.bias": "transformer.ln_f.bias",
}
INNER = {
    "norm_attention": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.proj": "attn.c_proj",
    "norm_mlp": "ln_2",
    "mlp.fc": "mlp.c_fc",
    "mlp.proj": "mlp.c_proj",
}


def gpt2_tensors(n_layer):
    """(our name, transformers' name, transposed) of every parameter."""
    yield from ((ours, theirs, False) for ours, theirs in OUTER.items())
    for layer in range(n_layer):
        for ours, theirs in INNER.items():
            for kind in ("weight", "bias"):
                transposed = kind == "weight" and "norm" not in ours
                yield (
                    f"blocks.{layer}.{ours}.{kind}",
                    f"transformer.h.{layer}.{theirs}.{kind}",
                    transposed,
                )


@pytest.fixture
def ours_and_gpt2(make_gpt):
    """Our GPT and transformers' GPT-2 with the same weights."""
    ours = make_gpt(positions="learned")
    config = GPT2Config(
        vocab_size=61, n_positions=16, n_embd=32, n_layer=2, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="eager",
    )  # fmt: skip
    gpt2 = GPT2LMHeadModel(config)
    params = dict(ours.named_parameters())
    names = list(gpt2_tensors(2))
    assert {name for name, _, _ in names} == params.keys()
    assert {name for _, name, _ in names} == {name for name, _ in gpt2.named_parameters()}
    with torch.no_grad():
        for our_name, name, transposed in names:
            weight = params[our_name]
            gpt2.get_parameter(name).copy_(weight.T if transposed else weight)
    return ours, gpt2


def test_logits_equal_those_of_transformers_gpt2(ours_and_gpt2, tokens):
    ours, gpt2 = ours_and_gpt2
    logits = ours(tokens)
    assert logits.std() > 0.1  # not a comparison of zeros
    torch.testing.assert_close(logits, gpt2(tokens).logits, atol=1e-4, rtol=0)


def test_loss_and_its_gradients_equal_those_of_transformers_gpt2(ours_and_gpt2, tokens):
    ours, gpt2 = ours_and_gpt2
    loss = cross_entropy(ours(tokens[:, :-1]), tokens[:, 1:])
    loss.backward()
    expected = gpt2(tokens, labels=tokens).loss
    expected.backward()
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=0)
    for our_name, name, transposed in gpt2_tensors(2):
        grad = gpt2.get_parameter(name).grad
        got = ours.get_parameter(our_name).grad
        torch.testing.assert_close(got, grad.T if transposed else grad, atol=1e-5, rtol=1e-4)


# Counted from the released checkpoints.
PUBLISHED = {
    "small": (12, 12, 768, 124_439_808),
    "medium": (24, 16, 1024, 354_823_168),
    "large": (36, 20, 1280, 774_030_080),
    "xl": (48, 25, 1600, 1_557_611_200),
}


@pytest.mark.parametrize("size", PUBLISHED)
def test_gpt2_sizes_have_the_published_number_of_parameters(size):
    n_layer, n_head, width, expected = PUBLISHED[size]
    with torch.device("meta"):
        model = GPT(
            vocab_size=50257, seq_len=1024, n_layer=n_layer, n_head=n_head, width=width,
            positions="learned", attention=SDPAttention(),
        )  # fmt: skip
    assert model.n_params() == expected


def test_bias_false_leaves_no_bias(make_gpt, tokens):
    model = make_gpt(bias=False)
    assert not [name for name, _ in model.named_parameters() if "bias" in name]
    assert model(tokens).shape == (3, 16, 61)


@pytest.mark.parametrize("positions", ["rotary", "learned"])
@pytest.mark.parametrize("attention", [NaiveAttention(), SDPAttention()], ids=["naive", "sdpa"])
def test_a_later_token_does_not_change_earlier_logits(make_gpt, tokens, positions, attention):
    model = make_gpt(positions=positions, attention=attention).eval()
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 61
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:], atol=1e-3)


def test_rope_base_sets_the_frequencies(make_gpt, tokens):
    model = make_gpt(rope_base=100.0)
    # Head size 8: pair 2 turns by 100 ** (-2 * 2 / 8) = 0.1 radians a token.
    assert model.rotary_cos[7, 2].item() == pytest.approx(math.cos(0.7))
    assert not torch.allclose(model(tokens), make_gpt(rope_base=10.0)(tokens), atol=1e-3)


def test_initial_weights_are_gpt2s():
    torch.manual_seed(0)
    model = GPT(
        vocab_size=512, seq_len=256, n_layer=8, n_head=4, width=128, positions="learned",
        attention=SDPAttention(),
    )  # fmt: skip
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            assert torch.equal(p, torch.zeros_like(p)), name
        elif "norm" in name:
            assert torch.equal(p, torch.ones_like(p)), name
        else:
            std = 0.02 / math.sqrt(16) if name.endswith("proj.weight") else 0.02
            assert p.std().item() == pytest.approx(std, rel=0.05), name
            assert abs(p.mean().item()) < 0.1 * std, name


def test_the_untrained_loss_is_that_of_a_uniform_guess(tokens):
    torch.manual_seed(0)
    model = GPT(vocab_size=61, seq_len=16, n_layer=2, n_head=4, width=32, attention=SDPAttention())
    loss = cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])
    assert loss.item() == pytest.approx(math.log(61), abs=0.1)


def test_dropout_is_off_in_eval_and_draws_no_random_number(make_gpt, tokens):
    model = make_gpt(dropout=0.5).eval()
    torch.manual_seed(3)
    untouched = torch.get_rng_state()
    logits = model(tokens)
    assert torch.equal(torch.get_rng_state(), untouched)
    assert torch.equal(logits, make_gpt(dropout=0.0)(tokens))


def test_dropout_in_training_follows_the_seed(make_gpt, tokens):
    model = make_gpt(dropout=0.5).train()
    runs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        runs.append(model(tokens))
    assert torch.equal(runs[0], runs[1])
    assert not torch.allclose(runs[0], runs[2], atol=1e-3)


def test_dropout_falls_on_embeddings_and_both_branches(make_gpt, tokens):
    model = make_gpt(dropout=0.5).train()
    calls = []
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(lambda m, args, out: calls.append((args[0] != out).any()))
    model(tokens)
    assert len(calls) == 1 + 2 * 2  # embeddings; two branches in each of two layers
    assert all(calls)


def test_a_row_longer_than_seq_len_is_refused(make_gpt):
    with pytest.raises(ValueError, match=r"idx has 17 tokens.*seq_len is 16"):
        make_gpt()(torch.zeros(1, 17, dtype=torch.long))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"width": 30}, ValueError, "width=30 must be a multiple of n_head=4"),
        ({"n_kv_head": 3}, ValueError, "n_head=4 must be a multiple of n_kv_head=3"),
        ({"n_kv_head": 0}, ValueError, "n_kv_head=0 must be a whole number, at least 1"),
        ({"width": 12}, ValueError, "positions='rotary' needs an even head size.*gives 3"),
        ({"positions": "alibi"}, ValueError, "positions='alibi' must be 'rotary' or 'learned'"),
        ({"n_layer": 0}, ValueError, "n_layer=0 must be a whole number, at least 1"),
        ({"seq_len": 1.5}, TypeError, "seq_len=1.5 must be a whole number"),
        ({"n_layer": True}, TypeError, "n_layer=True must be a whole number"),
        ({"vocab_size": None}, TypeError, "vocab_size=None must be a whole number"),
        ({"dropout": 1.0}, ValueError, "dropout=1.0 must be a number, at least 0 and below 1"),
        ({"dropout": math.nan}, ValueError, "dropout=nan must be a number"),
        ({"rope_base": 0}, ValueError, "rope_base=0 must be a number, above 0"),
        ({"attention": nn.Identity()}, TypeError, "attention is a Identity"),
        ({"activation_checkpointing": "all"}, ValueError, "='all' must be 'none' or 'block'"),
        ({"activation_checkpointing": None}, ValueError, "=None must be 'none' or 'block'"),
        ({"offload_checkpoints": 1}, TypeError, "offload_checkpoints=1 must be True or False"),
        ({"offload_checkpoints": True}, ValueError, "needs activation_checkpointing='block'"),
    ],
)
def test_bad_settings_are_refused_by_name(make_gpt, changes, error, message):
    with pytest.raises(error, match=message):
        make_gpt(**changes)


@pytest.mark.parametrize("backend", [NaiveAttention, SDPAttention, FlashAttentionV1])
@pytest.mark.parametrize(
    "changes",
    [{}, {"dropout": 0.4}, {"positions": "learned", "n_kv_head": 2, "dropout": 0.1, "bias": False}],
)
def test_checkpointing_changes_neither_the_loss_nor_a_gradient(make_gpt, tokens, backend, changes):
    results = []
    for checkpointing in ("none", "block"):
        model = make_gpt(
            attention=backend(), n_layer=3, activation_checkpointing=checkpointing, **changes
        )
        torch.manual_seed(5)
        loss = cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        results.append([loss, *(p.grad for p in model.parameters()), torch.get_rng_state()])
    assert all(map(torch.equal, *results))


def test_checkpointing_runs_each_block_again_in_backward(make_gpt, tokens, spy):
    model = make_gpt(attention=spy, activation_checkpointing="block")
    loss = model(tokens).sum()
    assert len(spy.calls) == 2
    loss.backward()
    assert len(spy.calls) == 4
    # The last block first, with the inputs it had.
    for again, first in ((2, 1), (3, 0)):
        assert torch.equal(spy.calls[again]["q"], spy.calls[first]["q"])
    with torch.no_grad():
        model(tokens)
    assert len(spy.calls) == 6


def peak_bytes(loss_fn, n, **changes):
    """Peak of one bfloat16 step on a sequence of n tokens, without the parameters."""
    settings = {"vocab_size": 500, "seq_len": n, "n_layer": 2, "n_head": 4, "width": 64}
    with FakeTensorMode():
        model = GPT(**(settings | changes), attention=FlashAttentionV1())
        tokens = torch.zeros(1, n + 1, dtype=torch.int64)
        with LiveBytes() as memory:
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_fn(model, tokens)
            loss.backward()
    return memory.peak


def peak_per_token(loss_fn, **changes):
    """Bytes that a token adds to the peak."""
    n = 2**11  # long enough for what is linear in N to decide where the peak is
    return (peak_bytes(loss_fn, 2 * n, **changes) - peak_bytes(loss_fn, n, **changes)) / n


def test_peak_memory_per_token_is_what_the_formula_says():
    d, h = 64, 4
    two, three, two_checkpointed, three_checkpointed = (
        peak_per_token(ChunkedLoss(256), n_layer=n, activation_checkpointing=checkpointing)
        for checkpointing in ("none", "block")
        for n in (2, 3)
    )
    assert three - two == 36 * d + 8 * h + 16  # 8 h: m and l of the V1 kernel
    assert three_checkpointed - two_checkpointed == 4 * d
    # The inputs of both blocks, and 46 d of one that runs again: what it saves, its output and the
    # gradients on their way.
    assert two_checkpointed <= 2 * 4 * d + 46 * d + 8 * h + 32
    # The logits of all tokens cost more than all that: 2 bytes each in bfloat16, and in float32
    # they, their log-softmax and its gradient.
    assert peak_per_token(FullLoss(), activation_checkpointing="block") > 12 * 500


def counted_flops(model, tokens):
    """(matrix products of linear layers, those of attention), forward and backward."""
    with FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    by_op = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    batched = sum(flops for op, flops in by_op.items() if "bmm" in op)
    return sum(by_op.values()) - batched, batched


@pytest.mark.parametrize("changes", [{}, {"n_kv_head": 2, "mlp_ratio": 3, "n_layer": 3}])
def test_flops_are_those_counted_with_half_of_the_attention(make_gpt, tokens, changes):
    model = make_gpt(attention=NaiveAttention(), **changes)
    linear, attention = counted_flops(model, tokens)
    assert attention > 0
    got = model.flops_per_token(16) * tokens.numel()
    assert got == linear + attention / 2


def test_generate_repeats_under_a_generator(make_gpt, tokens):
    model = make_gpt()

    def run(seed):
        generator = torch.Generator().manual_seed(seed)
        return model.generate(tokens, 20, temperature=1.0, top_k=None, generator=generator)

    assert torch.equal(run(0), run(0))
    assert not torch.equal(run(0), run(1))


def test_generate_ignores_dropout_and_the_global_seed(make_gpt, tokens):
    model = make_gpt(dropout=0.5).train()
    runs = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        generator = torch.Generator().manual_seed(7)
        runs.append(model.generate(tokens, 8, temperature=1.0, top_k=5, generator=generator))
    assert torch.equal(*runs)


def test_generate_keeps_the_prompt_and_goes_past_seq_len(make_gpt, tokens):
    out = make_gpt().generate(tokens, 20, temperature=0)
    assert out.shape == (3, 36)
    assert torch.equal(out[:, :16], tokens)


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_generate_at_temperature_zero_takes_the_best_token_of_the_last_window(
    make_gpt, tokens, positions
):
    model = make_gpt(positions=positions, noise=0.3)
    out = model.generate(tokens, 6, temperature=0)
    for end in range(16, 22):
        best = model(out[:, end - 16 : end])[:, -1].argmax(dim=-1)
        assert torch.equal(out[:, end], best)


def test_generate_draws_from_the_softmax_of_the_top_k_at_the_temperature(make_gpt):
    model = make_gpt(noise=0.3)
    prompt = torch.tensor([[5, 9]])
    out = model.generate(
        prompt.expand(20_000, 2), 1, temperature=2.0, top_k=3,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    logits = model(prompt)[0, -1] / 2.0
    probs = torch.where(logits >= logits.sort().values[-3], logits.exp(), 0.0)
    drawn = torch.bincount(out[:, -1], minlength=61) / 20_000
    torch.testing.assert_close(drawn, probs / probs.sum(), atol=0.015, rtol=0)


@pytest.mark.parametrize("training", [True, False])
def test_generate_restores_the_mode(make_gpt, tokens, training):
    model = make_gpt().train(training)
    model.generate(tokens, 1)
    assert {module.training for module in model.modules()} == {training}


def test_generate_restores_the_mode_after_an_error(make_gpt, tokens):
    model = make_gpt().train()
    with pytest.raises(IndexError):
        model.generate(torch.full((1, 2), 1000), 1)
    assert model.training


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens=-1 must be a whole number, at least 0"),
        ({"temperature": -1.0}, "temperature=-1.0 must be a number, at least 0"),
        ({"top_k": 0}, "top_k=0 must be a whole number, at least 1"),
        ({"idx": torch.zeros(1, 0, dtype=torch.long)}, "idx has no token"),
    ],
)
def test_generate_refuses_bad_arguments_by_name(make_gpt, tokens, kwargs, message):
    with pytest.raises(ValueError, match=message):
        make_gpt().generate(**({"idx": tokens, "max_new_tokens": 1} | kwargs))


def test_the_head_makes_logits_of_the_features(make_gpt, tokens):
    model = make_gpt()
    features = model(tokens, head=False)
    assert features.shape == (3, 16, 32)
    torch.testing.assert_close(features @ model.head_weight.T, model(tokens))


def test_half_precision_autocast_stays_close(make_gpt, tokens):
    model = make_gpt()
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens)
    assert logits.dtype == torch.bfloat16
    expected = F.log_softmax(model(tokens), dim=-1)
    torch.testing.assert_close(
        F.log_softmax(logits.float(), dim=-1), expected, atol=0.05, rtol=0.02
    )
