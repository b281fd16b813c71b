"""The two things every media module needs: a lazy import that says what to install, and a file that appears whole or not at all."""

import importlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType

from magi2_core.errors import DependencyError, OutputError

PACKAGES = {"av": ("av", "14.2"), "PIL": ("Pillow", "10.0"), "soundfile": ("soundfile", "0.12")}
"""Import name -> (name on PyPI, lowest version)."""


def load_package(module: str) -> ModuleType:
    """Imports `module`, whose top package is a key of PACKAGES. Raises DependencyError with the pip line."""
    package, version = PACKAGES[module.partition(".")[0]]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DependencyError(
            f'{package} {version} or newer is needed here and cannot be imported ({error}). Install it: pip install "{package}>={version}"'
        ) from None


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yields a temporary name beside `path`; it is renamed to `path` when the block ends well, removed when it does not.

    An older file under `path` stays untouched until the rename. OSError inside the block becomes OutputError; every
    other exception passes unchanged.
    """
    target = Path(path).absolute()
    temporary = target.with_name(f".{target.name[:100]}.{secrets.token_hex(4)}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with temporary.open("rb+") as handle:
            os.fsync(handle.fileno())
        os.replace(temporary, target)
    except OSError as error:
        raise OutputError(
            f"{target} could not be written: {error.strerror or error}. Free space or choose another folder; finished latents are not touched."
        ) from error
    finally:
        with suppress(OSError):  # after a rename, or a folder that could not be made, there is nothing to remove
            temporary.unlink()
