"""Grid-window attention of the refiner: block neighbourhoods plus a tail that sees and is seen by all (spec components.md 1.6)."""

from torch import Tensor

from ..common.checks import check_rank
from ..common.choice import implementation
from .layout import BlockLayout

FILES = {"reference": "reference", "triton": "library"}


def _check(q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_rank(name, tensor, 3)
        if tensor.shape[0] != layout.num_tokens:
            raise ValueError(
                f"{name} has {tensor.shape[0]} tokens, the layout {layout.num_tokens}: pass the whole sequence in block order."
            )
        if tensor.dtype != q.dtype or tensor.device != q.device or tensor.shape[2] != q.shape[2]:
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device} but q is {q.dtype} {tuple(q.shape)} on {q.device}: "
                "type, head width and device must agree."
            )
    if k.shape != v.shape or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"k {tuple(k.shape)} and v {tuple(v.shape)} must agree, and their heads must divide the {q.shape[1]} of q.")


def block_attention(q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, *, scale: float | None = None) -> Tensor:
    """Softmax attention of every query over exactly the keys that `layout` gives it; not causal.

    Args:
        q: [S, H, Dh] in block order, tail last; may be a strided view.
        k, v: [S, Hkv, Dh]; query head i uses key/value head i // (H / Hkv).
        layout: neighbour lists over the S tokens.
        scale: factor of the scores; 1 / sqrt(Dh) when None.

    Returns:
        [S, H, Dh] in the type of `q`, softmax and sums in fp32.
    """
    _check(q, k, v, layout)
    scale = q.shape[2] ** -0.5 if scale is None else scale
    return implementation(__name__, FILES).block_attention(q, k, v, layout, scale)
