"""The refiner's attention windows: token order, its inverse, and who sees whom.

Block modes put the video tokens in block order (blocks row-major over t, y, x; inside a block row-major too; border blocks
simply hold fewer tokens), the tail (audio, text, reference tokens) behind them. Frame and dense modes keep the natural
order. Facts: spec components.md 1.6-1.7. Nothing here is of size S x S except `allowed_mask`, which tests use.
Legend: S tokens, V video tokens, N blocks.
"""

import torch
from torch import Tensor
from torch.nn import functional

from magi2_core.config import WindowConfig
from magi2_core.errors import CheckpointError, RequestError
from magi2_kernels.block_attention.layout import BlockLayout

Grid = tuple[int, int, int]


def _uses_blocks(window: WindowConfig) -> bool:
    return window.mode == "window" and window.level == "block"


def check_window(window: WindowConfig) -> None:
    """Raises CheckpointError on a mode that is not defined."""
    if window.mode == "dense":
        return
    if window.level not in ("block", "frame"):
        raise CheckpointError(f"attention window level is {window.level!r}, expected 'block' or 'frame'.")
    if window.level == "block" and window.block_mode not in ("grid", "scan"):
        raise CheckpointError(f"attention window block_mode is {window.block_mode!r}, expected 'grid' or 'scan'.")
    if window.level == "frame" and window.frame_receptive_field < 0:
        raise CheckpointError(
            f"attention window frame_receptive_field is {window.frame_receptive_field}, expected 0 or more for level 'frame'."
        )


def block_grid(size: Grid, window: WindowConfig) -> Grid:
    """Number of blocks along t, y and x for a latent grid `size` = (T, h, w)."""
    edges = (window.block_t_size, window.block_size, window.block_size)
    return tuple(-(-extent // edge) for extent, edge in zip(size, edges, strict=True))  # type: ignore[return-value]


def token_order(size: Grid, tail: int, window: WindowConfig) -> Tensor:
    """Natural index of the token at each position of kernel order, int32 [V + tail].

    Args: size: video grid (T, h, w) in tokens; tail: tokens after the video.
    """
    check_window(window)
    frames, height, width = size
    video = frames * height * width
    if not _uses_blocks(window):
        return torch.arange(video + tail, dtype=torch.int32)
    bt, bs = window.block_t_size, window.block_size
    nt, nh, nw = block_grid(size, window)
    index = torch.arange(video, dtype=torch.int32).view(frames, height, width)
    index = functional.pad(index, (0, nw * bs - width, 0, nh * bs - height, 0, nt * bt - frames), value=-1)
    index = index.view(nt, bt, nh, bs, nw, bs).permute(0, 2, 4, 1, 3, 5).reshape(-1)
    return torch.cat([index[index >= 0], torch.arange(video, video + tail, dtype=torch.int32)])


def restore_order(order: Tensor) -> Tensor:
    """The inverse permutation, int32 [S]: kernel position of each natural index."""
    inverse = torch.empty_like(order)
    inverse[order.long()] = torch.arange(order.numel(), dtype=order.dtype, device=order.device)
    return inverse


def _near_pairs(count: int, radius: int) -> tuple[Tensor, Tensor]:
    """Pairs (i, j) of 0..count-1 with |i - j| <= radius: the window is cut at the border, never shifted."""
    index = torch.arange(count)
    query, offset = torch.meshgrid(index, torch.arange(-radius, radius + 1), indexing="ij")
    key = query + offset
    valid = (key >= 0) & (key < count)
    return query[valid], key[valid]


def _grid_pairs(grid: Grid, window: WindowConfig) -> tuple[Tensor, Tensor]:
    """Block pairs whose index differs by at most the radius along every axis."""
    radii = (window.block_t_radius, window.block_h_radius, window.block_w_radius)
    query = key = torch.zeros(1, dtype=torch.int64)
    for count, radius in zip(grid, radii, strict=True):
        axis_query, axis_key = _near_pairs(count, min(radius, count - 1))
        query = (query[:, None] * count + axis_query).reshape(-1)
        key = (key[:, None] * count + axis_key).reshape(-1)
    return query, key


def _scan_pairs(blocks: int, win_size: int) -> tuple[Tensor, Tensor]:
    """A window of `win_size` blocks on the line of blocks, shifted inward at the ends."""
    width = min(blocks, max(1, win_size))
    first = (torch.arange(blocks) - width // 2).clamp(0, blocks - width)
    key = (first[:, None] + torch.arange(width)).reshape(-1)
    return torch.arange(blocks).repeat_interleave(width), key


def _block_sizes(size: Grid, window: WindowConfig) -> Tensor:
    """Tokens of each block, int64 [N] in block order."""
    edges = (window.block_t_size, window.block_size, window.block_size)
    sizes = torch.ones(1, dtype=torch.int64)
    for extent, edge, count in zip(size, edges, block_grid(size, window), strict=True):
        axis = (extent - torch.arange(count) * edge).clamp(max=edge)
        sizes = (sizes[:, None] * axis).reshape(-1)
    return sizes


def window_layout(size: Grid, tail: int, window: WindowConfig, ref_video: int = 0) -> BlockLayout:
    """Who sees whom in the layers with local attention, over tokens in the order of `token_order`.

    Args: size: video grid (T, h, w) in tokens; tail: every token after the video; ref_video: how many of them are
    reference-video tokens (only checked: dense mode with a frame window does not define them).
    """
    check_window(window)
    frames, height, width = size
    if _uses_blocks(window):
        grid = block_grid(size, window)
        pairs = _grid_pairs(grid, window) if window.block_mode == "grid" else _scan_pairs(grid[0] * grid[1] * grid[2], window.win_size)
        return BlockLayout.from_pairs(_block_sizes(size, window), *pairs, tail)
    radius = window.frame_receptive_field if window.mode == "window" else window.dense_frame_receptive_field
    if radius == -1:
        return BlockLayout.dense(frames * height * width + tail)
    if radius < 0:
        raise CheckpointError(f"frame_receptive_field is {radius}, expected -1 (no window) or 0 and more.")
    if window.mode == "dense" and ref_video:
        raise RequestError(f"{ref_video} reference-video tokens: attention mode 'dense' with a frame window is not defined for them.")
    frame_sizes = torch.full((frames,), height * width, dtype=torch.int64)
    return BlockLayout.from_pairs(frame_sizes, *_near_pairs(frames, min(radius, frames - 1)), tail)


def allowed_mask(layout: BlockLayout) -> Tensor:
    """The layout as a boolean matrix [S, S] (query, key) in kernel order. For tests: it is S x S."""
    blocks, total = layout.num_blocks, layout.num_tokens
    offsets = layout.block_offsets.long()
    seen = torch.zeros(blocks + 1, blocks + 1, dtype=torch.bool)
    seen[-1, :] = True
    seen[:, -1] = True
    counts = layout.neighbour_offsets.long().diff()
    seen[torch.arange(blocks).repeat_interleave(counts), layout.neighbours.long()] = True
    sizes = torch.cat([offsets.diff(), torch.tensor([total - int(offsets[-1])])])
    block_of = torch.arange(blocks + 1).repeat_interleave(sizes)
    return seen[block_of][:, block_of]
