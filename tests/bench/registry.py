"""The ops that run.py knows: one entry an op, gathered from the ops_*.py files beside this one.

An entry makes inputs of the released widths for a shape ("272p", "540p": both guidance branches; "rank": one of 8), and runs the public
function under whichever implementation is chosen. FLOPs count multiply and add; bytes count each input read once, each output written once, and of
the hyper-connection what each of its passes has to read and write.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SHAPES = ("272p", "540p", "rank")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One op. `reference` is what it is checked and compared with; by default the same call under the reference implementation."""

    name: str
    make: Callable[[str], Any]
    run: Callable[[Any], list[Any]]
    bytes: Callable[[Any], float] | None = None
    flops: Callable[[Any], float] | None = None
    tolerance: float = 6e-3
    reference: Callable[[Any], list[Any]] | None = None
    check: Callable[[Any], float] | None = None
    """Error measured another way than by `reference`, on the same inputs."""
    context: Callable[[], Any] | None = None
    """What is chosen around `run`, besides the Triton kernels."""
    upstream: str | None = None
    """Name of the public reference's op in upstream.py."""


UPSTREAM_OF = {
    "half layer": "half_layer",
    "half layer between branches": "half_layer",
    "qk_norm_rope": "qk_norm_rope",
    "swiglu7": "swiglu7",
    "modality_rms_norm": "modality_rms_norm",
}


def _memory_entry(op: Any, shapes: dict[str, tuple[int, int]]) -> Entry:
    def make(shape: str) -> Any:
        rows, text = shapes[shape]
        return rows, op.make(rows, text, "cuda")

    return Entry(
        name=op.name,
        make=make,
        run=lambda made: op.run(made[1]),
        bytes=lambda made: op.bytes_per_token * made[0],
        flops=(lambda made: op.flops_per_token * made[0]) if op.flops_per_token else None,
        tolerance=op.tolerance,
        upstream=UPSTREAM_OF.get(op.name),
    )


def entries() -> list[Entry]:
    """All entries; an ops file that is not there is an error, not a shorter list."""
    import ops_attention
    import ops_memory
    import ops_moe

    found = [*ops_attention.entries(), *ops_moe.entries(), *(_memory_entry(op, ops_memory.SHAPES) for op in ops_memory.ENTRIES)]
    assert len({entry.name for entry in found}) == len(found), "two entries have one name"
    return found
