"""`python -m magi2_core`: drops the pack root from `sys.path`, registers the two import names and calls the command line.

With `-m` Python puts the current folder on `sys.path`; when that is the pack root, its `kernels`, `nodes` and `tests` folders
would shadow other people's modules (transformers probes for a package named `kernels`).
"""

import sys
from pathlib import Path

from magi2_core import packages


def main() -> int:
    """Cleans the path, registers the names and runs the command line; returns its exit code."""
    unwanted = {str(packages.ROOT), str(packages.ROOT / "magi2_core")}
    sys.path[:] = [entry for entry in sys.path if str(Path(entry or ".").resolve()) not in unwanted]
    packages.register()
    try:
        from magi2_core import cli
    except KeyboardInterrupt:
        print("error: stopped.", file=sys.stderr)
        return 130
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
