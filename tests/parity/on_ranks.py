"""One rank of `run.py --ranks`: denoises the cases of a job file in this layout; rank 0 writes what the comparison needs.

Started by magi2_core.parallel.ranks. The case runs through the same kind function as on one rank.
"""

import importlib.util
import json
import sys
from pathlib import Path

from safetensors.torch import save_file

from magi2_core.parallel.groups import Groups, ParallelConfig

HERE = Path(__file__).resolve().parent


def _runner():
    if "magi2_parity_run" not in sys.modules:
        spec = importlib.util.spec_from_file_location("magi2_parity_run", HERE / "run.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    return sys.modules["magi2_parity_run"]


def rank_main(rank: int, world: int, init_method: str, arguments: list[str]) -> int:
    parity = _runner()
    job = json.loads(Path(arguments[0]).read_text())
    groups = Groups.create(ParallelConfig(**job["layout"]), rank=rank, init_method=init_method, timeout_seconds=120)
    cases, kind = parity.load_sibling("case"), parity.load_sibling("kind_sampling")
    for number, folder in enumerate(job["cases"]):
        produced = kind.run_denoise(cases.Case(Path(folder)), groups)
        if rank == 0:
            save_file(
                {name: tensor.contiguous().clone() for name, tensor in produced.items()}, str(Path(job["out"]) / f"{number}.safetensors")
            )
    groups.close()
    return 0
