"""Benchmark entries of the memory-bound ops: hyper-connection, norms, rotary, swiglu, and the grouped linear beside them.

Every entry makes inputs for a number of tokens at the released width and runs the op's public function under whichever
implementation is chosen; `check` compares the two on some rows before anything is timed. Bytes count each input read once and each output
written once. `python tests/bench/ops_memory.py --out FILE` measures all entries on the GPU and writes one JSON file.
Legend: S tokens, N streams, C channels.
"""

import argparse
import datetime
import importlib.util
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
N, C, HEADS, HEAD, BANDS = 4, 3072, 24, 128, 96
WIDTH = N * C
SHAPES = {"272p": (31_668, 2496), "540p": (117_684, 2496), "272p rank of 8": (3_960, 312), "540p rank of 8": (14_712, 312)}
"""Packed tokens of both guidance branches, and how many of them are text; a rank of 8 holds one eighth."""
RELEASED_HALF_LAYER_MS = {"540p": 9.4}
"""Half a layer of the released code with its pre_norm, measured on the same card: norm and phi 6.33, branch input 0.83, coefficients
0.34, connect 1.76, norm 0.43 (rounded down to what was measured in one piece). 272p: 1.29 + 0.23 + 0.35 + 0.48 + 0.19."""
RELEASED_HALF_LAYER_MS["272p"] = 2.22
WARMUP, REPEATS = 3, 25
GRAPH_BELOW = 40_000
"""Tokens below which both sides are timed as replayed graphs."""


@dataclass(frozen=True, kw_only=True)
class MemoryOp:
    """One op: `make` inputs for (tokens, text tokens, device), `run` them, bytes a token (weights aside), relative error allowed."""

    name: str
    make: Callable[[int, int, str], dict[str, Any]]
    run: Callable[[dict[str, Any]], list[Tensor]]
    bytes_per_token: int
    tolerance: float = 5e-3
    flops_per_token: int = 0
    parts: tuple[str, ...] = field(default=())


def _rand(*shape: int, device: str, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=device, dtype=dtype).mul_(scale)


def _segments(rows: int, text: int, device: str) -> Any:
    from magi2_kernels.common.segments import ModalitySegments

    # Two items of video, audio and text, as one rank or the whole sequence sees them.
    half, audio = rows // 2, min(250, rows // 8)
    runs, start = [], 0
    for length, words in ((half, text * 4 // 5), (rows - half, text - text * 4 // 5)):
        for modality, count in ((0, length - audio - words), (1, audio), (2, words)):
            runs.append((start, start + count, modality))
            start += count
    return ModalitySegments.build(runs, device=device)


def _make_hyper(rows: int, text: int, device: str, blocks: int = 1) -> dict[str, Any]:
    from magi2_kernels.common.choice import using
    from magi2_kernels.hyper_connection import HyperWeights, fold_norm, hyper_mix

    phi, norm = _rand(WIDTH, N * (N + 2), device=device, scale=0.01), _rand(blocks * WIDTH, device=device, scale=0.1)
    numbers = {f"alpha_{name}": _rand(1, device=device) for name in ("pre", "post", "res")}
    biases = {"bias_pre": _rand(N, device=device), "bias_post": _rand(N, device=device), "bias_res": _rand(N, N, device=device)}
    with using("triton"):
        folded = fold_norm(norm, phi, torch.bfloat16)
    inputs = {
        "streams": _rand(rows, N, C, device=device, dtype=torch.bfloat16),
        "branch": _rand(rows, C, device=device, dtype=torch.bfloat16),
        "weights": HyperWeights(phi=phi, folded=folded, **numbers, **biases),
        "norm": norm,
        "branch_norm": _rand(3 * C, device=device, scale=0.1),
        "segments": _segments(rows, text, device),
    }
    with using("triton"):
        inputs["mix"] = hyper_mix(inputs["streams"], inputs["weights"], norm, inputs["branch_norm"], inputs["segments"])[1]
    return inputs


def _mix(i: dict[str, Any]) -> list[Tensor]:
    from magi2_kernels.hyper_connection import hyper_mix

    normed, mix = hyper_mix(i["streams"], i["weights"], i["norm"], i["branch_norm"], i["segments"])
    return [normed, mix.pre, mix.post, mix.res]


def _connect(i: dict[str, Any]) -> list[Tensor]:
    from magi2_kernels.hyper_connection import hyper_connect

    return [hyper_connect(i["streams"], i["branch"], i["mix"])]


def _half_layer(i: dict[str, Any]) -> list[Tensor]:
    from magi2_kernels.hyper_connection import hyper_connect, hyper_mix

    normed, mix = hyper_mix(i["streams"], i["weights"], i["norm"], i["branch_norm"], i["segments"])
    return [normed, hyper_connect(i["streams"], i["branch"], mix)]


def _make_qk(rows: int, text: int, device: str) -> dict[str, Any]:
    angles = _rand(rows, BANDS // 2, device=device)
    return {
        "qkv": _rand(rows, 3, HEADS, HEAD, device=device, dtype=torch.bfloat16),
        "weights": (_rand(HEAD, device=device, scale=0.1), _rand(HEAD, device=device, scale=0.1)),
        "rope": torch.cat([angles.sin(), angles.cos()], dim=1),
    }


def _qk(i: dict[str, Any]) -> list[Tensor]:
    from magi2_kernels.qk_norm_rope import qk_norm_rope

    return list(qk_norm_rope(i["qkv"][:, 0], i["qkv"][:, 1], *i["weights"], i["rope"]))


def _make_norm(rows: int, text: int, device: str) -> dict[str, Any]:
    return {
        "x": _rand(rows, C, device=device, dtype=torch.bfloat16),
        "weight": _rand(3 * C, device=device, scale=0.1),
        "segments": _segments(rows, text, device),
    }


def _norm(i: dict[str, Any]) -> list[Tensor]:
    from magi2_kernels.modality_rms_norm import modality_rms_norm

    return [modality_rms_norm(i["x"], i["weight"], i["segments"])]


def _swiglu(i: dict[str, Any]) -> list[Tensor]:
    from magi2_kernels.swiglu import swiglu7

    return [swiglu7(i["u"])]


def _make_linear(rows: int, text: int, device: str) -> dict[str, Any]:
    return {
        "x": _rand(rows, C, device=device, dtype=torch.bfloat16),
        "weight": _rand(3 * 2560, C, device=device, scale=C**-0.5, dtype=torch.bfloat16),
        "segments": _segments(rows, text, device),
    }


def _linear(i: dict[str, Any]) -> list[Tensor]:
    from magi2_kernels.grouped_linear import grouped_linear

    return [grouped_linear(i["x"], i["weight"], i["segments"])]


STREAMS, ROW = 2 * WIDTH, 2 * C
ENTRIES = (
    MemoryOp(name="hyper_mix", make=_make_hyper, run=_mix, bytes_per_token=2 * STREAMS + ROW),
    MemoryOp(
        name="hyper_mix, weights per modality", make=lambda r, t, d: _make_hyper(r, t, d, 3), run=_mix, bytes_per_token=2 * STREAMS + ROW
    ),
    MemoryOp(name="hyper_connect", make=_make_hyper, run=_connect, bytes_per_token=2 * STREAMS + ROW),
    MemoryOp(name="half layer", make=_make_hyper, run=_half_layer, bytes_per_token=4 * STREAMS + 2 * ROW),
    MemoryOp(name="qk_norm_rope", make=_make_qk, run=_qk, bytes_per_token=4 * ROW + 4 * BANDS),
    MemoryOp(name="modality_rms_norm", make=_make_norm, run=_norm, bytes_per_token=2 * ROW),
    MemoryOp(
        name="swiglu7",
        make=lambda rows, text, device: {"u": _rand(rows, 5120, device=device, dtype=torch.bfloat16, scale=3.0)},
        run=_swiglu,
        bytes_per_token=3 * 5120,
    ),
    MemoryOp(
        name="grouped_linear", make=_make_linear, run=_linear, bytes_per_token=ROW + 2 * 2560, flops_per_token=2 * C * 2560, tolerance=1e-2
    ),
)


def timed(run: Callable[[], Any], repeats: int = REPEATS) -> list[float]:
    """Milliseconds of each run by device events, after warm-up."""
    for _ in range(WARMUP):
        run()
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, stop in pairs:
        start.record()
        run()
        stop.record()
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(stop) for start, stop in pairs)


def replayed(run: Callable[[], Any]) -> Callable[[], Any]:
    """The same work as a captured graph, so that short runs are not timed by the host that launches them."""
    for _ in range(WARMUP):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = run()
    return lambda: (graph.replay(), kept)


def error(got: list[Tensor], want: list[Tensor]) -> float:
    """Largest relative Frobenius error of the results; infinite on a NaN."""
    worst = 0.0
    for mine, wanted in zip(got, want, strict=True):
        value = ((mine.float() - wanted.float()).norm() / wanted.float().norm()).item()
        worst = max(worst, value if value == value else float("inf"))
    return worst


def copy_bandwidth() -> float:
    """GB/s of a device-to-device copy of 4 GiB, bytes read plus bytes written."""
    source = torch.randn(1 << 30, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / statistics.median(timed(lambda: target.copy_(source))) / 1e6


def measure(entry: MemoryOp, rows: int, text: int, copy: float) -> dict[str, Any]:
    """Checks, then times one entry; raises AssertionError when the two implementations disagree."""
    from magi2_kernels.common.choice import using

    torch.manual_seed(rows)
    inputs = entry.make(rows, text, "cuda")
    form = replayed if rows < GRAPH_BELOW else lambda run: run
    with torch.no_grad(), using("reference"):
        want = entry.run(inputs)
        slow = statistics.median(timed(form(lambda: entry.run(inputs))))
    with torch.no_grad(), using("triton"):
        wrong = max(error(entry.run(inputs), want) for _ in range(3))
        assert wrong <= entry.tolerance, f"{entry.name}: error {wrong:.2e} above {entry.tolerance:.2e}; nothing is timed"
        times = timed(form(lambda: entry.run(inputs)))
    ms = statistics.median(times)
    speed = entry.bytes_per_token * rows / ms / 1e6
    found = {
        "op": entry.name,
        "tokens": rows,
        "error": wrong,
        "ms": round(ms, 4),
        "ms_min": round(times[0], 4),
        "ms_max": round(times[-1], 4),
        "reference_ms": round(slow, 4),
        "ratio_to_reference": round(ms / slow, 4),
        "gb_per_s": round(speed, 1),
        "of_copy": round(speed / copy, 4),
    }
    if entry.flops_per_token:
        found["tflop_per_s"] = round(entry.flops_per_token * rows / ms / 1e9, 1)
    return found


def measure_all(names: list[str]) -> Iterator[dict[str, Any]]:
    """Every entry at every shape."""
    copy = copy_bandwidth()
    yield {"copy_gb_per_s": round(copy, 1)}
    for shape, (rows, text) in SHAPES.items():
        for entry in ENTRIES:
            if names and entry.name not in names:
                continue
            found = {"shape": shape, **measure(entry, rows, text, copy)}
            released = RELEASED_HALF_LAYER_MS.get(shape) if entry.name == "half layer" else None
            if released:
                found["ratio_to_released"] = round(found["ms"] / released, 4)
            yield found
            torch.cuda.empty_cache()


def machine() -> dict[str, str]:
    """Card, driver, versions, date."""
    import subprocess

    import triton

    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True, check=False
    )
    return {
        "card": torch.cuda.get_device_name(),
        "driver": driver.stdout.strip(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.date.today().isoformat(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--op", action="append", default=[], help="only this entry; may be repeated")
    arguments = parser.parse_args()
    if "magi2_kernels" not in sys.modules:
        spec = importlib.util.spec_from_file_location("magi2_packages", ROOT / "magi2_core" / "packages.py")
        packages = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(packages)
        packages.register()
    report: dict[str, Any] = {**machine(), "repeats": REPEATS, "warmup": WARMUP, "rows": []}
    for found in measure_all(arguments.op):
        if "copy_gb_per_s" in found:
            report |= found
        else:
            report["rows"].append(found)
        print(json.dumps(found), flush=True)
        arguments.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
