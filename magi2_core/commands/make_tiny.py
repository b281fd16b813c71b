"""`make-tiny`: writes a random, seeded checkpoint with every component in the released folder layout."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from magi2_core.checkpoint.tiny import TinySizes, make_tiny


def run(options: argparse.Namespace) -> int:
    """Runs the command; raises Magi2Error. Returns 0."""
    base = TinySizes.parallel() if options.parallel else TinySizes()
    given = {name: getattr(options, name) for name in vars(base) if getattr(options, name, None) is not None}
    folder = make_tiny(Path(options.folder), seed=options.seed, sizes=replace(base, **given), overwrite=options.overwrite)
    files = [path for path in folder.rglob("*") if path.is_file()]
    sys.stdout.write(f"{folder}: {len(files)} files, {sum(path.stat().st_size for path in files) / 1e6:.1f} MB, seed {options.seed}\n")
    return 0
