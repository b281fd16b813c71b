"""The lazy import of a media package, which says what to install."""

import importlib
from types import ModuleType

from magi2_core.errors import DependencyError

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
