"""Registers the pack's two import names and starts a module under its own name.

ComfyUI names a pack by its path, another process cannot import that, and the pack root must never be on `sys.path`
(its `kernels`, `nodes` and `tests` folders would shadow other people's modules). So `magi2_core` and `magi2_kernels`
are mapped to their folders here, by every entry point: the ComfyUI entry, `tests/conftest.py`, the CLI and each worker.
Run as a file, `python packages.py MODULE [ARGS...]` registers the names and calls `MODULE.main()`. Standard library only.
"""

import importlib
import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"magi2_core": ROOT / "magi2_core", "magi2_kernels": ROOT / "kernels"}


def register() -> None:
    """Makes `magi2_core` and `magi2_kernels` importable from this copy of the pack.

    Raises ImportError when another copy of the pack already owns one of the names.
    """
    for name, folder in FOLDERS.items():
        loaded = sys.modules.get(name)
        if loaded is not None:
            origin = Path(loaded.__file__ or "").resolve().parent
            if origin != folder:
                raise ImportError(
                    f"{name} is already loaded from {origin}, this copy is {folder}. Keep one copy of ComfyUI-MAGI2 and remove the other."
                )
            continue
        spec = importlib.util.spec_from_file_location(name, folder / "__init__.py", submodule_search_locations=[str(folder)])
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)


def main(argv: list[str] | None = None) -> int:
    """Imports the module named in `argv[0]` and returns what its `main()` returns (`argv[1:]` become its arguments)."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv:
        print("usage: python packages.py MODULE [ARGS...]   e.g. magi2_core.cli --help", file=sys.stderr)
        return 2
    here = str(Path(__file__).resolve().parent)
    unwanted = {here, str(ROOT)}
    sys.path[:] = [entry for entry in sys.path if entry and str(Path(entry).resolve()) not in unwanted]
    register()
    sys.argv = argv
    return importlib.import_module(argv[0]).main() or 0


if __name__ == "__main__":
    sys.exit(main())
