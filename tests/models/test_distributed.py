"""DistributedDataParallel over the GPT with flash_v1."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from flash_attention import FlashAttentionV1, NaiveAttention
from models.gpt import GPT
from models.loss import cross_entropy


def small_gpt(attention) -> GPT:
    torch.manual_seed(0)
    return GPT(
        vocab_size=61, seq_len=16, n_layer=1, n_head=4, n_kv_head=2, width=32, attention=attention
    )  # fmt: skip


def tokens_of(rank: int) -> Tensor:
    return torch.randint(61, (2, 17), generator=torch.Generator().manual_seed(rank))


def loss_of(model, tokens: Tensor) -> Tensor:
    return cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])


@pytest.fixture
def one_process(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_every_gradient_passes_through_the_reducer(one_process):
    """The reducer is told to halve what it gets: so every parameter's gradient is halved."""
    model = DistributedDataParallel(small_gpt(FlashAttentionV1()))

    def halve(state, bucket):
        future = torch.futures.Future()
        future.set_result(bucket.buffer() / 2)
        return future

    model.register_comm_hook(None, halve)
    loss_of(model, tokens_of(0)).backward()
    naive = small_gpt(NaiveAttention())
    loss_of(naive, tokens_of(0)).backward()
    for got, p in zip(model.parameters(), naive.parameters(), strict=True):
        torch.testing.assert_close(got.grad, p.grad / 2, rtol=1e-4, atol=1e-6)


def train_on_a_gpu_of_two(rank: int, folder: str) -> None:
    """A process that leaves device 0 current: rank 1 runs on a device that is not."""
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    model = DistributedDataParallel(small_gpt(FlashAttentionV1()).to(device), device_ids=[device])
    loss_of(model, tokens_of(rank).to(device)).backward()
    torch.save([p.grad.cpu() for p in model.parameters()], f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_share_the_mean_of_their_gradients(tmp_path):
    torch.multiprocessing.spawn(train_on_a_gpu_of_two, (str(tmp_path),), nprocs=2)
    naive = small_gpt(NaiveAttention())
    ((loss_of(naive, tokens_of(0)) + loss_of(naive, tokens_of(1))) / 2).backward()
    for rank in range(2):
        grads = torch.load(tmp_path / f"{rank}.pt")
        for got, p in zip(grads, naive.parameters(), strict=True):
            torch.testing.assert_close(got, p.grad, rtol=1e-3, atol=1e-5)
