"""Offloading without a GPU: the copies are simulated, and made as late as a stream might."""

import gc
import weakref

import pytest
import torch

from flash_attention import FlashAttentionV1
from models.lit_gpt import LitGPT
from models.loss import ChunkedLoss, FullLoss
from models.offload import HostOffload
from models.optim import AdamWCosine
from training import memory

LAYERS = 4


class LateCopies:
    """Copies as a stream of their own may make them: only when somebody waits for them.

    Nothing is kept alive: memory let go before its copy is made has been used for something else.
    """

    def __init__(self) -> None:
        self.buffers = 0
        self.abandoned = 0
        self.log: list[str] = []
        self.alive: list[int] = []  # at each copy out: tensors copied out before and not let go
        self._queue: list[tuple[weakref.ref, weakref.ref]] = []
        self._made = 0
        self._out: list[weakref.ref] = []

    def host_buffer(self, like):
        self.buffers += 1
        buffer = torch.empty_like(like)
        buffer.on_host = True
        return buffer

    def copy(self, target, source):
        out = hasattr(target, "on_host")
        self.log.append("out" if out else "in")
        if out:
            self.alive.append(sum(ref() is not None for ref in self._out))
            self._out.append(weakref.ref(source))
        target.fill_(float("nan"))  # what is there until the copy is made
        self._queue.append((weakref.ref(target), weakref.ref(source)))
        return len(self._queue)

    def wait(self, event):
        while self._made < event:
            target, source = (ref() for ref in self._queue[self._made])
            assert target is not None, "the target's memory was let go too early"
            assert source is not None, "the source's memory was let go too early"
            target.copy_(source)
            self._made += 1

    def abandon(self, tensor):
        self.abandoned += 1
        self._made = len(self._queue)


class Simulated(HostOffload):
    """Offloads from a CPU."""

    def __init__(self):
        super().__init__()
        self.copies = LateCopies()

    def _moves(self, tensor):
        return tensor.numel() > 0


@pytest.fixture
def model(make_gpt):
    model = make_gpt(
        n_layer=LAYERS, activation_checkpointing="block", offload_checkpoints=True, dropout=0.2
    )
    model.offload = Simulated()
    return model


def loss_and_grads(model, *batches, loss_fn=None):
    """Loss of the batches, all forward passes before the backward pass; the gradients."""
    model.zero_grad()
    torch.manual_seed(7)
    loss = sum((loss_fn or FullLoss())(model, tokens) for tokens in batches)
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()]


def assert_equal(got, expected):
    assert torch.equal(got[0], expected[0])
    for grad, right in zip(got[1], expected[1], strict=True):
        assert torch.equal(grad, right)


def plain(make_gpt):
    return make_gpt(n_layer=LAYERS, dropout=0.2)


def test_offloading_changes_neither_the_loss_nor_a_gradient(make_gpt, model, tokens):
    assert_equal(loss_and_grads(model, tokens), loss_and_grads(plain(make_gpt), tokens))
    assert model.offload.copies.log.count("out") == LAYERS


def test_offloading_goes_with_the_loss_in_chunks(make_gpt, model, tokens):
    got = loss_and_grads(model, tokens, loss_fn=ChunkedLoss(5))
    assert_equal(got, loss_and_grads(plain(make_gpt), tokens, loss_fn=ChunkedLoss(5)))


def test_one_input_at_a_time_is_on_its_way_out(model, tokens):
    loss_and_grads(model, tokens)
    # When a block's input is copied out, all those before have left the device.
    assert model.offload.copies.alive == [0] * LAYERS


def test_an_input_comes_back_while_the_block_after_it_computes(make_gpt, tokens, spy):
    model = make_gpt(
        n_layer=3, attention=spy, activation_checkpointing="block", offload_checkpoints=True
    )
    model.offload = Simulated()
    log = model.offload.copies.log
    spy.register_forward_pre_hook(lambda *_: log.append("block"))
    loss_and_grads(model, tokens)
    forward = ["out", "block"] * 3
    # The last block's input is still there.
    assert log == [*forward, "in", "block", "in", "block", "block"]


def test_the_next_step_uses_the_same_host_buffers(model, tokens):
    for _ in range(3):
        loss_and_grads(model, tokens)
    assert model.offload.copies.buffers == LAYERS


def test_buffers_of_another_shape_are_made_and_the_old_ones_let_go(make_gpt, model, tokens):
    loss_and_grads(model, tokens)
    kept = [weakref.ref(buffer) for buffer in model.offload._free]
    assert len(kept) == LAYERS
    shorter = tokens[:, :9]
    assert_equal(loss_and_grads(model, shorter), loss_and_grads(plain(make_gpt), shorter))
    assert [ref() for ref in kept] == [None] * LAYERS


def test_two_forward_passes_before_backward_have_buffers_of_their_own(make_gpt, model, tokens):
    batches = tokens, tokens.flip(0), tokens.flip(1)
    loss_and_grads(model, tokens)  # leaves buffers to be used again
    assert_equal(loss_and_grads(model, *batches), loss_and_grads(plain(make_gpt), *batches))


def test_a_graph_that_is_kept_is_offloaded_for_both_backward_passes(make_gpt, model, tokens):
    grads = []
    for m in (model, plain(make_gpt)):
        torch.manual_seed(7)
        loss = FullLoss()(m, tokens)
        loss.backward(retain_graph=True)
        loss.backward()
        grads.append([p.grad for p in m.parameters()])
    assert all(map(torch.equal, *grads))


def test_a_forward_pass_without_backward_leaves_nothing_behind(make_gpt, model, tokens):
    FullLoss()(model, tokens)
    gc.collect()
    copies = model.offload.copies
    assert copies.abandoned == 1  # the last block's input, which is still being copied
    assert len(model.offload._free) == LAYERS
    assert_equal(loss_and_grads(model, tokens), loss_and_grads(plain(make_gpt), tokens))
    assert copies.buffers == LAYERS


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_too_little_host_memory_is_an_error_that_can_be_got_over(
    make_gpt, model, tokens, monkeypatch
):
    def fail(like):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(model.offload.copies, "host_buffer", fail)
        with pytest.raises(MemoryError):
            FullLoss()(model, tokens)
    gc.collect()
    assert_equal(loss_and_grads(model, tokens), loss_and_grads(plain(make_gpt), tokens))


def test_nothing_is_copied_without_gradients(model, tokens):
    with torch.no_grad():
        model(tokens)
    model.generate(tokens, 2)
    assert model.offload.copies.log == []


def test_tensors_on_a_cpu_stay_where_they_are(make_gpt, tokens):
    model = make_gpt(n_layer=LAYERS, activation_checkpointing="block", offload_checkpoints=True)
    got = loss_and_grads(model, tokens)
    assert_equal(got, loss_and_grads(make_gpt(n_layer=LAYERS), tokens))
    assert model.offload.copies is None


# --- on a GPU ----------------------------------------------------------------------------------


def on_gpu(make_gpt, **changes):
    changes = {"n_layer": 8, "width": 256, "seq_len": 4096} | changes
    return make_gpt(attention=FlashAttentionV1(deterministic=True), **changes).cuda()


CHECKPOINTS = {"activation_checkpointing": "block"}
OFFLOAD = CHECKPOINTS | {"offload_checkpoints": True}


def gpu_tokens():
    return torch.randint(61, (4, 4097), generator=torch.Generator().manual_seed(1)).cuda()


def gpu_step(model, tokens, dtype=torch.bfloat16):
    torch.manual_seed(7)
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        loss = ChunkedLoss()(model, tokens)
    loss.backward()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_offloading_from_a_gpu_changes_no_gradient(make_gpt, dtype):
    tokens = gpu_tokens()
    grads = []
    for settings in ({}, CHECKPOINTS, OFFLOAD):
        model = on_gpu(make_gpt, dropout=0.1, **settings)
        for _ in range(3):  # the host runs ahead; buffers are used again
            gpu_step(model, tokens, dtype)
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    torch.testing.assert_close(grads[1], grads[0], atol=1e-5, rtol=1e-3)
    torch.testing.assert_close(grads[2], grads[1], atol=1e-5, rtol=1e-3)


@pytest.mark.gpu
def test_peak_gpu_memory_falls_by_what_is_offloaded(make_gpt):
    tokens = gpu_tokens()
    device = torch.device("cuda")
    peaks = []
    for settings in ({}, CHECKPOINTS, OFFLOAD):
        model = on_gpu(make_gpt, **settings)
        for _ in range(2):
            torch.cuda.synchronize()  # what was offloaded is back
            memory.reset_peaks(device)
            before = memory.current(device)
            gpu_step(model, tokens)
        torch.cuda.synchronize()
        peaks.append(memory.peaks(device)["allocated"] - before)
        del model
    none, checkpoints, offload = peaks
    tokens_width = 4 * 4096 * 256
    # 36 width bytes a token in each of 8 layers; with checkpoints 4, and one block's.
    assert none - checkpoints > 0.9 * (8 * 36 - 8 * 4 - 36) * tokens_width
    # All inputs (4 width bytes a token), but the computing block's, the next one's and a bit.
    assert checkpoints - offload > (8 - 2.5) * 4 * tokens_width


@pytest.mark.gpu
def test_pinned_memory_is_taken_once(make_gpt):
    model = on_gpu(make_gpt, **OFFLOAD)
    tokens = gpu_tokens()
    gpu_step(model, tokens)
    buffers = {buffer.data_ptr() for buffer in model.offload._free}
    assert len(buffers) == 8
    assert all(buffer.is_pinned() for buffer in model.offload._free)
    for _ in range(5):
        gpu_step(model, tokens)
    torch.cuda.synchronize()
    assert {buffer.data_ptr() for buffer in model.offload._free} == buffers


@pytest.mark.gpu
def test_a_compiled_model_offloads_too(make_gpt):
    tokens = gpu_tokens()
    grads = []
    for compile in (False, True):
        model = on_gpu(make_gpt, n_layer=2, **OFFLOAD)
        LitGPT(model, AdamWCosine(lr=1e-3, max_steps=1), compile, ChunkedLoss())
        gpu_step(model, tokens, torch.float32)
        assert len(model.offload._free) == 2
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    torch.testing.assert_close(*grads, atol=1e-5, rtol=1e-3)
