"""Models of Hugging Face transformers with our attention, against the same models with eager's."""

import importlib
import sys
import types

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", "5.4")

import transformers

from flash_attention import naive_attention
from flash_attention.transformers import BOTH_WAYS, attend, mask

SIZES = dict(  # of most models: as these call them
    vocab_size=50,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=64,
)
LLAMA = SIZES | dict(
    num_attention_heads=4,
    num_key_value_heads=2,
    pad_token_id=0,
    bos_token_id=None,
    eos_token_id=None,
)
GPT2 = dict(
    vocab_size=50,
    n_positions=64,
    n_embd=32,
    n_layer=2,
    n_head=2,
    attn_pdrop=0.0,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    pad_token_id=0,
    bos_token_id=None,
    eos_token_id=None,
)
BERT = SIZES | dict(
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
BART = dict(
    vocab_size=50,
    d_model=32,
    encoder_layers=1,
    decoder_layers=1,
    encoder_attention_heads=2,
    decoder_attention_heads=2,
    encoder_ffn_dim=48,
    decoder_ffn_dim=48,
    max_position_embeddings=64,
    dropout=0.0,
)
MODERNBERT = SIZES | dict(pad_token_id=0)  # the second layer has a window
SPLINTER = BERT | dict(type_vocab_size=2)
VISION = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    patch_size=4,
    crop_size=16,
    feature_layer=-1,
)
KINDS = {
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig, LLAMA),
    "gpt2": (transformers.GPT2LMHeadModel, transformers.GPT2Config, GPT2),
    "bert": (transformers.BertForMaskedLM, transformers.BertConfig, BERT),
    "bart": (transformers.BartForConditionalGeneration, transformers.BartConfig, BART),
    "mistral": (transformers.MistralForCausalLM, transformers.MistralConfig, LLAMA),
    "modernbert": (
        transformers.ModernBertForMaskedLM,
        transformers.ModernBertConfig,
        MODERNBERT,
    ),
    "splinter": (transformers.SplinterModel, transformers.SplinterConfig, SPLINTER),
    "vision": (
        transformers.Phi4MultimodalVisionModel,
        transformers.Phi4MultimodalVisionConfig,
        VISION,
    ),
}
NAMES = ["fa_v1", "fa_v2"]
N = 12
PADDINGS = {  # for two sequences of N tokens: one is padded, one is whole
    "none": None,
    "left": [[0] * 4 + [1] * 8, [1] * N],
    "right": [[1] * 7 + [0] * 5, [1] * N],
    "both": [[0] * 3 + [1] * 6 + [0] * 3, [1] * N],
}


@pytest.fixture(autouse=True)
def one_thread():
    """Models this small only wait for a second one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def build(kind: str, name: str, **changes) -> nn.Module:
    """A small model with random weights: the same for every name of attention."""
    model, config, options = KINDS[kind]
    torch.manual_seed(1)
    return model(config(**options | changes, attn_implementation=name))


def tokens(batch: int = 2, n: int = N) -> torch.Tensor:
    return torch.randint(1, 50, (batch, n), generator=torch.Generator().manual_seed(0))


def logits_and_gradients(model, ids, padding, **inputs) -> dict[str, torch.Tensor]:
    """Of the tokens alone: what a model says of padding means nothing."""
    kept = torch.ones_like(ids, dtype=torch.bool)
    if padding is not None:
        inputs["attention_mask"] = torch.tensor(padding, device=ids.device)
        kept = inputs["attention_mask"].bool()
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids.flip(0)
        kept = torch.ones_like(kept)
    logits = model(ids, **inputs).logits[kept]
    (logits.sin() * logits).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return dict(logits=logits.detach(), **gradients)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("padding", PADDINGS.values(), ids=list(PADDINGS))
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert", "bart"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_and_gradients_are_those_of_eager(name, kind, padding, device):
    ids = tokens().to(device)
    got = logits_and_gradients(build(kind, name).to(device), ids, padding)
    want = logits_and_gradients(build(kind, "eager").to(device), ids, padding)
    assert got.keys() == want.keys()
    for part in want:
        torch.testing.assert_close(got[part], want[part], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("name", NAMES)
def test_greedy_generation_with_a_cache_gives_the_tokens_of_eager(name, kind, padding):
    ids, options = tokens(), dict(max_new_tokens=6, do_sample=False)
    if padding != "none":
        options["attention_mask"] = torch.tensor(PADDINGS[padding])
    options |= dict(output_scores=True, return_dict_in_generate=True)
    got = build(kind, name).eval().generate(ids, **options)
    want = build(kind, "eager").eval().generate(ids, **options)
    assert torch.equal(got.sequences, want.sequences)
    for step, expected in zip(got.scores, want.scores, strict=True):
        torch.testing.assert_close(step, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:`past_key_values`:FutureWarning")
@pytest.mark.parametrize("name", NAMES)
def test_several_new_tokens_after_a_cache_get_the_logits_of_the_whole(name):
    model, ids = build("llama", name).eval(), tokens()
    with torch.no_grad():
        whole = build("llama", "eager").eval()(ids).logits
        first = model(ids[:, :7], use_cache=True)
        rest = model(ids[:, 7:], past_key_values=first.past_key_values).logits
    torch.testing.assert_close(rest, whole[:, 7:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_told_to_look_both_ways_does(name):
    ids = tokens()
    got, want = (build("llama", n).eval()(ids, is_causal=False).logits for n in (name, "eager"))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", ["splinter", "vision"])
@pytest.mark.parametrize("name", NAMES)
def test_a_mask_for_both_ways_counts_and_not_what_a_module_says(name, kind, padded):
    """Splinter's attention does not say that it looks both ways; that of Phi-4's images says that
    it is causal. Eager goes by the mask."""
    kept = torch.ones(2, 16, dtype=torch.bool)
    kept[0, 11:] = not padded
    if kind == "splinter":
        inputs = dict(input_ids=tokens(n=16), attention_mask=kept.long())
    else:
        pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
        inputs = dict(pixel_values=pixels, patch_attention_mask=kept.view(2, 4, 4))
    got, want = (build(kind, n).eval()(**inputs).last_hidden_state for n in (name, "eager"))
    torch.testing.assert_close(got[kept], want[kept], rtol=1e-4, atol=1e-5)


OWN_ATTENTION = {
    "Bloom": ("BloomModel", dict(hidden_size=32, n_layer=1, n_head=4)),
    "XGLM": ("XGLMModel", dict(d_model=32, ffn_dim=32, num_layers=1, attention_heads=4)),
    "MegatronBert": (
        "MegatronBertModel",
        dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4),
    ),
    "MPNet": (
        "MPNetModel",
        dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4),
    ),
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", OWN_ATTENTION)
def test_a_model_that_computes_attention_by_itself_gives_no_wrong_result(kind, padded):
    """It would get a mask that is not meant for it: no causality, or padding that is seen."""
    model, sizes = OWN_ATTENTION[kind]
    config = getattr(transformers, f"{kind}Config")(vocab_size=50, **sizes)
    build = getattr(transformers, model)._from_config
    ids, kept = tokens(n=12), torch.ones(2, 12, dtype=torch.long)
    kept[0, 8:] = 1 - padded
    for batch in (1, 2):  # one entry's mask would fit any scores
        inputs = dict(input_ids=ids[:batch], attention_mask=kept[:batch])
        build(config, attn_implementation="eager").eval()(**inputs)
        with pytest.raises((RuntimeError, ValueError), match=r"Float8|mask should be of size"):
            build(config, attn_implementation="fa_v2").eval()(**inputs)


def test_attention_that_nobody_calls_causal_or_not_is_refused():
    q = torch.zeros(2, 2, 8, 8)
    padding = torch.ones(2, 8, dtype=torch.bool)
    for function in _functions():
        for given in (None, padding):
            with pytest.raises(ValueError, match=r"told whether attention is causal.*; Identity"):
                attend(function, nn.Identity(), q, q, q, given)


def test_one_mask_for_all_of_a_batch_is_of_all_of_it():
    q, k, v = torch.randn(3, 3, 2, 9, 8, generator=torch.Generator().manual_seed(0))
    kept = torch.arange(9) < 5
    for function in _functions():
        o, _ = attend(function, nn.Module(), q, k, v, kept[None, None, None].to(BOTH_WAYS))
        want = naive_attention(q, k[:, :, :5], v[:, :, :5])
        torch.testing.assert_close(o, want.transpose(1, 2))


@pytest.mark.parametrize("name", NAMES)
def test_attention_dropout_works_in_training_and_rests_in_evaluation(name):
    model, ids = build("llama", name, attention_dropout=0.5), tokens()
    eager = build("llama", "eager").eval()(ids).logits
    torch.testing.assert_close(model.eval()(ids).logits, eager, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(model.train()(ids).logits, model(ids).logits, atol=1e-3)


@pytest.mark.parametrize("training", [True, False])
def test_dropout_has_the_probability_that_the_model_asks_for(training):
    n = 64
    q = k = torch.zeros(1, 4, n, n)  # all keys weigh the same
    v = torch.eye(n).expand(1, 4, n, n)  # and o is P
    module = nn.Module().train(training)
    for function in _functions():
        o, _ = attend(function, module, q, k, v, None, dropout=0.25, is_causal=False)
        assert (o == 0).double().mean().item() == pytest.approx(0.25 * training, abs=0.02)


def test_scaling_reaches_the_kernel():
    q, k, v = torch.randn(3, 1, 2, 9, 8, generator=torch.Generator().manual_seed(0))
    for function in _functions():
        o, weights = attend(function, nn.Module(), q, k, v, None, scaling=0.7, is_causal=True)
        want = naive_attention(q, k, v, causal=True, scale=0.7)
        torch.testing.assert_close(o, want.transpose(1, 2))
        assert weights is None


# Sizes of a window: the least that hides nothing from N tokens, and what is one less.
WINDOWS = {
    "mistral": [dict(sliding_window=n) for n in (N, N - 1)],
    "modernbert": [dict(local_attention=2 * n) for n in (N - 1, N - 2)],  # n to each side
}


@pytest.mark.parametrize("kind", WINDOWS)
def test_a_window_that_no_token_looks_past_is_none(kind):
    ids, (whole, _) = tokens(), WINDOWS[kind]
    got, want = (build(kind, name, **whole).eval()(ids).logits for name in ("fa_v2", "eager"))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", WINDOWS)
def test_a_window_that_hides_one_key_is_refused(kind):
    ids, (whole, narrow) = tokens(), WINDOWS[kind]
    wide, less = (build(kind, "eager", **w).eval()(ids).logits for w in (whole, narrow))
    assert not torch.allclose(wide, less, rtol=1e-4, atol=1e-5)  # it is not none
    with pytest.raises(ValueError, match=rf"no sliding window.* for {N} tokens its size must be"):
        build(kind, "fa_v2", **narrow)(ids)


def test_generation_stops_where_the_window_hides_the_first_token():
    options = dict(do_sample=False, min_new_tokens=1)
    ids, model = tokens(), build("mistral", "fa_v2", sliding_window=N + 2).eval()
    eager = build("mistral", "eager", sliding_window=N + 2).eval()
    got, want = (m.generate(ids, max_new_tokens=3, **options) for m in (model, eager))
    assert torch.equal(got, want)  # the last token's query is the one before it
    with pytest.raises(ValueError, match=rf"for {N + 3} tokens its size .* got {N + 2}"):
        model.generate(ids, max_new_tokens=4, **options)


def test_packed_position_ids_are_refused():
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7]]).expand(2, N)
    with pytest.raises(ValueError, match="packed position_ids"):
        build("llama", "fa_v2")(tokens(), position_ids=positions, use_cache=False)


def test_a_mask_of_pairs_is_refused():
    pairs = torch.ones(2, 1, N, N, dtype=torch.bool).tril()
    with pytest.raises(ValueError, match=r"must be \[B, N\].*got shape \(2, 1, 12, 12\)"):
        build("llama", "fa_v2")(tokens(), attention_mask=pairs)


def test_a_static_cache_is_refused():
    with pytest.raises(ValueError, match=r"static cache"):
        build("llama", "fa_v2").generate(
            tokens(), max_new_tokens=3, cache_implementation="static", do_sample=False
        )


@pytest.mark.filterwarnings("ignore:`past_key_values`:FutureWarning")
def test_padding_among_new_tokens_is_refused():
    model, ids = build("llama", "fa_v2").eval(), tokens()
    past = model(ids[:, :7], use_cache=True).past_key_values
    with pytest.raises(ValueError, match="attention_mask must be 1 at new tokens"):
        model(
            ids[:, 7:],
            past_key_values=past,
            attention_mask=torch.tensor(PADDINGS["right"]),
        )


def test_weights_that_are_never_formed_are_refused():
    with pytest.raises(ValueError, match="do not take output_attentions"):
        build("llama", "fa_v2")(tokens(), output_attentions=True)


def test_a_mask_shorter_than_the_cache_is_refused():
    with pytest.raises(ValueError, match="must cover all 12 keys; got 5"):
        mask(q_length=5, kv_length=12, q_offset=7, attention_mask=torch.ones(2, 5))


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("softcap", 30.0),
        ("s_aux", torch.zeros(2)),
        ("position_bias", torch.zeros(1, 2, 8, 8)),
        ("cu_seq_lens_q", torch.tensor([0, 8])),
    ],
)
def test_what_changes_the_weights_is_refused(argument, value):
    q = torch.zeros(1, 2, 8, 8)
    for function in _functions():
        with pytest.raises(ValueError, match=f"do not take {argument}"):
            attend(function, nn.Module(), q, q, q, None, **{argument: value})


@pytest.mark.parametrize(
    ("installed", "got"),
    [(None, "it cannot be imported"), ("5.3.0", "got 5.3.0"), ("4.40.2", "got 4.40.2")],
)
def test_without_a_transformers_that_fits_one_sentence_says_so(installed, got, monkeypatch):
    """4.40 has none of what is imported from it."""
    old = types.ModuleType("transformers")
    old.__version__ = installed
    monkeypatch.setitem(sys.modules, "transformers", installed and old)
    monkeypatch.delitem(sys.modules, "flash_attention.transformers")
    with pytest.raises(ImportError, match=f"needs transformers 5.4 or later; {got}"):
        importlib.import_module("flash_attention.transformers")


def _functions():
    from flash_attention import flash_attention_v1, flash_attention_v2

    return flash_attention_v1, flash_attention_v2
