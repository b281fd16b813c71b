"""Every attention provider that is here against a float64 softmax: result, log-sum, short and empty sequences, a strided v; and the choice."""

import importlib.util
import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from magi2_kernels.common import choice
from magi2_kernels.common.sequences import CuSeqlens
from magi2_kernels.sink_attention import packed_attention, providers
from magi2_kernels.sink_attention.providers import Target, resolve

ENDS = (0, 5, 5, 6, 139, 400)
"""Sequences shorter than a tile (one of them empty) and longer ones of odd lengths."""
H = 3


def target(device: str, dtype: torch.dtype, head_dim: int) -> Target:
    return Target(device=torch.device(device), dtype=dtype, head_dim=head_dim)


def exact(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = torch.zeros(q.shape, dtype=torch.float64), torch.zeros(q.shape[:2], dtype=torch.float64)
    q, k, v = (tensor.double().cpu() for tensor in (q, k, v))
    for start, stop in itertools.pairwise(ENDS):
        scores = torch.einsum("qhd,khd->qhk", q[start:stop], k[start:stop]) / q.shape[2] ** 0.5
        lse[start:stop] = scores.logsumexp(-1)
        out[start:stop] = torch.einsum("qhk,khd->qhd", scores.softmax(-1), v[start:stop])
    return out, lse


def error(got: Tensor, want: Tensor) -> float:
    return ((got.double().cpu() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("head_dim", [16, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", providers.CHECKS)
def test_packed_attention_equals_float64(name: str, dtype: torch.dtype, head_dim: int) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    reason = providers.CHECKS[name](target(device, dtype, head_dim))
    if reason:
        pytest.skip(f"{name}: {reason}")
    qkv = torch.randn(ENDS[-1], 3, H, head_dim, generator=torch.Generator().manual_seed(2)).mul(1.5).to(device, dtype)
    q, k, v = qkv[:, 0].contiguous(), qkv[:, 1].contiguous(), qkv[:, 2]
    assert not v.is_contiguous()
    before = v.clone()
    with providers.using(name):
        out, lse = packed_attention(q, k, v, CuSeqlens.build(ENDS, device))
    want, want_lse = exact(q, k, v)
    assert out.dtype == dtype and lse.dtype == torch.float32 and out.is_contiguous() and lse.shape == (ENDS[-1], H)
    limit = 2e-5 if dtype == torch.float32 else 6e-3
    assert error(out, want) < limit, error(out, want)
    assert (lse.double().cpu() - want_lse).abs().max() < (1e-4 if dtype == torch.float32 else 2e-2)
    # Every row, so that an unwritten or swapped one cannot hide in the norm.
    assert (out.double().cpu() - want).norm(dim=-1).max() < 30 * limit * want.norm(dim=-1).mean()
    assert torch.equal(v, before)


def test_resolve_cpu_takes_the_reference() -> None:
    assert resolve("auto", target("cpu", torch.float32, 128)).name == "reference"


def test_resolve_takes_the_first_that_serves_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(providers.CHECKS, "fa3", lambda _: "its package is not installed: pip install fa3-fwd")
    monkeypatch.setitem(providers.CHECKS, "cudnn", lambda _: None)
    found = resolve("auto", target("meta", torch.bfloat16, 128))
    assert found.name == "cudnn" and "not fa3: its package is not installed: pip install fa3-fwd" in found.reason


@pytest.mark.parametrize(
    ("name", "says"),
    [("fa3", "needs a GPU"), ("mate", "Moore Threads"), ("cudnn", "needs a GPU"), ("nonsense", "unknown. Use auto, fa3")],
)
def test_resolve_refuses_what_is_not_there(name: str, says: str) -> None:
    with pytest.raises((RuntimeError, ValueError), match=says):
        resolve(name, target("cpu", torch.bfloat16, 128))


def test_resolve_refuses_fp32_for_fa3_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Target, "capability", property(lambda self: (9, 0)))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name in providers.FA3_MODULES else None)
    with pytest.raises(RuntimeError, match="takes bfloat16, this model is float32: use attention 'reference'"):
        resolve("fa3", target("meta", torch.float32, 128))
    assert resolve("fa3", target("meta", torch.bfloat16, 128)).name == "fa3"


def test_using_restores() -> None:
    before = providers.chosen()
    with pytest.raises(KeyError), providers.using("flash"):
        assert providers.chosen() == "flash"
        raise KeyError
    assert providers.chosen() == before


def test_choose_is_another_choice_than_the_kernels() -> None:
    with providers.using("flash"):
        assert (providers.chosen(), choice.chosen()) == ("flash", "reference")
        with pytest.raises(ValueError, match=r"attention 'triton' is unknown\. Use one of fa3,"):
            providers.choose("triton")
        assert providers.chosen() == "flash"


def test_chosen_is_seen_by_a_compiled_function() -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def add(x: Tensor) -> Tensor:
        return x + (1 if providers.chosen() == "reference" else 2)

    assert add(torch.zeros(1)) == 1
    with providers.using("flash"):
        assert add(torch.zeros(1)) == 2


def test_adapter_of_the_fa3_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """fa3 and mate pass the documented arguments and read the documented results: a stand-in of that interface computes exactly."""
    from magi2_kernels.sink_attention import libraries, reference

    class Standin:
        @staticmethod
        def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options):
            assert options == {"softmax_scale": 16**-0.5, "causal": False, "return_attn_probs": True}
            assert max_seqlen_q == max_seqlen_k == 261 and cu_seqlens_q is cu_seqlens_k
            out, lse = reference.packed_attention(q, k, v, CuSeqlens.build(cu_seqlens_q.tolist()), scale=options["softmax_scale"])
            return out, lse.t().contiguous()

    monkeypatch.setattr(libraries.importlib, "import_module", lambda name: Standin)
    q, k, v = torch.randn(3, ENDS[-1], H, 16, generator=torch.Generator().manual_seed(2)).unbind(0)
    want, want_lse = exact(q, k, v)
    cu = torch.tensor(ENDS, dtype=torch.int32)
    out, lse = libraries.mate(q, k, v, cu, ENDS, 16**-0.5)
    assert error(out, want) < 1e-5 and error(lse.t(), want_lse) < 1e-5


@pytest.mark.parametrize(
    ("capability", "name", "says"),
    [((8, 0), "fa3", "needs a Hopper card"), ((7, 5), "cudnn", "compute capability 8"), ((7, 5), "flash", "compute capability 8")],
)
def test_resolve_older_cards_are_told_what_they_lack(capability: tuple[int, int], name: str, says: str) -> None:
    card = SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.bfloat16, head_dim=128, capability=capability)
    with pytest.raises(RuntimeError, match=says):
        resolve(name, card)
