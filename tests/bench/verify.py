"""Checks benchmark entries without timing them: `python tests/bench/verify.py [--op NAME] [--shape 272p|540p|rank]`. Exit code 1 on a red one."""

import argparse
import sys
from contextlib import nullcontext
from typing import Any

import measure
import torch

measure.register()

from registry import SHAPES, Entry, entries  # noqa: E402

REPEATS = 3
"""A race shows as an error that moves, so every check looks at several runs."""


def check(entry: Entry, inputs: Any) -> float:
    """Largest error of the entry on `inputs` over several runs."""
    from magi2_kernels.common.choice import using

    with torch.no_grad():
        if entry.check is not None:
            with using("triton"):
                return max(entry.check(inputs) for _ in range(REPEATS))
        with using("reference"):
            want = (entry.reference or entry.run)(inputs)
        with using("triton"), entry.context() if entry.context else nullcontext():
            return max(measure.error(entry.run(inputs), want) for _ in range(REPEATS))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--op", action="append", default=[])
    parser.add_argument("--shape", action="append", choices=SHAPES, default=[])
    options = parser.parse_args()
    measure.require_card(parser)
    red = []
    for entry in entries():
        if options.op and entry.name not in options.op:
            continue
        for shape in options.shape or SHAPES:
            torch.manual_seed(0)
            found = check(entry, entry.make(shape))
            good = found <= entry.tolerance
            red += [] if good else [f"{entry.name} {shape}"]
            print(f"{'ok ' if good else 'RED'} {entry.name:32} {shape:5} error {found:.2e} of {entry.tolerance:.0e}", flush=True)
            torch.cuda.empty_cache()
    return int(bool(red))


if __name__ == "__main__":
    sys.exit(main())
