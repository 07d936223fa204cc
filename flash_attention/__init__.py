"""Attention backends with one contract. Imports torch, and triton where there is one.

``naive.py`` is standard attention, ``sdpa.py`` PyTorch's own, ``v1/`` FlashAttention V1,
``v2/`` FlashAttention V2.
"""

from flash_attention.base import Attention
from flash_attention.naive import NaiveAttention, naive_attention
from flash_attention.sdpa import SDPAttention, sdpa_attention
from flash_attention.v1.op import FlashAttentionV1, flash_attention_v1
from flash_attention.v2.op import FlashAttentionV2, flash_attention_v2

__all__ = [
    "Attention",
    "FlashAttentionV1",
    "FlashAttentionV2",
    "NaiveAttention",
    "SDPAttention",
    "flash_attention_v1",
    "flash_attention_v2",
    "naive_attention",
    "sdpa_attention",
]
