"""Modality runs, sequence ends, the implementation choice."""

import pytest
import torch

from magi2_kernels.common import choice
from magi2_kernels.common.segments import ModalitySegments
from magi2_kernels.common.sequences import CuSeqlens
from magi2_kernels.grouped_linear import grouped_linear
from magi2_kernels.swiglu import swiglu7

RUNS = ((0, 5, 0), (5, 5, 1), (5, 8, 2), (8, 9, 2), (9, 14, 0))


def test_segments_build_drops_empty_and_joins_equal_runs() -> None:
    segments = ModalitySegments.build(RUNS)
    assert segments.runs == ((0, 5, 0), (5, 9, 2), (9, 14, 0))
    assert segments.ids.tolist() == [0] * 5 + [2] * 4 + [0] * 5
    assert segments.ids.dtype == torch.int32
    assert segments.runs_of(0) == ((0, 5), (9, 14))
    assert segments.runs_of(1) == ()


@pytest.mark.parametrize("runs", [[(1, 2, 0)], [(0, 2, 0), (3, 4, 0)], [(0, 2, 0), (2, 1, 0)], [(0, 2, 3)]])
def test_segments_build_refuses_gaps_and_unknown_modalities(runs: list) -> None:
    with pytest.raises(ValueError):
        ModalitySegments.build(runs)


def test_segments_slice_every_range_has_the_ids_of_the_whole() -> None:
    segments = ModalitySegments.build(RUNS)
    for start in range(15):
        for stop in range(start, 15):
            part = segments.slice(start, stop)
            assert part.total == stop - start
            again = ModalitySegments.build(part.runs)
            assert again.ids.tolist() == segments.ids[start:stop].tolist() == part.ids.tolist()


def test_segments_slice_outside_is_refused() -> None:
    with pytest.raises(ValueError, match="not inside"):
        ModalitySegments.build(RUNS).slice(3, 15)


def test_segments_from_ids_inverts_ids() -> None:
    ids = torch.tensor([2, 2, 0, 1, 1, 0], dtype=torch.int32)
    assert ModalitySegments.from_ids(ids).runs == ((0, 2, 2), (2, 3, 0), (3, 5, 1), (5, 6, 0))
    assert ModalitySegments.from_ids(ids[:0]).total == 0


def test_cu_seqlens_build_bounds_and_longest() -> None:
    ends = CuSeqlens.build([0, 4, 4, 9])
    assert ends.bounds == ((0, 4), (4, 4), (4, 9))
    assert (ends.total, ends.max_length, ends.tensor.dtype) == (9, 5, torch.int32)


@pytest.mark.parametrize("ends", [[], [1, 2], [0, 3, 2]])
def test_cu_seqlens_build_refuses_falling_ends(ends: list) -> None:
    with pytest.raises(ValueError, match="ascending"):
        CuSeqlens.build(ends)


def test_choose_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match="reference"):
        choice.choose("fast")
    assert choice.chosen() == "reference"


def test_implementation_missing_one_raises_and_never_falls_back() -> None:
    with pytest.raises(RuntimeError, match="some_op has no 'reference'"):
        choice.implementation("some_op", {"triton": "kernel"})


def test_using_restores_the_choice_after_an_error() -> None:
    pytest.importorskip("triton", reason="Triton has no wheel for this system")
    with pytest.raises(ZeroDivisionError), choice.using("triton"):
        assert choice.chosen() == "triton"
        raise ZeroDivisionError
    assert choice.chosen() == "reference"


def test_ops_refuse_misfitting_arguments() -> None:
    segments = ModalitySegments.build(((0, 4, 0),))
    with pytest.raises(ValueError, match="segments cover 4 rows"):
        grouped_linear(torch.zeros(5, 2), torch.zeros(6, 2), segments)
    with pytest.raises(ValueError, match="multiple of 3"):
        grouped_linear(torch.zeros(4, 2), torch.zeros(4, 2), segments)
    with pytest.raises(ValueError, match="width and type"):
        grouped_linear(torch.zeros(4, 2), torch.zeros(6, 2, dtype=torch.bfloat16), segments)
    with pytest.raises(ValueError, match=r"onto is torch.float32 \(4, 3\), expected torch.float32 \(4, 2\)"):
        grouped_linear(torch.zeros(4, 2), torch.zeros(6, 2), segments, onto=torch.zeros(4, 3))
    with pytest.raises(ValueError, match="even number"):
        swiglu7(torch.zeros(3, 5))
