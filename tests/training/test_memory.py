"""Bytes saved for backward, against closed forms and real runs; peaks; what counts as OOM."""

import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flash_attention import FlashAttentionV1, NaiveAttention, SDPAttention
from flash_attention.base import Attention
from models.gpt import GPT
from models.loss import ChunkedLoss, FullLoss
from training import memory
from training.memory import SavedBytes, is_out_of_memory, saved_for_backward
from training.units import GIB

BACKENDS = [NaiveAttention, SDPAttention, FlashAttentionV1]


class OneAttention(nn.Module):
    """Separate q, k, v of known size around one attention call; logits over 8 ids."""

    def __init__(self, attention: Attention, heads: int, head_dim: int) -> None:
        super().__init__()
        self.attention = attention
        self.heads = heads
        self.embeddings = nn.ModuleList(nn.Embedding(8, heads * head_dim) for _ in range(3))
        self.head = nn.Linear(heads * head_dim, 8, bias=False)

    def forward(self, idx: Tensor) -> Tensor:
        # [B, N, H * D] -> [B, H, N, D], each in a storage of its own
        q, k, v = (e(idx).unflatten(-1, (self.heads, -1)).transpose(1, 2) for e in self.embeddings)
        o = self.attention(q, k, v, causal=True)
        return self.head(o.transpose(1, 2).flatten(2))


def tiny_gpt(attention: Attention, n: int = 32, dropout: float = 0.0, **changes) -> GPT:
    settings = {"vocab_size": 64, "seq_len": n, "n_layer": 2, "n_head": 2, "width": 32}
    return GPT(**(settings | changes), attention=attention, dropout=dropout)


def tokens(batch: int, n: int) -> Tensor:
    return torch.zeros(batch, n + 1, dtype=torch.int64)


def attention_bytes(attention: Attention, n: int, batch=2, heads=3, head_dim=16) -> int:
    return saved_for_backward(OneAttention(attention, heads, head_dim), tokens(batch, n)).attention


def test_flash_saves_q_k_v_o_and_two_statistics():
    n, batch, heads, head_dim = 96, 2, 3, 16
    expected = batch * heads * n * (4 * head_dim + 2) * 4  # q, k, v, o and m, l in float32
    assert attention_bytes(FlashAttentionV1(), n, batch, heads, head_dim) == expected


def test_flash_saves_half_precision_under_autocast_and_statistics_in_float32():
    n, batch, heads, head_dim = 96, 2, 3, 16
    autocast = torch.autocast("cpu", torch.bfloat16)
    model = OneAttention(FlashAttentionV1(), heads, head_dim)
    saved = saved_for_backward(model, tokens(batch, n), precision=autocast)
    assert saved.attention == batch * heads * n * (4 * head_dim * 2 + 2 * 4)


def test_flash_saves_twice_as_much_for_twice_the_length():
    assert attention_bytes(FlashAttentionV1(), 256) == 2 * attention_bytes(FlashAttentionV1(), 128)


def test_naive_saves_a_square_matrix_per_head():
    n, batch, heads, head_dim = 96, 2, 3, 16
    # P in float32 once (softmax's result is P @ V's input) and the mask; q, k, v are O(N).
    square = batch * heads * n * n * 4
    linear = 3 * batch * heads * n * head_dim * 4
    mask = n * n  # bool, shared by the heads
    saved = attention_bytes(NaiveAttention(), n, batch, heads, head_dim)
    assert square <= saved <= square + linear + 2 * mask


def test_naive_saves_four_times_as_much_for_twice_the_length():
    # f(2n) - 2 f(n) leaves nothing of what grows with N, and 2 c n^2 of what grows with N^2.
    def quadratic_part(n: int) -> int:
        return attention_bytes(NaiveAttention(), 2 * n) - 2 * attention_bytes(NaiveAttention(), n)

    assert quadratic_part(64) > 0
    assert quadratic_part(128) == pytest.approx(4 * quadratic_part(64), rel=1e-3)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("checkpointing", "loss_fn"), [("none", FullLoss()), ("block", ChunkedLoss(5))]
)
def test_the_fake_count_equals_the_real_one(backend, dropout, dtype, checkpointing, loss_fn):
    model = tiny_gpt(backend(), dropout=dropout, activation_checkpointing=checkpointing)

    def count(fake: bool) -> SavedBytes:
        autocast = torch.autocast("cpu", dtype, enabled=dtype != torch.float32)
        return saved_for_backward(
            model, tokens(2, 32), loss_fn=loss_fn, precision=autocast, fake=fake
        )

    assert count(fake=True) == count(fake=False)
    assert count(fake=True).parts == count(fake=False).parts


@pytest.mark.parametrize("backend", [NaiveAttention, FlashAttentionV1])
def test_every_byte_belongs_to_one_part(backend):
    saved = saved_for_backward(tiny_gpt(backend()), tokens(2, 32))
    assert sum(saved.parts.values()) == saved.total
    assert saved.parts["attention"] == saved.attention


def test_the_parts_of_a_gpt_by_hand():
    b, n, width, vocab, layers, heads = 3, 32, 32, 64, 2, 2
    parts = saved_for_backward(tiny_gpt(FlashAttentionV1(), n=n), tokens(b, n)).parts
    rows = b * n * 4  # bytes of a float32 for each token
    assert parts["attention"] == layers * rows * (4 * width + 2 * heads)  # q, k, v, o, m and l
    # The linear layers save the norm's output and GELU's output; GELU saves its input.
    assert parts["mlp"] == layers * rows * (width + 4 * width + 4 * width)
    # The head saves the last norm's output, the loss the log-probabilities, its targets (a copy)
    # and their number.
    assert parts["logits_and_loss"] == rows * width + rows * vocab + b * n * 8 + 4
    # A block's: the inputs of both norms with mean and 1/deviation, and the input of qkv (that of
    # proj is o). Then the last norm's input, and the ids.
    block = rows * (2 * (width + 2) + width)
    assert parts["rest"] == layers * block + rows * (width + 2) + b * (n + 1) * 8


def test_bytes_of_a_whole_model_by_hand():
    class Square(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(5, 7)
            self.register_buffer("ones", torch.ones(7, 5))

        def forward(self, idx):
            return self.embedding(idx).square() @ self.ones  # [B, N, 5]

    b, n = 2, 3
    expected = (
        b * (n + 1) * 8  # the token ids: the embedding's and the loss's share one storage
        + b * n * 7 * 4  # square saves its input; `ones` is the model's own
        + b * n * 5 * 4  # log-softmax saves its result
        + 4  # the loss saves the number of targets
        + b * n * 8  # ... and its targets, copied: a slice of the rows is not contiguous
    )
    assert saved_for_backward(Square(), tokens(b, n)) == SavedBytes(attention=0, total=expected)


def test_views_of_one_storage_count_once():
    class Twice(nn.Module):
        def __init__(self, twice: bool):
            super().__init__()
            self.embedding = nn.Embedding(5, 8)
            self.twice = twice

        def forward(self, idx):
            x = self.embedding(idx)
            y = x.square()
            return y + x.view(-1, 8).sin().view_as(y) if self.twice else y

    once, twice = (saved_for_backward(Twice(t), tokens(1, 4)).total for t in (False, True))
    assert twice == once


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_checkpoints_the_inputs_and_one_block_count(dtype):
    def count(n_layer: int, **changes) -> SavedBytes:
        autocast = torch.autocast("cpu", dtype, enabled=dtype != torch.float32)
        model = tiny_gpt(FlashAttentionV1(), n_layer=n_layer, **changes)
        return saved_for_backward(model, tokens(2, 32), precision=autocast)

    one, two, three = (count(n, activation_checkpointing="block") for n in (1, 2, 3))
    # One block keeps the same with and without: its input is counted once.
    assert one == count(1)
    assert one.attention == two.attention == three.attention
    # Each more keeps its input: 2 * 32 tokens of width 32, in float32.
    assert three.total - two.total == two.total - one.total == 2 * 32 * 32 * 4
    assert count(3).attention == 3 * three.attention


def test_the_loss_in_chunks_keeps_nothing_that_grows_with_tokens_times_vocabulary():
    def slope(vocab_size: int, loss_fn) -> float:
        """Bytes a token of one sequence."""
        counts = [
            saved_for_backward(
                tiny_gpt(FlashAttentionV1(), n, vocab_size=vocab_size),
                tokens(1, n),
                loss_fn=loss_fn,
            )
            for n in (64, 128)
        ]
        return (counts[1].total - counts[0].total) / 64

    assert slope(1000, FullLoss()) - slope(100, FullLoss()) == 4 * 900  # the log-softmax
    assert slope(1000, ChunkedLoss(8)) == slope(100, ChunkedLoss(8))
    # Instead of the features their gradient is kept: as many bytes.
    assert slope(100, FullLoss()) - slope(100, ChunkedLoss(8)) == 4 * 100


def test_a_huge_length_is_counted_without_memory_or_time():
    model = tiny_gpt(NaiveAttention(), n=2**20)
    saved = saved_for_backward(model, tokens(1, 2**20))
    assert saved.attention > 2 * 2 * 2**40 * 4  # layers, heads, N^2, float32: 16 TiB


@pytest.mark.parametrize("fake", [True, False])
def test_counting_leaves_random_state_parameters_and_mode_alone(fake):
    model = tiny_gpt(FlashAttentionV1(), dropout=0.5)
    before = {name: p.clone() for name, p in model.named_parameters()}
    ids = {name: id(p) for name, p in model.named_parameters()}
    state = torch.get_rng_state()
    saved_for_backward(model, tokens(2, 32), fake=fake)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert {name: id(p) for name, p in model.named_parameters()} == ids
    for name, p in model.named_parameters():
        assert p.grad is None
        assert torch.equal(p, before[name])


def test_no_hook_stays_on_the_attention_modules():
    attention = NaiveAttention()
    saved_for_backward(tiny_gpt(attention), tokens(1, 8))
    assert not attention._forward_hooks
    assert not attention._forward_pre_hooks


def test_dropout_counts_in_training_mode_only():
    model = tiny_gpt(NaiveAttention(), dropout=0.5)
    training = saved_for_backward(model, tokens(1, 16))
    evaluating = saved_for_backward(model.eval(), tokens(1, 16))
    assert training.total > evaluating.total


def test_counting_works_where_gradients_are_switched_off():
    model = tiny_gpt(NaiveAttention())
    with torch.no_grad():
        assert saved_for_backward(model, tokens(1, 8)).attention > 0


def test_a_compiled_model_is_counted_as_it_is_written():
    plain = saved_for_backward(tiny_gpt(NaiveAttention()), tokens(1, 16))
    compiled = tiny_gpt(NaiveAttention())
    compiled.compile()
    assert saved_for_backward(compiled, tokens(1, 16)) == plain


def test_more_saved_bytes_than_free_ram_are_refused(monkeypatch):
    class Ram:
        available = 2 * GIB

    monkeypatch.setattr(memory.psutil, "virtual_memory", Ram)
    memory.check_fits_in_ram(SavedBytes(attention=1, total=2 * GIB), 8)
    with pytest.raises(MemoryError, match=r"8 tokens keeps 3\.0 GiB .*1\.0 GiB of it.*2\.0 GiB"):
        memory.check_fits_in_ram(SavedBytes(GIB, 3 * GIB), 8)


def test_a_real_allocation_failure_is_out_of_memory():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        MemoryError(),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_these_are_out_of_memory(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("out of resource: shared memory, Required: 262144, Hardware limit: 232448"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        ValueError("DefaultCPUAllocator: can't allocate memory"),
        KeyboardInterrupt(),
    ],
)
def test_these_are_not_out_of_memory(error):
    assert not is_out_of_memory(error)


def test_peak_rss_rises_with_an_allocation_and_falls_after_a_reset():
    device = torch.device("cpu")
    memory.reset_peaks(device)
    before = memory.peaks(device)["rss"]
    block = np.ones(2**28, dtype=np.uint8)  # 256 MiB, written
    with_block = memory.peaks(device)["rss"]
    assert with_block - before > 0.99 * 2**28
    del block
    gc.collect()
    memory.reset_peaks(device)
    assert memory.peaks(device)["rss"] < with_block - 2**27


def test_what_waits_for_the_garbage_collector_does_not_count_as_a_peak():
    class Cycle:
        def __init__(self):
            self.itself = self

    gc.disable()
    try:
        gone = weakref.ref(Cycle())
        assert gone() is not None
        memory.reset_peaks(torch.device("cpu"))
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_peak_of_a_gpu_begins_after_a_backward_of_its_own(mode, monkeypatch):
    """On the thread that may still hold another's gradients; here it is the caller's."""
    seen = []
    backward = torch.autograd.grad
    monkeypatch.setattr(
        torch.autograd, "grad", lambda *a: seen.append(("backward", backward(*a)[0].nbytes))
    )
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: seen.append("reset"))
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, device, **k: empty(*a, **k))
    with mode():
        memory.reset_peaks(torch.device("cuda"))
    assert seen == [("backward", 0), "reset"]


def test_the_peak_on_windows_is_that_of_the_working_set(monkeypatch):
    process = SimpleNamespace(memory_info=lambda: SimpleNamespace(peak_wset=123))
    monkeypatch.setattr(memory, "sys", SimpleNamespace(platform="win32"))
    monkeypatch.setattr(memory, "psutil", SimpleNamespace(Process=lambda: process))
    memory.reset_peaks(torch.device("cpu"))
    assert memory.peaks(torch.device("cpu")) == {"rss": 123}


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("checkpointing", "loss_fn"), [("none", FullLoss()), ("block", ChunkedLoss(50))]
)
def test_the_fake_count_equals_the_real_one_on_a_gpu(backend, dtype, checkpointing, loss_fn):
    model = tiny_gpt(backend(), n=128, dropout=0.1, activation_checkpointing=checkpointing).cuda()
    state = torch.cuda.get_rng_state()

    def count(fake: bool) -> SavedBytes:
        autocast = torch.autocast("cuda", dtype, enabled=dtype != torch.float32)
        return saved_for_backward(
            model, tokens(2, 128).cuda(), loss_fn=loss_fn, precision=autocast, fake=fake
        )

    assert count(fake=True) == count(fake=False)
    assert torch.equal(torch.cuda.get_rng_state(), state)


@pytest.mark.gpu
def test_checkpoints_that_leave_the_gpu_do_not_count():
    settings = {"n_layer": 5, "activation_checkpointing": "block"}
    kept, moved = (
        saved_for_backward(
            tiny_gpt(FlashAttentionV1(), **settings, offload_checkpoints=offload).cuda(),
            tokens(2, 32).cuda(),
        ).total
        for offload in (False, True)
    )
    assert kept - moved == 4 * 2 * 32 * 32 * 4  # the input of the block that computes stays


@pytest.mark.gpu
def test_counting_takes_no_gpu_memory():
    model = tiny_gpt(NaiveAttention(), n=2**17).cuda()
    memory.reset_peaks(torch.device("cuda"))
    before = memory.peaks(torch.device("cuda"))
    batch = tokens(1, 2**17).cuda()
    saved_for_backward(model, batch)
    grown = memory.peaks(torch.device("cuda"))["allocated"] - before["allocated"]
    assert grown <= 2 * batch.nbytes


@pytest.mark.gpu
def test_gpu_peaks_rise_with_an_allocation_and_fall_after_a_reset():
    device = torch.device("cuda")
    memory.reset_peaks(device)
    before = memory.peaks(device)["allocated"]
    block = torch.empty(2**26, dtype=torch.uint8, device=device)
    assert memory.peaks(device)["allocated"] - before == 2**26
    del block
    memory.reset_peaks(device)
    assert memory.peaks(device)["allocated"] == before


@pytest.mark.gpu
def test_a_real_gpu_allocation_failure_is_out_of_memory():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**48, dtype=torch.uint8, device="cuda")
    assert is_out_of_memory(caught.value)
