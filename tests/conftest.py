"""Registers the pack's import names for every test, finds the goldens, and lets Ctrl-C through to the programs that tests start."""

import importlib.util
import os
import signal
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
_spec = importlib.util.spec_from_file_location("magi2_packages", ROOT / "magi2_core" / "packages.py")
_packages = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_packages)
_packages.register()

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what it runs in the background so, and a child inherits it: tests of Ctrl-C would wait for ever.
    signal.signal(signal.SIGINT, signal.default_int_handler)

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
