"""FlashAttention V2: forward.py and backward.py (Triton), tiled.py (PyTorch), op.py (the op)."""
