"""Registers the pack's import names for every test, and finds the goldens."""

import importlib.util
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
_spec = importlib.util.spec_from_file_location("magi2_packages", ROOT / "magi2_core" / "packages.py")
_packages = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_packages)
_packages.register()

SHARED = Path(os.environ.get("MAGI2_SHARED", ROOT.parent / "shared"))


@pytest.fixture(scope="session")
def golden_root() -> Path:
    """Folder of the golden cases: the full set beside the checkout, or the small copy that ships with the tests."""
    full = SHARED / "golden"
    return full if full.is_dir() else ROOT / "tests" / "parity" / "golden"


@pytest.fixture(scope="session")
def nano_folder() -> Path:
    """The embedded trained checkpoint."""
    return ROOT / "magi2_core" / "assets" / "nano"
