"""Token order and who-sees-whom against the rules stated token by token."""

import hashlib
import itertools
import json
from dataclasses import replace

import pytest
import torch

from magi2_core.config import RefinerConfig, WindowConfig
from magi2_core.errors import CheckpointError, RequestError
from magi2_core.model.refiner_packing import SegmentLengths, coordinates
from magi2_core.model.window import allowed_mask, block_grid, restore_order, token_order, window_layout

GRID = WindowConfig(block_t_size=2, block_size=3, block_t_radius=1, block_h_radius=0, block_w_radius=2)
FULL_HD = (63, 68, 120)


def _positions(size):
    return list(itertools.product(*(range(extent) for extent in size)))


def test_token_order_sorts_by_block_then_raster() -> None:
    size = (5, 4, 7)

    def key(position):
        t, y, x = position
        return (t // 2, y // 3, x // 3, t, y, x)

    positions = _positions(size)
    expected = sorted(range(len(positions)), key=lambda index: key(positions[index]))
    assert token_order(size, 3, GRID).tolist() == [*expected, *range(140, 143)]


def test_restore_order_is_the_inverse() -> None:
    order = token_order((5, 4, 7), 3, GRID)
    assert torch.equal(order[restore_order(order).long()], torch.arange(143, dtype=torch.int32))


@pytest.mark.parametrize("level, mode", [("frame", "window"), ("block", "dense")])
def test_token_order_natural_outside_block_mode(level: str, mode: str) -> None:
    window = replace(GRID, level=level, mode=mode, frame_receptive_field=1)
    assert token_order((5, 4, 7), 3, window).tolist() == list(range(143))


def test_window_layout_grid_is_the_block_distance_rule() -> None:
    size, tail = (5, 4, 7), 2
    ordered = [_positions(size)[i] if i < 140 else None for i in token_order(size, tail, GRID).tolist()]

    def allowed(a, b):
        if a is None or b is None:
            return True
        return abs(a[0] // 2 - b[0] // 2) <= 1 and a[1] // 3 == b[1] // 3 and abs(a[2] // 3 - b[2] // 3) <= 2

    expected = torch.tensor([[allowed(a, b) for b in ordered] for a in ordered])
    assert torch.equal(allowed_mask(window_layout(size, tail, GRID)), expected)
    assert 0 < int(expected.sum()) < expected.numel()


def test_window_layout_scan_shifts_inward() -> None:
    window = replace(GRID, block_mode="scan", block_t_size=1, block_size=1, win_size=4)
    mask = allowed_mask(window_layout((1, 1, 7), 0, window))
    assert [row.nonzero().flatten().tolist() for row in mask] == [
        [0, 1, 2, 3],
        [0, 1, 2, 3],
        [0, 1, 2, 3],
        [1, 2, 3, 4],
        [2, 3, 4, 5],
        [3, 4, 5, 6],
        [3, 4, 5, 6],
    ]


def test_window_layout_frame_and_dense_agree_on_frames() -> None:
    size = (6, 2, 2)
    by_frame = window_layout(size, 3, replace(GRID, level="frame", frame_receptive_field=1))
    by_dense = window_layout(size, 3, replace(GRID, mode="dense", dense_frame_receptive_field=1))
    mask = allowed_mask(by_frame)
    assert torch.equal(mask, allowed_mask(by_dense))
    assert mask[0].nonzero().flatten().tolist() == [*range(8), 24, 25, 26]
    assert bool(mask[24:].all())


def test_window_layout_dense_without_frames_sees_all() -> None:
    assert bool(allowed_mask(window_layout((3, 2, 2), 3, replace(GRID, mode="dense", dense_frame_receptive_field=-1))).all())


def test_window_layout_dense_frames_refuse_reference_video() -> None:
    with pytest.raises(RequestError, match="reference-video"):
        window_layout((3, 2, 2), 5, replace(GRID, mode="dense", dense_frame_receptive_field=1), ref_video=2)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"level": "frame", "frame_receptive_field": -1}, "frame_receptive_field is -1"),
        ({"level": "row"}, "level is 'row'"),
        ({"block_mode": "spiral"}, "block_mode is 'spiral'"),
    ],
)
def test_window_layout_unknown_mode(change: dict, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        window_layout((3, 2, 2), 0, replace(GRID, **change))


def test_window_layout_full_hd_counts() -> None:
    window = WindowConfig()
    layout = window_layout(FULL_HD, 1500, window)
    lists = layout.neighbour_offsets.diff()
    sizes = layout.block_offsets.diff()
    assert block_grid(FULL_HD, window) == (8, 17, 30)
    assert (layout.num_blocks, layout.num_tokens, layout.max_block) == (4080, 515_580, 128)
    assert (layout.neighbours.numel(), int(lists.min()), int(lists.max())) == (386_784, 27, 125)
    assert (int((sizes == 112).sum()), int((sizes == 128).sum())) == (510, 3570)


def _ranges(layout) -> torch.Tensor:
    """The (query, key) token ranges that say the same: block-tail, tail-video, tail-tail in chunks of 128, block-block."""
    offsets, total = layout.block_offsets, layout.num_tokens
    blocks, video = layout.num_blocks, int(layout.block_offsets[-1])
    edges = torch.stack([offsets[:-1], offsets[1:]], dim=1)
    chunks = torch.tensor([[start, min(start + 128, total)] for start in range(video, total, 128)], dtype=torch.int32)
    tail, whole = torch.tensor([[video, total]], dtype=torch.int32), torch.tensor([[0, video]], dtype=torch.int32)
    query = torch.arange(blocks).repeat_interleave(layout.neighbour_offsets.diff().long())
    return torch.cat(
        [
            torch.cat([edges, tail.expand(blocks, 2)], dim=1),
            torch.cat([chunks, whole.expand(len(chunks), 2)], dim=1),
            torch.cat([chunks, tail.expand(len(chunks), 2)], dim=1),
            torch.cat([edges[query], edges[layout.neighbours.long()]], dim=1),
        ]
    )


def test_window_layout_full_hd_equals_the_released_ranges(golden_root) -> None:
    folder = golden_root / "components" / "refiner_pack" / "real_1080p_10s"
    if not folder.is_dir():
        pytest.skip("the golden case real_1080p_10s is not here")
    golden = json.loads((folder / "config.json").read_text())

    def digest(tensor: torch.Tensor) -> str:
        return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()

    window = WindowConfig.from_dict(golden["attn_config"])
    layout = window_layout(FULL_HD, golden["text_tokens"], window)
    rows = _ranges(layout).long()
    weight = layout.num_tokens + 1
    rows = rows[torch.argsort(rows[:, 2] * weight + rows[:, 3])]
    rows = rows[torch.argsort(rows[:, 0] * weight + rows[:, 1], stable=True)].to(torch.int32)
    assert len(rows) == golden["n_ranges"]
    assert digest(rows) == golden["sha256_ranges_lexsorted_rows_q0q1k0k1_i4le"]
    natural_to_kernel = token_order(FULL_HD, golden["text_tokens"], window)
    assert digest(natural_to_kernel) == golden["sha256_token_order_i4le"]
    assert digest(restore_order(natural_to_kernel)) == golden["sha256_token_restore_order_i4le"]
    coords = coordinates(SegmentLengths(grid=FULL_HD, text=golden["text_tokens"]), RefinerConfig())
    assert golden["sha256_coords_f4le"] in (digest(coords), digest(coords[natural_to_kernel.long()]))
