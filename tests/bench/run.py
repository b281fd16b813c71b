"""Benchmarks on one GPU: `python tests/bench/run.py [--op NAME] [--shape 272p|540p|rank] [--upstream PATH] [--profile FILE] [--out FILE]`.

An op whose check is red is refused. A line gives the median of at least 20 runs, the rate and its share of the ceilings measured in this run,
and the ratio to reference.py (whose slow ops are timed less often; attention, checked in float64, and routing, checked by its sets of experts, have none); with a
checkout of the public reference also the ratio to its op in this run. `--op layer` is one MoE layer, `--op step` a whole step of 40 layers launched eagerly, compiled and as a graph.
"""

import argparse
import json
import sys
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import measure
import torch

measure.register()

import upstream as public  # noqa: E402
import whole  # noqa: E402
from registry import SHAPES, Entry, entries  # noqa: E402
from verify import check  # noqa: E402

LAYER_MARGIN = 1.25
"""A layer may be so much further from fp32 than the plain bf16 kernels are (near ties of the router fall by chance)."""


class Report:
    """Prints and keeps rows; writes them after each, so that a run that ends early leaves what it had."""

    def __init__(self, out: Path | None) -> None:
        self.out, self.ceilings = out, measure.ceilings()
        self.found: dict[str, Any] = {**measure.machine(), "ceilings": asdict(self.ceilings), "rows": []}
        print(json.dumps({**measure.machine(), **asdict(self.ceilings)}), flush=True)

    def add(self, name: str, shape: str, ms: float, **numbers: Any) -> None:
        """One row."""
        row = {"op": name, "shape": shape, "ms": round(ms, 4), **numbers}
        self.found["rows"].append(row)
        text = "  ".join(
            f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
            for key, value in row.items()
            if key not in ("op", "shape")
        )
        print(f"{name:28} {shape:5} {text}", flush=True)
        if self.out is not None:
            self.out.write_text(json.dumps(self.found, indent=1))

    def rates(self, ms: float, flops: float | None, size: float | None) -> dict[str, float]:
        """Rates of a row and their shares of this run's ceilings."""
        found = {}
        if flops:
            rate = flops / ms / 1e9
            found |= {"tflops": rate, "of_short": rate / self.ceilings.short, "of_sustained": rate / self.ceilings.sustained}
        if size:
            rate = size / ms / 1e6
            found |= {"gb_s": rate, "of_copy": rate / self.ceilings.copy, "of_equal_copy": rate / measure.copy_rate(int(size))}
        return found


def run_entry(entry: Entry, shape: str, report: Report, theirs: dict[str, float]) -> bool:
    """Checks and times one op; False when its check is red."""
    from magi2_kernels.common.choice import using

    torch.manual_seed(0)
    inputs = entry.make(shape)
    error = check(entry, inputs)
    if not error <= entry.tolerance:
        print(f"{entry.name:28} {shape:5} REFUSED: error {error:.2e} above {entry.tolerance:.0e}; nothing is timed", flush=True)
        return False
    with torch.no_grad():
        with using("triton"), entry.context() if entry.context else nullcontext():
            times = measure.timed(lambda: entry.run(inputs))
        numbers: dict[str, Any] = {"runs": len(times.runs), "min": times.runs[0], "max": times.runs[-1], "error": error}
        numbers |= report.rates(times.median, entry.flops and entry.flops(inputs), entry.bytes and entry.bytes(inputs))
        if entry.check is None or entry.reference is not None:
            with using("reference"):
                slow = measure.timed(lambda: (entry.reference or entry.run)(inputs), most_seconds=2)
            numbers |= {"reference_ms": slow.median, "reference_runs": len(slow.runs), "of_reference": times.median / slow.median}
    if entry.upstream in theirs:
        numbers |= {"upstream_ms": theirs[entry.upstream], "of_upstream": times.median / theirs[entry.upstream]}
    report.add(entry.name, shape, times.median, **numbers)
    return True


def layer_errors(made: Any, released: Path | None) -> dict[str, float]:
    """Errors against fp32, relative to what the layer changes: with the kernels in use, with plain ones, and of the released layer with the
    same weights, plain and compiled; and how far apart those two are."""
    compared = whole.compare_layer(made)
    errors = {"error": compared.error(compared.chosen), "plain error": compared.error(compared.plain)}
    if released is None:
        return errors
    try:
        outputs = public.Upstream(released).outputs(made.state_dict(), compared.context, compared.x)
    except Exception as error:
        print(f"upstream layer with our weights: does not run here ({type(error).__name__}: {str(error)[:200]})", flush=True)
        return errors
    errors |= {f"upstream {name} error": compared.error(output) for name, output in outputs.items()}
    return errors | {"upstream compiled to eager": compared.apart(outputs["compiled"], outputs["eager"])}


@torch.no_grad()
def run_layer(shape: str, report: Report, theirs: dict[str, float], released: Path | None, profile: Path | None) -> bool:
    """One MoE layer; False when it differs from the plain implementation."""
    made, context = whole.layer(), whole.tokens(shape)
    errors = layer_errors(made, released)
    with whole.experts_fixed(made):
        errors |= {f"experts fixed: {name}": value for name, value in layer_errors(made, released).items()}
    for label in ("", "experts fixed: "):
        error, plain = errors[f"{label}error"], errors[f"{label}plain error"]
        if not error <= LAYER_MARGIN * plain:
            print(f"layer {shape} REFUSED: {label}error {error:.2e} against fp32, the plain bf16 kernels have {plain:.2e}", flush=True)
            return False
    x = whole.streams(context.cu_seqlens.total)
    times = measure.timed(lambda: whole.advance(made, x, context))
    numbers: dict[str, Any] = {"runs": len(times.runs), "min": times.runs[0], "max": times.runs[-1], **errors}
    numbers |= report.rates(times.median, whole.layer_flops(context), None)
    numbers["host_ms"] = measure.host_ms(lambda: whole.advance(made, x, context))
    for name in ("layer", "layer compiled"):
        if name in theirs:
            numbers |= {f"upstream {name} ms": theirs[name], f"of upstream {name}": times.median / theirs[name]}
    report.add("layer", shape, times.median, **numbers)
    if profile is not None:
        write_profile(
            profile, lambda: whole.advance(made, x, context), f"One MoE layer, {shape}, {report.found['card']}, {report.found['date']}"
        )
    return True


def write_profile(path: Path, run: Any, title: str) -> None:
    """Appends the device time by kernel of three runs, as text."""
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(3):
            run()
        torch.cuda.synchronize()
    rows = sorted(found.key_averages(), key=lambda row: -row.self_device_time_total)
    rows = [row for row in rows if row.self_device_time_total > 0]
    total = sum(row.self_device_time_total for row in rows) / 3000
    lines = [f"{title}: {total:.2f} ms of kernels a run (mean of 3)", f"{'ms':>9}  {'share':>6}  {'calls':>5}  kernel"]
    for row in rows:
        ms = row.self_device_time_total / 3000
        lines.append(f"{ms:9.3f}  {ms / total:6.1%}  {row.count // 3:5d}  {row.key[:110]}")
    with path.open("a") as file:
        file.write("\n".join(lines) + "\n\n")
    print("\n".join(lines[:30]), flush=True)


@torch.no_grad()
def run_step(shape: str, report: Report, launches: list[str], runs: int) -> None:
    """A step of 40 layers on one request, launched in each of the ways; `from_first` is how far its video is from the first way's."""
    from magi2_core.pipeline.accelerate import forward_of

    made, first = whole.model(shape), None
    for launch in launches:
        for layer in made[0].block.layers:
            layer._compiled_call_impl = None  # what an earlier launch compiled must not be captured
        torch.manual_seed(0)
        step = whole.step(shape, made)
        step.velocity.forward = forward_of(made[0], launch)
        for _ in range(3):
            found = step()
        first = found if first is None else first
        times = measure.timed(step, runs=runs, most_seconds=300)
        numbers = {"runs": len(times.runs), "min": times.runs[0], "max": times.runs[-1], "moe_layers": made[1], "dense_layers": made[2]}
        numbers["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
        numbers["from_first"] = measure.error([found.video_cond, found.video_uncond], [first.video_cond, first.video_uncond])
        if launch == "graph":
            numbers["captured"] = step.velocity.forward.captured
        if launch == "compile":
            numbers["compiled"] = step.velocity.forward.is_compiled
        report.add(f"step {launch}", shape, times.median, **numbers)
        del step
        torch.cuda.empty_cache()


@torch.no_grad()
def time_upstream(path: Path, shape: str, profile: Path | None) -> dict[str, float]:
    """Milliseconds of the public reference's ops; one that cannot run here is named and left out."""
    theirs = {}
    for name, call in public.Upstream(path).functions(shape).items():
        try:
            theirs[name] = measure.timed(call).median
            if profile is not None and name == "layer compiled":
                write_profile(profile, call, f"One MoE layer of the public reference, compiled, {shape}")
        except Exception as error:
            print(f"upstream {name}: does not run here ({type(error).__name__}: {str(error)[:200]})", flush=True)
    print(
        f"upstream {shape} (replaced: {', '.join(public.STUBBED) or 'nothing'}): {json.dumps({k: round(v, 3) for k, v in theirs.items()})}",
        flush=True,
    )
    torch.cuda.empty_cache()
    return theirs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--op", action="append", default=[], help="an entry by name, layer or step; may be repeated (default: all entries)")
    parser.add_argument("--shape", action="append", choices=SHAPES, default=[])
    parser.add_argument("--upstream", type=Path, help="checkout of the public reference")
    parser.add_argument("--profile", type=Path, help="text file to which the kernels of a layer are added, with --op layer")
    parser.add_argument("--launch", action="append", choices=("eager", "compile", "graph"), default=[], help="with --op step")
    parser.add_argument("--runs", type=int, default=20, help="timed runs of a step (default 20; one at 540p takes 8 s)")
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args()
    measure.require_card(parser)
    from magi2_core.device import use_full_fp32
    from magi2_kernels.common import choice
    from magi2_kernels.sink_attention import providers

    use_full_fp32()
    choice.choose("triton")
    providers.choose(providers.resolve("auto", providers.Target(device=torch.device("cuda", 0), dtype=torch.bfloat16, head_dim=128)).name)
    report, red = Report(options.out), []
    report.found |= {"attention": providers.chosen()}
    ops = options.op or [entry.name for entry in entries()]
    plain = [entry for entry in entries() if entry.name in ops] if set(ops) - {"layer", "step"} else []
    unknown = set(ops) - {"layer", "step"} - {entry.name for entry in plain}
    if unknown:
        parser.error(f"unknown op {sorted(unknown)}: use layer, step or {[entry.name for entry in entries()]}")
    for shape in options.shape or SHAPES:
        theirs = time_upstream(options.upstream, shape, options.profile) if options.upstream and shape != "rank" else {}
        report.found.setdefault("upstream", {})[shape] = {"ms": theirs, "replaced": public.STUBBED}
        for entry in plain:
            red += [] if run_entry(entry, shape, report, theirs) else [entry.name]
            torch.cuda.empty_cache()
        if "layer" in ops and shape != "rank":
            red += [] if run_layer(shape, report, theirs, options.upstream, options.profile) else ["layer"]
            torch.cuda.empty_cache()
        if "step" in ops and shape != "rank":
            run_step(shape, report, options.launch or ["eager", "compile", "graph"], options.runs)
            torch.cuda.empty_cache()
    return int(bool(red))


if __name__ == "__main__":
    sys.exit(main())
