"""Block sizes: the paper's formula, the sizes the kernels use, and how rows are split.

Br (block_q) rows of Q and Bc (block_kv) rows of K and V are on the chip at one time.
"""

import math
from dataclasses import dataclass, replace

BLOCK_SIZES = (16, 32, 64, 128, 256)  # that a user may set


@dataclass(frozen=True)
class Blocks:
    """One launch configuration: rows of Q, rows of K/V, warps per program and pipeline stages.

    V1 also says how many such programs a processor holds at a time (per_processor). V2 says how
    many heads are in work at a time (0: all) and whether tiles are loaded by tensor maps where
    those fit.
    """

    block_q: int
    block_kv: int
    num_warps: int = 4
    num_stages: int = 1
    per_processor: int = 1
    heads_at_a_time: int = 0
    descriptors: bool = True

    def smaller(self) -> "Blocks | None":
        """The next configuration to try where this one does not fit; None at the smallest."""
        if self.num_stages > 1:
            return replace(self, num_stages=1)
        if max(self.block_q, self.block_kv) == 16:
            return None
        if self.block_kv >= self.block_q:
            return replace(self, block_kv=self.block_kv // 2)
        return replace(self, block_q=self.block_q // 2)

    def override(self, block_q: int | None, block_kv: int | None) -> "Blocks":
        """These blocks with the sizes the user set."""
        if block_q is None and block_kv is None:
            return self
        return replace(self, block_q=block_q or self.block_q, block_kv=block_kv or self.block_kv)


def paper_blocks(on_chip_elements: int, head_dim: int) -> tuple[int, int]:
    """Br and Bc of the paper, section 3.1: Bc = ceil(M / 4d), Br = min(Bc, d), M in elements."""
    block_kv = math.ceil(on_chip_elements / (4 * head_dim))
    return min(block_kv, head_dim), block_kv


@dataclass(frozen=True)
class Item:
    """Something that one block step holds on the chip. place: "shared" memory, or "registers"."""

    name: str
    shape: str
    bytes: int
    place: str


def forward_step(block_q: int, block_kv: int, head_dim: int, element_size: int) -> list[Item]:
    """What the inner loop's body of Algorithm 2 holds, at its widest, once each.

    Operands that the matrix unit reads are in shared memory; what it computes, and O, which the
    result is added to, are in registers. Sums are float32.
    """
    br, bc, d, e = block_q, block_kv, head_dim, element_size
    s, p, product = 4 * br * bc, e * br * bc, 4 * br * d
    return [
        Item("K_j", "Bc d", bc * d * e, "shared"),
        Item("V_j", "Bc d", bc * d * e, "shared"),
        Item("Q_i", "Br d", br * d * e, "shared"),
        Item("O_i", "Br d", br * d * 4, "registers"),
        # P rounded and the product need S's room once S is used up.
        Item("S_ij; then P_ij and P_ij V_j", "Br Bc", max(s, p + product), "registers"),
        Item("m_i, l_i, old and new", "4 Br", 4 * br * 4, "registers"),
    ]


def backward_step(block_q: int, block_kv: int, head_dim: int, element_size: int) -> list[Item]:
    """What the inner loop's body of Algorithm 4 holds, at its widest, once each."""
    br, bc, d, e = block_q, block_kv, head_dim, element_size
    return [
        Item("K_j", "Bc d", bc * d * e, "shared"),
        Item("V_j", "Bc d", bc * d * e, "shared"),
        Item("Q_i", "Br d", br * d * e, "shared"),
        Item("dO_i", "Br d", br * d * e, "shared"),
        Item("dS_ij, for dQ", "Br Bc", br * bc * e, "shared"),
        Item("dK_j", "Bc d", bc * d * 4, "registers"),
        Item("dV_j", "Bc d", bc * d * 4, "registers"),
        # dQ needs their room once dS is in shared memory.
        Item("P_ij and dP_ij; then dQ_i", "2 Br Bc", 4 * br * max(2 * bc, d), "registers"),
        Item("L_i, D_i", "2 Br", 2 * br * 4, "registers"),  # L_i = m_i + log l_i
    ]


def held(items: list[Item], place: str) -> int:
    """Bytes of the items in one place."""
    return sum(item.bytes for item in items if item.place == place)


def padded_head_dim(head_dim: int) -> int:
    """Tile widths are powers of two, and a matrix product needs at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


def pytorch_blocks(batch_heads: int) -> Blocks:
    """Sizes for the PyTorch tiles, which take all heads at a time: large, since each tile costs
    some twenty library calls, but with scores that stay in a CPU's caches (4 MiB in float32)."""
    size = 256
    while size > 32 and batch_heads * size * size > 2**20:
        size //= 2
    return Blocks(size, size)


def tuned(table: dict[tuple[int, int], Blocks], head_dim: int, element_size: int) -> Blocks:
    """The entry of a version's table (``v1/tables.py``, ``v2/tables.py``) for this head dim and
    these bytes of an element."""
    return table[max(64, padded_head_dim(head_dim)), 2 if element_size <= 2 else 4]


def forward_splits(batch_heads: int, nq: int, blocks: Blocks, processors: int) -> int:
    """How many programs share the rows of one (batch, head) in V1's forward, by :func:`num_splits`,
    on a device of so many processors."""
    row_blocks = math.ceil(nq / blocks.block_q)
    return num_splits(batch_heads, row_blocks, processors * blocks.per_processor)


def num_splits(programs: int, blocks: int, processors: int) -> int:
    """How many programs share the inner loop of one (batch, head).

    Of the split counts up to ``blocks``, the fewest whose last wave keeps the processors busy to
    95% of the best efficiency found: the rule of the original CUDA V1 (num_splits_heuristic).

    programs: batch x heads; blocks: row blocks there are to share; processors: programs that the
    device runs at a time.
    """
    if programs == 0 or blocks == 0:
        return 1
    efficiency = []
    for splits in range(1, blocks + 1):
        waves = programs * splits / processors
        efficiency.append(waves / math.ceil(waves))
    best = max(efficiency)
    return 1 + next(i for i, e in enumerate(efficiency) if e >= 0.95 * best)
