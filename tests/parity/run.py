"""python tests/parity/run.py CASE_DIR...: runs golden cases by their own case.json, prints one line a tensor, exits 1 on a miss.

A CASE_DIR may also be a folder above cases. `--ranks N [--ep M] [--cfg-parallel]` runs `preview_denoise` cases on N gloo processes. Kinds are functions `run(case) -> {tensor name: tensor or text}` (fp32) and,
where a case has bf16 rules that the mode can follow, `run_bf16(case)`; each lives in a `kind_*.py` beside this file.
"""

import argparse
import importlib.util
import json
import sys
import tempfile
import traceback
from dataclasses import asdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
if "magi2_core" not in sys.modules:
    _spec = importlib.util.spec_from_file_location("magi2_packages", HERE.parent.parent / "magi2_core" / "packages.py")
    _packages = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(_packages)
    _packages.register()


def load_sibling(name: str):
    """Imports a file beside this one without touching sys.path."""
    full = f"magi2_parity_{name}"
    if full not in sys.modules:
        spec = importlib.util.spec_from_file_location(full, HERE / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[full] = module
        spec.loader.exec_module(module)
    return sys.modules[full]


KINDS = {
    "preview_component": "kind_preview",
    "preview_transformer": "kind_preview",
    "packing": "kind_preview",
    "schedule": "kind_sampling",
    "preview_denoise": "kind_sampling",
    "preview_engine": "kind_sampling",
    "refiner_pack": "kind_refiner",
    "refiner_forward": "kind_refiner",
    "refiner_loop": "kind_refiner",
    "turbo_vaed": "kind_vae",
    "wan22_vae": "kind_vae",
    "audio_vae": "kind_vae",
    "text_encoder": "kind_text",
    "prompt_enhancement": "kind_text",
    "image_preprocess": "kind_media",
    "video_post": "kind_media",
}


def run_case(folder: Path):
    """Runs one case; returns its reports. One that cannot be run, for whatever reason, is a miss that says why: the next cases run."""
    try:
        return _reports(folder)
    except Exception as error:
        traceback.print_exc()
        report = load_sibling("case").Report()
        report.add(False, f"{type(error).__name__}: {error}")
        return [report]


def _reports(folder: Path):
    """The fp32 report of a case and, where it applies, its bf16 report."""
    cases = load_sibling("case")
    case = cases.Case(folder)
    if case.kind not in KINDS:
        report = cases.Report()
        report.add(False, f"kind {case.kind!r} is unknown; known: {', '.join(KINDS)}")
        return [report]
    module = load_sibling(KINDS[case.kind])
    reports = [cases.compare(case, module.run(case), case.spec["compare"], case.outputs)]
    if case.spec.get("compare_bf16") and hasattr(module, "run_bf16"):
        produced = module.run_bf16(case)
        if produced is not None:
            rules = {name: rule for name, rule in case.spec["compare_bf16"].items() if name in produced}
            reports.append(cases.compare(case, produced, rules, case.outputs_bf16))
    return reports


def plan_ranks(case, ranks: int, expert: int | None, cfg_parallel: bool):
    """The layout for a case, or the reason why it cannot run on ranks."""
    from magi2_core.config import PreviewConfig
    from magi2_core.errors import Magi2Error
    from magi2_core.parallel.groups import plan_layout

    if case.kind != "preview_denoise":
        return f"kind {case.kind!r} does not run on ranks, only preview_denoise does: run it without --ranks"
    cfg = 2 if cfg_parallel else 1
    if ranks < 1 or ranks % cfg:
        return f"--ranks {ranks} cannot be shared by {cfg} guidance branches: use a positive multiple of {cfg}"
    name = f"cp{ranks // cfg}cfg{cfg}" + ("" if expert is None else f"ep{expert}")
    try:
        return plan_layout(ranks, PreviewConfig.from_dict(case.model_config), choice=name)
    except Magi2Error as error:
        return str(error)


def run_ranks(folders: list[Path], ranks: int, expert: int | None, cfg_parallel: bool) -> list:
    """(folder, report) of every case, in fp32; cases of one layout share a fleet."""
    from safetensors.torch import load_file

    from magi2_core.parallel.ranks import run_on_ranks

    cases = load_sibling("case")
    found: dict[Path, object] = {}
    fleets: dict[str, list[Path]] = {}
    for folder in folders:
        planned = plan_ranks(cases.Case(folder), ranks, expert, cfg_parallel)
        if isinstance(planned, str):
            found[folder] = cases.Report()
            found[folder].add(False, planned)
        else:
            fleets.setdefault(json.dumps(asdict(planned)), []).append(folder)
    for layout, members in fleets.items():
        with tempfile.TemporaryDirectory(prefix="magi2-parity-") as out:
            job = {"layout": json.loads(layout), "cases": [str(folder.resolve()) for folder in members], "out": out}
            (Path(out) / "job.json").write_text(json.dumps(job))
            run_on_ranks(HERE / "on_ranks.py", ranks, [str(Path(out) / "job.json")], timeout_seconds=600)
            for number, folder in enumerate(members):
                case = cases.Case(folder)
                found[folder] = cases.compare(case, load_file(Path(out) / f"{number}.safetensors"), case.spec["compare"], case.outputs)
    return [(folder, found[folder]) for folder in folders]


def find_cases(paths: list[Path]) -> list[Path]:
    """Every folder with a case.json at or below the given paths."""
    return [
        found.parent
        for path in paths
        for found in ([path / "case.json"] if (path / "case.json").is_file() else sorted(path.rglob("case.json")))
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Runs golden cases and compares by their rules.")
    parser.add_argument("cases", nargs="+", type=Path)
    parser.add_argument("--quiet", action="store_true", help="print misses and totals only")
    parser.add_argument("--ranks", type=int, help="run on so many gloo processes of this host")
    parser.add_argument("--ep", type=int, help="with --ranks: ranks that share the MoE heads (default: as many as divide both)")
    parser.add_argument("--cfg-parallel", action="store_true", help="with --ranks: each guidance branch on half of them")
    options = parser.parse_args(argv)
    folders = find_cases(options.cases)
    if not folders:
        print("no case.json found", file=sys.stderr)
        return 2
    if options.ranks is None and (options.ep is not None or options.cfg_parallel):
        parser.error("--ep and --cfg-parallel need --ranks N")
    misses = 0
    if options.ranks is None:
        runs = ((folder, run_case(folder)) for folder in folders)
    else:
        runs = ((folder, [report]) for folder, report in run_ranks(folders, options.ranks, options.ep, options.cfg_parallel))
    for folder, reports in runs:
        missed = sum(report.misses for report in reports)
        misses += missed
        print(f"== {folder}: {'MISS' if missed else 'ok'}")
        for report in reports:
            for line in report.lines:
                if not options.quiet or line.startswith("MISS"):
                    print("  " + line)
    print(f"{len(folders)} cases, {misses} misses")
    return int(misses > 0)


if __name__ == "__main__":
    sys.exit(main())
