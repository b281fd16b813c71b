"""The Triton hyper-connection against reference.py, on the GPU or in the interpreter: odd sizes, every setting, poisoned outputs."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from magi2_kernels.common.choice import using
from magi2_kernels.common.segments import ModalitySegments
from magi2_kernels.hyper_connection import (
    HyperCoefficients,
    HyperWeights,
    fold_norm,
    hyper_branch_input,
    hyper_coefficients,
    hyper_connect,
    hyper_connect_mix,
    hyper_mix,
    hyper_projection,
)

RUNS = ((0, 5, 2), (5, 26, 0), (26, 27, 1), (27, 45, 0))
LIMITS = {torch.float32: {"rtol": 3e-5, "atol": 3e-5}, torch.bfloat16: {"rtol": 1.6e-2, "atol": 1.6e-2}}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results start as NaN: an element that a kernel does not write shows."""
    empty = torch.empty

    def filled(*args, **kwargs) -> Tensor:
        out = empty(*args, **kwargs)
        return out.fill_(math.nan) if out.is_floating_point() else out

    monkeypatch.setattr(torch, "empty", filled)


def rand(device: str, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device=device, dtype=dtype)


def make_weights(device: str, n: int, channels: int, folded: Tensor | None = None) -> HyperWeights:
    return HyperWeights(
        phi=rand(device, n * channels, n * (n + 2), seed=1),
        alpha_pre=rand(device, 1, seed=2),
        alpha_post=rand(device, 1, seed=3),
        alpha_res=rand(device, 1, seed=4),
        bias_pre=rand(device, n, seed=5),
        bias_post=rand(device, n, seed=6),
        bias_res=rand(device, n, n, seed=7),
        folded=folded,
    )


def segments_of(device: str, rows: int) -> ModalitySegments:
    return ModalitySegments.build(RUNS, device=device).slice(0, rows)


def types(device: str) -> list[torch.dtype]:
    # The interpreter's bf16 products and stores are not those of a GPU.
    return [torch.float32] if device == "cpu" else [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize(("rows", "channels"), [(45, 24), (7, 19), (1, 8)])
@pytest.mark.parametrize("per_modality", [False, True])
def test_hyper_projection_triton_equals_reference(triton_device: str, n: int, rows: int, channels: int, per_modality: bool) -> None:
    segments = segments_of(triton_device, rows) if per_modality else None
    weights = make_weights(triton_device, n, channels)
    norm = rand(triton_device, (3 if per_modality else 1) * n * channels, seed=9)
    for dtype in types(triton_device):
        streams = rand(triton_device, rows, n, channels, seed=8, dtype=dtype)
        want = hyper_projection(streams, norm, weights.phi, segments)
        with using("triton"):
            got = hyper_projection(streams, norm, weights.phi, segments)
        # bf16 streams meet a phi of 16 bits.
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * math.sqrt(n * channels))


@pytest.mark.parametrize("n", [2, 3, 4])
def test_hyper_coefficients_triton_equals_reference(triton_device: str, n: int) -> None:
    weights = make_weights(triton_device, n, 5)
    projection = rand(triton_device, 45, n * (n + 2), seed=3) * 30
    want = hyper_coefficients(projection, weights, width=n * 5, iterations=20, out_dtype=torch.float32)
    with using("triton"):
        got = hyper_coefficients(projection, weights, width=n * 5, iterations=20, out_dtype=torch.float32)
    for name in ("pre", "post", "res"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name), **LIMITS[torch.float32])


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize(("rows", "channels"), [(45, 24), (7, 19)])
@pytest.mark.parametrize("blocks", [(1, 1), (1, 3), (3, 3)])
def test_hyper_mix_triton_equals_reference(triton_device: str, n: int, rows: int, channels: int, blocks: tuple[int, int]) -> None:
    segments = segments_of(triton_device, rows)
    norm, branch_norm = rand(triton_device, blocks[0] * n * channels, seed=9), rand(triton_device, blocks[1] * channels, seed=10)
    for dtype in types(triton_device):
        streams = rand(triton_device, rows, n, channels, seed=8, dtype=dtype)
        plain = make_weights(triton_device, n, channels)
        want, want_mix = hyper_mix(streams, plain, norm, branch_norm, segments)
        with using("triton"):
            folded = fold_norm(norm, plain.phi, dtype)
            for weights in (plain, make_weights(triton_device, n, channels, folded)):
                got, mix = hyper_mix(streams, weights, norm, branch_norm, segments)
                assert got.dtype == mix.res.dtype == dtype
                torch.testing.assert_close(got, want, **LIMITS[dtype])
                for name in ("pre", "post", "res"):
                    torch.testing.assert_close(getattr(mix, name), getattr(want_mix, name), **LIMITS[dtype])


@pytest.mark.parametrize("n", [1, 3, 4])
@pytest.mark.parametrize(("rows", "channels"), [(45, 24), (7, 19)])
def test_hyper_connect_triton_equals_reference(triton_device: str, n: int, rows: int, channels: int) -> None:
    for dtype in types(triton_device):
        streams = rand(triton_device, rows, n, channels, dtype=dtype)
        branch = rand(triton_device, rows, 2 * channels, seed=1, dtype=dtype)[:, ::2]
        mix = HyperCoefficients(*(rand(triton_device, rows, *tail, seed=2, dtype=dtype) for tail in ((n,), (n,), (n, n))))
        want, want_in = hyper_connect(streams, branch, mix), hyper_branch_input(streams, mix.pre)
        with using("triton"):
            got, got_in = hyper_connect(streams, branch, mix), hyper_branch_input(streams, mix.pre)
        # One rounding each: at most one bf16 step apart.
        limit = LIMITS[torch.float32] if dtype == torch.float32 else {"rtol": 2**-7, "atol": 1e-3}
        torch.testing.assert_close(got, want, **limit)
        torch.testing.assert_close(got_in, want_in, **limit)


@pytest.mark.parametrize("n", [1, 3, 4, 5])
@pytest.mark.parametrize(("rows", "channels"), [(45, 40), (7, 19)])
@pytest.mark.parametrize("blocks", [(1, 1), (1, 3), (3, 3)])
def test_hyper_connect_mix_triton_equals_reference(triton_device: str, n: int, rows: int, channels: int, blocks: tuple[int, int]) -> None:
    segments = segments_of(triton_device, rows)
    norm, branch_norm = rand(triton_device, blocks[0] * n * channels, seed=9), rand(triton_device, blocks[1] * channels, seed=10)
    for dtype in types(triton_device):
        streams = rand(triton_device, rows, n, channels, seed=8, dtype=dtype)
        branch = rand(triton_device, rows, 2 * channels, seed=1, dtype=dtype)[:, ::2]
        mix = HyperCoefficients(*(rand(triton_device, rows, *tail, seed=2, dtype=dtype) for tail in ((n,), (n,), (n, n))))
        plain = make_weights(triton_device, n, channels)
        want, want_in, want_mix = hyper_connect_mix(streams, branch, mix, plain, norm, branch_norm, segments)
        assert torch.equal(want, hyper_connect(streams, branch, mix))
        with using("triton"):
            folded = make_weights(triton_device, n, channels, fold_norm(norm, plain.phi, dtype))
            got, got_in, got_mix = hyper_connect_mix(streams, branch, mix, folded, norm, branch_norm, segments)
        limit = LIMITS[torch.float32] if dtype == torch.float32 else {"rtol": 2**-7, "atol": 1e-3}
        torch.testing.assert_close(got, want, **limit)
        torch.testing.assert_close(got_in, want_in, **(LIMITS[dtype] if dtype == torch.float32 else {"rtol": 3e-2, "atol": 6e-2}))
        for name in ("pre", "post", "res"):
            torch.testing.assert_close(getattr(got_mix, name), getattr(want_mix, name), **LIMITS[dtype])


def test_hyper_ops_triton_no_rows(triton_device: str) -> None:
    n, channels = 4, 8
    streams = rand(triton_device, 0, n, channels)
    weights, norm, branch_norm = make_weights(triton_device, n, channels), torch.zeros(3 * n * channels), torch.zeros(channels)
    with using("triton"):
        normed, mix = hyper_mix(
            streams, weights, norm.to(triton_device), branch_norm.to(triton_device), ModalitySegments.build((), device=triton_device)
        )
        assert normed.shape == (0, channels) and mix.res.shape == (0, n, n)
        assert hyper_connect(streams, normed, mix).shape == streams.shape
        runs = ModalitySegments.build((), device=triton_device)
        after = hyper_connect_mix(streams, normed, mix, weights, norm.to(triton_device), branch_norm.to(triton_device), runs)
        assert after[0].shape == streams.shape and after[1].shape == (0, channels)


def test_hyper_mix_triton_rows_do_not_depend_on_their_neighbours(triton_device: str) -> None:
    n, channels = 4, 40
    dtype = types(triton_device)[-1]
    streams = rand(triton_device, 45, n, channels, dtype=dtype)
    segments = segments_of(triton_device, 45)
    norm, branch_norm = rand(triton_device, 3 * n * channels, seed=9), rand(triton_device, 3 * channels, seed=10)
    weights = make_weights(triton_device, n, channels)
    with using("triton"):
        whole, mix = hyper_mix(streams, weights, norm, branch_norm, segments)
        for start, stop in ((0, 6), (6, 31), (31, 45)):
            part, part_mix = hyper_mix(streams[start:stop], weights, norm, branch_norm, segments.slice(start, stop))
            assert torch.equal(part, whole[start:stop]) and torch.equal(part_mix.res, mix.res[start:stop])
        everything = hyper_connect_mix(streams, whole, mix, weights, norm, branch_norm, segments)
        for rows in (slice(0, 6), slice(6, 31), slice(31, 45)):
            cut = HyperCoefficients(mix.pre[rows], mix.post[rows], mix.res[rows])
            found = hyper_connect_mix(streams[rows], whole[rows], cut, weights, norm, branch_norm, segments.slice(rows.start, rows.stop))
            assert torch.equal(found[0], everything[0][rows]) and torch.equal(found[1], everything[1][rows])
            assert torch.equal(found[2].res, everything[2].res[rows])


def test_hyper_mix_triton_absent_modality_may_hold_nan(triton_device: str) -> None:
    n, channels = 4, 8
    streams = rand(triton_device, 20, n, channels)
    norm, branch_norm = rand(triton_device, 3 * n * channels, seed=9), rand(triton_device, 3 * channels, seed=10)
    norm.view(3, -1)[1] = branch_norm.view(3, -1)[1] = math.nan
    segments = ModalitySegments.build(((0, 9, 0), (9, 20, 2)), device=triton_device)
    with using("triton"):
        normed, mix = hyper_mix(streams, make_weights(triton_device, n, channels), norm, branch_norm, segments)
        after = hyper_connect_mix(streams, normed, mix, make_weights(triton_device, n, channels), norm, branch_norm, segments)
    # Modality 1 lies between the two that meet in a tile; none of its weights may reach a row.
    assert torch.isfinite(normed).all() and torch.isfinite(mix.res).all()
    assert all(torch.isfinite(found).all() for found in (*after[:2], after[2].res))


def test_hyper_mix_triton_wrong_fold_is_refused(triton_device: str) -> None:
    streams, norm = rand(triton_device, 3, 4, 8), rand(triton_device, 32)
    weights = make_weights(triton_device, 4, 8, folded=torch.zeros(3, 32, 32, device=triton_device))
    with using("triton"), pytest.raises(ValueError, match="folded phi"):
        hyper_mix(streams, weights, norm, rand(triton_device, 8))


@pytest.mark.gpu
def test_hyper_projection_every_setting_is_right(triton_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the released size: a race that an earlier form of this kernel had showed on the device only, and best with many tiles."""
    from magi2_kernels.hyper_connection import kernel

    n, channels, rows, checked = 4, 3072, 60_000, 3000
    streams = torch.randn(rows, n, channels, device=triton_device, dtype=torch.bfloat16)
    norm, phi = rand(triton_device, n * channels, seed=1) * 0.1, rand(triton_device, n * channels, 24, seed=2) * 0.01
    wide = streams[-checked:].double().flatten(1)
    wide = wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + 1e-6)
    want = (wide * (1 + norm.double())) @ phi.double()
    folded = kernel.fold_norm(norm, phi, torch.bfloat16)
    for name, tile in dict(kernel.PROJECT).items():
        if name == "interpreter":
            continue
        monkeypatch.setattr(kernel, "PROJECT", {"default": tile})
        for _ in range(5):
            got = kernel._run_project(streams, folded, None, [], 0)
            assert ((got[-checked:].double() - want).norm() / want.norm()).item() < 2e-5, f"setting {name} is wrong on this card"


@pytest.mark.gpu
def test_hyper_connect_project_every_setting_is_right(triton_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the released size, against the two passes, which the tests above hold to the reference; coefficients as fp32 tells them apart."""
    from magi2_kernels.hyper_connection import kernel

    n, channels, rows = 4, 3072, 60_000
    streams = torch.randn(rows, n, channels, device=triton_device, dtype=torch.bfloat16)
    branch = torch.randn(rows, channels, device=triton_device, dtype=torch.bfloat16)
    mix = HyperCoefficients(*(rand(triton_device, rows, *tail, seed=2, dtype=torch.bfloat16) for tail in ((n,), (n,), (n, n))))
    norm, phi = rand(triton_device, n * channels, seed=1) * 0.1, rand(triton_device, n * channels, 24, seed=2) * 0.5
    folded = kernel.fold_norm(norm, phi, torch.bfloat16)
    numbers = kernel._numbers(make_weights(triton_device, n, channels))
    want = kernel._run_connect(streams, branch, mix.post, mix.res)
    want_mix = kernel._run_project(want, folded, None, numbers, 20).float()
    for name, tile in dict(kernel.CONNECT_PROJECT).items():
        if name == "interpreter":
            continue
        monkeypatch.setattr(kernel, "_one_pass", lambda _streams, tile=tile: tile)
        for _ in range(5):
            got, got_mix = kernel._run_connect_project(streams, branch, mix.post, mix.res, folded, None, numbers, 20)
            assert torch.equal(got, want), f"setting {name} connects otherwise on this card"
            # One bf16 step where a sum lies at the edge of two.
            apart = (got_mix.float() - want_mix).abs()
            assert apart.max() < 1.6e-2 and (apart > 0).float().mean() < 0.01, f"setting {name} is wrong on this card"


def test_layer_prepare_folds_beside_the_checkpoint(triton_device: str) -> None:
    from magi2_core.config import PreviewConfig
    from magi2_core.model.hyper_connection import HyperConnectedLayer, HyperState
    from magi2_core.model.layers import ModalityRMSNorm

    config = PreviewConfig(hidden_size=24)
    layer, norm = HyperConnectedLayer(config, 3), ModalityRMSNorm(24, 3)
    for index, tensor in enumerate([*layer.parameters(), *norm.parameters()]):
        tensor.data.copy_(rand("cpu", *tensor.shape, seed=index) * 0.3)
    layer.to(triton_device), norm.to(triton_device)
    streams, segments, names = rand(triton_device, 45, 4, 24), segments_of(triton_device, 45), set(layer.state_dict())

    def run() -> HyperState:
        first = layer.through("attn", HyperState(streams), segments, norm, lambda x: 2 * x)
        return layer.through("mlp", first, segments, norm, lambda x: 2 * x)

    want = run()
    with using("triton"):
        layer.prepare(torch.float32)
        got = run()
    assert layer.folded_mlp.shape[0] == 3 and set(layer.state_dict()) == names
    for name in ("streams", "branch"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name), **LIMITS[torch.float32])
    torch.testing.assert_close(got.connected(), want.connected(), **LIMITS[torch.float32])


def test_hyper_mix_numbers_may_be_strided_and_must_be_all_there(triton_device: str) -> None:
    n, channels = 2, 8
    streams = torch.randn(5, n, channels, generator=torch.Generator().manual_seed(0)).to(triton_device)
    numbers = {
        name: torch.randn(2 * count, generator=torch.Generator().manual_seed(count)).to(triton_device)[::2]
        for name, count in (("alpha_pre", 1), ("alpha_post", 1), ("alpha_res", 1), ("bias_pre", n), ("bias_post", n))
    }
    phi = torch.randn(n * channels, n * (n + 2), generator=torch.Generator().manual_seed(9)).to(triton_device)
    weights = HyperWeights(phi=phi, bias_res=torch.ones(n, n, device=triton_device).t(), **numbers)
    norms = (torch.zeros(n * channels, device=triton_device), torch.zeros(channels, device=triton_device))
    want, _ = hyper_mix(streams, weights, *norms)
    with using("triton"):
        got, _ = hyper_mix(streams, weights, *norms)
        with pytest.raises(ValueError, match="bias_post has 1 numbers, expected 2"):
            hyper_mix(streams, replace(weights, bias_post=numbers["bias_post"][:1]), *norms)
        with pytest.raises(ValueError, match="alpha_pre has 0 numbers, expected 1"):
            hyper_mix(streams, replace(weights, alpha_pre=numbers["alpha_pre"][:0]), *norms)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
