"""Hyper-connections against a token-by-token float64 statement."""

import math

import pytest
import torch
from torch import Tensor

from magi2_kernels.common.segments import ModalitySegments
from magi2_kernels.hyper_connection import (
    HyperCoefficients,
    HyperWeights,
    hyper_branch_input,
    hyper_coefficients,
    hyper_connect,
    hyper_projection,
    reference,
)

N, C, S = 4, 9, 7
SEGMENTS = ModalitySegments.build(((0, 2, 2), (2, 6, 0), (6, 7, 1)))


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weights() -> HyperWeights:
    return HyperWeights(
        phi=rand(N * C, N * (N + 2), seed=1),
        alpha_pre=rand(1, seed=2),
        alpha_post=rand(1, seed=3),
        alpha_res=rand(1, seed=4),
        bias_pre=rand(N, seed=5),
        bias_post=rand(N, seed=6),
        bias_res=rand(N, N, seed=7),
    )


def sinkhorn64(logits: list[list[float]], rounds: int) -> list[list[float]]:
    top = max(max(row) for row in logits)
    m = [[math.exp(value - top) for value in row] for row in logits]
    for _ in range(rounds):
        columns = [sum(m[i][j] for i in range(N)) + 1e-12 for j in range(N)]
        m = [[m[i][j] / columns[j] for j in range(N)] for i in range(N)]
        rows = [sum(row) + 1e-12 for row in m]
        m = [[m[i][j] / rows[i] for j in range(N)] for i in range(N)]
    return m


@pytest.mark.parametrize("rounds", [1, 20])
def test_hyper_coefficients_follow_the_formula(rounds: int) -> None:
    streams, norm, w = rand(S, N, C, seed=8), rand(3 * N * C, seed=9), weights()
    projection = hyper_projection(streams, norm, w.phi, SEGMENTS)
    got = hyper_coefficients(projection, w, width=N * C, iterations=rounds, out_dtype=torch.float32)
    for row, modality in enumerate(SEGMENTS.ids.tolist()):
        flat = streams[row].flatten().double()
        normed = flat / math.sqrt(float((flat * flat).mean()) + 1e-6) * (1 + norm.view(3, -1)[modality].double())
        h = (normed @ w.phi.double()) / math.sqrt(N * C)
        pre = torch.sigmoid(w.alpha_pre.double() * h[:N] + w.bias_pre.double())
        post = 2 * torch.sigmoid(w.alpha_post.double() * h[N : 2 * N] + w.bias_post.double())
        res = sinkhorn64((w.alpha_res.double() * h[2 * N :].view(N, N) + w.bias_res.double()).tolist(), rounds)
        for mine, want in ((got.pre[row], pre), (got.post[row], post), (got.res[row], torch.tensor(res, dtype=torch.float64))):
            torch.testing.assert_close(mine.double(), want, rtol=2e-5, atol=1e-6)


def test_hyper_connect_mixes_source_j_into_target_i() -> None:
    streams, branch = rand(S, N, C), rand(S, C, seed=1)
    mix = HyperCoefficients(rand(S, N, seed=2), rand(S, N, seed=3), rand(S, N, N, seed=4))
    want = torch.zeros(S, N, C, dtype=torch.float64)
    for s in range(S):
        for i in range(N):
            want[s, i] = mix.post[s, i].double() * branch[s].double()
            for j in range(N):
                want[s, i] += mix.res[s, i, j].double() * streams[s, j].double()
    torch.testing.assert_close(hyper_connect(streams, branch, mix).double(), want, rtol=1e-5, atol=1e-6)


def test_hyper_connect_rounds_once() -> None:
    streams, branch = rand(S, N, C).bfloat16(), rand(S, C, seed=1).bfloat16()
    mix = HyperCoefficients(*(rand(*shape, seed=2).bfloat16() for shape in ((S, N), (S, N), (S, N, N))))
    wide = HyperCoefficients(mix.pre.float(), mix.post.float(), mix.res.float())
    assert torch.equal(hyper_connect(streams, branch, mix), hyper_connect(streams.float(), branch.float(), wide).bfloat16())
    assert torch.equal(hyper_branch_input(streams, mix.pre), hyper_branch_input(streams.float(), wide.pre).bfloat16())


def test_hyper_ops_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    streams, branch, norm, w = rand(S, N, C), rand(S, C, seed=1), rand(3 * N * C, seed=9), weights()

    def everything() -> list[Tensor]:
        projection = hyper_projection(streams, norm, w.phi, SEGMENTS)
        mix = hyper_coefficients(projection, w, width=N * C, out_dtype=torch.float32)
        return [projection, hyper_branch_input(streams, mix.pre), hyper_connect(streams, branch, mix)]

    whole = everything()
    monkeypatch.setattr(reference, "CHUNK_ROWS", 3)
    for chunked, want in zip(everything(), whole, strict=True):
        torch.testing.assert_close(chunked, want, rtol=1e-5, atol=1e-5)


def test_hyper_projection_wrong_phi_is_refused() -> None:
    with pytest.raises(ValueError, match="phi is"):
        hyper_projection(rand(S, N, C), rand(N * C), rand(N * C, 5))


def test_hyper_connect_wrong_shapes_are_refused() -> None:
    from magi2_kernels.hyper_connection import HyperCoefficients

    streams, branch = torch.ones(9, 2, 4), torch.ones(9, 4)
    with pytest.raises(ValueError, match="pre has shape"):
        hyper_branch_input(streams, torch.ones(3, 2))
    for post, res, name in ((torch.ones(3, 2), torch.ones(9, 2, 2), "post"), (torch.ones(9, 2), torch.ones(9, 2, 3), "res")):
        with pytest.raises(ValueError, match=f"{name} has shape"):
            hyper_connect(streams, branch, HyperCoefficients(torch.ones(9, 2), post, res))
