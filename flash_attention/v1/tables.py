"""The launch configurations of V1's kernels, tuned on an H200: results/flash_v1_tuning.md says what
decided.

Keys: the padded head dim, at least 64, and the bytes of an element: 2, or 4 for more.
"""

from flash_attention.tiling import Blocks

FORWARD = {
    # O passes through HBM once per K/V block: block_kv is as large as registers allow.
    (64, 2): Blocks(64, 256, num_warps=4, num_stages=1, per_processor=2),
    (128, 2): Blocks(128, 256, num_warps=8, num_stages=1),
    (256, 2): Blocks(64, 128, num_warps=8, num_stages=1),
    (64, 4): Blocks(64, 64, num_warps=8, num_stages=1),
    (128, 4): Blocks(32, 64, num_warps=8, num_stages=1),
    (256, 4): Blocks(32, 32, num_warps=4, num_stages=1),
}
BACKWARD = {
    (64, 2): Blocks(64, 128, num_warps=8, num_stages=3),
    (128, 2): Blocks(64, 128, num_warps=8, num_stages=3),
    (256, 2): Blocks(64, 64, num_warps=8, num_stages=1),
    (64, 4): Blocks(32, 32, num_warps=4, num_stages=1),
    (128, 4): Blocks(32, 32, num_warps=4, num_stages=1),
    (256, 4): Blocks(16, 32, num_warps=4, num_stages=1),
}
