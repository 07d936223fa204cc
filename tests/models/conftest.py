"""Small models for the tests of models/."""

import pytest
import torch

from flash_attention import Attention, NaiveAttention, SDPAttention
from models.gpt import GPT


class Spy(Attention):
    """Naive attention that keeps the arguments of its calls."""

    name = "spy"

    def __init__(self):
        super().__init__()
        self.calls = []
        self.inner = NaiveAttention()

    def forward(self, q, k, v, **kwargs):
        self.calls.append({"q": q, "k": k, "v": v, **kwargs})
        return self.inner(q, k, v, **kwargs)


@pytest.fixture
def spy():
    return Spy()


@pytest.fixture
def make_gpt():
    """``make_gpt(**changes)``: a two-layer GPT whose every parameter is random.

    Biases and norms start as constants; noise makes a mistake in their use visible.
    """

    def make(seed=0, noise=0.05, **changes):
        settings = {
            "vocab_size": 61,
            "seq_len": 16,
            "n_layer": 2,
            "n_head": 4,
            "width": 32,
            "attention": SDPAttention(),
        }
        torch.manual_seed(seed)
        model = GPT(**(settings | changes))
        with torch.no_grad():
            for p in model.parameters():
                p.add_(noise * torch.randn_like(p))
        return model

    return make


@pytest.fixture
def tokens():
    """Token ids ``[3, 16]`` below 61."""
    return torch.randint(61, (3, 16), generator=torch.Generator().manual_seed(1))
