import pytest
import torch
from torch import nn

from data.tokenizers import ByteTokenizer
from training.sample import sample_text

SETTINGS = {"max_new_tokens": 3, "temperature": 0.8, "top_k": 5, "seed": 0}


class Echo(nn.Module):
    """Continues with the letters after the last byte, and keeps what it was asked."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def generate(self, idx, max_new_tokens, *, temperature, top_k, generator):
        self.asked = (idx.tolist(), temperature, top_k)
        torch.rand(1, generator=generator)
        new = idx[:, -1:] + torch.arange(1, max_new_tokens + 1)
        return torch.cat((idx, new), dim=1)


def test_the_prompt_is_continued():
    assert sample_text(Echo(), ByteTokenizer(), prompt="xa", **SETTINGS) == "xabcd"


def test_the_settings_reach_the_model():
    model = Echo()
    sample_text(model, ByteTokenizer(), prompt="a", **SETTINGS)
    assert model.asked == ([[97]], 0.8, 5)


def test_an_empty_prompt_starts_a_document():
    model = Echo()
    sample_text(model, ByteTokenizer(), prompt="", **SETTINGS)
    assert model.asked[0] == [[ByteTokenizer.eot]]


def test_the_run_s_random_numbers_are_left_alone():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    sample_text(Echo(), ByteTokenizer(), prompt="a", **SETTINGS)
    assert torch.rand(1) == expected


@pytest.mark.parametrize("prompt", ["é", "\n"])
def test_a_prompt_beyond_ascii_is_shown_as_given(prompt):
    assert sample_text(Echo(), ByteTokenizer(), prompt=prompt, **SETTINGS).startswith(prompt)
