"""Layout of the packed sequence: order, coordinates, codes, slices, unpacking."""

import pytest
import torch

from magi2_core.errors import RequestError
from magi2_core.model.modality import AUDIO, TEXT, VIDEO
from magi2_core.model.packing import (
    BranchInputs,
    ItemShape,
    PackedInputs,
    TokenContext,
    TokenPiece,
    image_grids,
    latent_tokens,
    pack,
    time_matrix,
    token_matrix,
    unpack,
)
from magi2_core.model.rope import default_bands, rope_table
from magi2_core.shapes import LatentShape, VideoShape

VIDEO_SHAPE = LatentShape(frames=2, height=2, width=3)
COND = ItemShape(video=VIDEO_SHAPE, audio=9, text=4, images=((2, 2), (2, 2)))
UNCOND = ItemShape(video=VIDEO_SHAPE, audio=9, text=0, images=((2, 2), (2, 2)))


def test_pack_order_and_sequences() -> None:
    sequence = pack([COND, UNCOND], multiple=8)
    kinds = [(run.kind, run.item, run.number, run.stop - run.start) for run in sequence.runs]
    images = lambda item: [("special", item, 0, 1), ("image", item, 0, 4), ("special", item, 1, 1), ("image", item, 1, 4)]  # noqa: E731
    assert kinds == [
        ("video", 0, 0, 12),
        ("audio", 0, 0, 9),
        ("text", 0, 0, 4),
        *images(0),
        ("video", 1, 0, 12),
        ("audio", 1, 0, 9),
        *images(1),
        ("padding", 2, 0, 6),
    ]
    assert sequence.cu_seqlens.host == (0, 35, 66, 72)
    # Text and the special token that follows it are one run of TEXT; patches are VIDEO.
    assert sequence.segments.runs[:5] == ((0, 12, VIDEO), (12, 21, AUDIO), (21, 26, TEXT), (26, 30, VIDEO), (30, 31, TEXT))
    assert sequence.segments.runs[-1] == (66, 72, TEXT)


def test_pack_no_padding_when_the_length_fits() -> None:
    assert pack([COND, UNCOND], multiple=6).total == 66
    assert pack([COND, UNCOND], multiple=6).cu_seqlens.host == (0, 35, 66)


def test_pack_padding_leaves_real_rows_alone() -> None:
    plain, padded = pack([COND, UNCOND]), pack([COND, UNCOND], multiple=48)
    assert padded.total == 96
    assert torch.equal(padded.coords[: plain.total], plain.coords)
    assert torch.isfinite(rope_table(padded.coords, default_bands(4))).all()


@pytest.mark.parametrize(
    ("width", "height", "text", "image", "tokens"),
    [(448, 256, (499, 417), None, 30088), (896, 512, (1865, 417), None, 117470), (896, 512, (1865, 417), (30, 56), 120832)],
)
def test_pack_released_lengths(width: int, height: int, text: tuple, image: tuple | None, tokens: int) -> None:
    shape = VideoShape(width=width, height=height)
    items = [ItemShape(video=shape.latent(), audio=shape.audio_latents(), text=count, images=(image,) if image else ()) for count in text]
    assert sum(item.tokens for item in items) == tokens


def test_pack_coordinates_of_every_kind() -> None:
    coords = pack([COND]).coords
    assert coords[11].tolist() == [1, 1, 2, 2, 2, 3, 2, 2, 3]
    assert coords[12 + 8].tolist() == [8, 0, 0, 9, 1, 1, 2, 1, 1]
    assert coords[21].tolist() == [-4, 0, 0, 4, 1, 1, 1, 1, 1]
    assert coords[25].tolist() == [4, -1, -1, 1, 2, 2, 1, 2, 2]
    assert coords[35 - 1].tolist() == [5, 1, 1, 1, 2, 2, 1, 2, 2]


def test_time_matrix_only_video_and_audio_have_time() -> None:
    sequence = pack([COND], multiple=40)
    matrix = time_matrix(sequence, 500, 64)
    idle = torch.cat([torch.ones(32), torch.zeros(32)])
    assert torch.equal(matrix[21:35], idle.expand(14, 64))
    assert torch.equal(matrix[35:], torch.zeros(5, 64))
    assert torch.equal(matrix[0].expand(21, 64), matrix[:21]) and not torch.equal(matrix[0], idle)


def branch() -> BranchInputs:
    generator = torch.Generator().manual_seed(0)
    return BranchInputs(
        text=torch.randn(1, 4, 80, generator=generator),
        video=torch.randn(VIDEO_SHAPE.size, generator=generator),
        audio=torch.randn(1, 9, 64, generator=generator),
        special=torch.randn(1, 2, 80, generator=generator),
        ref_latents=torch.randn(1, 2, 48, 1, 2, 2, generator=generator),
    )


def test_token_matrix_and_unpack_are_inverse_on_latents() -> None:
    given = branch()
    sequence = pack([COND])
    matrix = token_matrix(sequence, [given])
    assert matrix.shape == (35, 80) and torch.equal(matrix[:12, 48:], torch.zeros(12, 32))
    ((video, audio),) = unpack(sequence, matrix[:, :64])
    assert torch.equal(video, given.video) and torch.equal(audio, given.audio)
    assert torch.equal(matrix[31:35, :48], latent_tokens(given.ref_latents[0, 1]))


def test_without_ref_keeps_special_tokens() -> None:
    bare = branch().without_ref()
    matrix = token_matrix(pack([COND]), [bare])
    assert torch.equal(matrix[26:30], torch.zeros(4, 80)) and torch.equal(matrix[25], bare.special[0, 0])


@pytest.mark.parametrize(
    ("special", "images"), [(None, torch.zeros(1, 1, 48, 1, 2, 2)), (torch.zeros(1, 2, 8), torch.zeros(1, 1, 48, 1, 2, 2))]
)
def test_image_grids_unpaired_is_refused(special: torch.Tensor | None, images: torch.Tensor) -> None:
    with pytest.raises(RequestError, match="pecial tokens"):
        image_grids(special, images)


def test_packed_inputs_slices_rebuild_the_whole() -> None:
    sequence, given = pack([COND]), branch()
    matrix = token_matrix(sequence, [given])
    context = TokenContext(sequence.segments, rope_table(sequence.coords, default_bands(2)), sequence.cu_seqlens)
    pieces = tuple(TokenPiece(run.start, run.modality, features=matrix[run.start : run.stop]) for run in sequence.runs)
    whole = PackedInputs(context, pieces)
    rows, ids = [], []
    for start in range(0, 35, 8):
        part = whole.slice(start, min(start + 8, 35))
        assert [piece.start for piece in part.pieces] == [0, *[piece.stop for piece in part.pieces[:-1]]]
        assert part.total == part.pieces[-1].stop and part.context.cu_seqlens.total == 35
        rows += [piece.rows for piece in part.pieces]
        ids.append(part.context.segments.ids)
    assert torch.equal(torch.cat(rows), matrix) and torch.equal(torch.cat(ids), sequence.segments.ids)
