"""Every golden case beside the checkout (or the small copy in the tests), by the rules in its case.json."""

import importlib.util
import os
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
_spec = importlib.util.spec_from_file_location("magi2_parity_run", HERE / "run.py")
parity = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(parity)

SHARED = Path(os.environ.get("MAGI2_SHARED", HERE.parent.parent.parent / "shared")) / "golden"
ROOT = SHARED if SHARED.is_dir() else HERE / "golden"
CASES = parity.find_cases([ROOT])


@pytest.mark.parametrize("folder", CASES, ids=[str(case.relative_to(ROOT)) for case in CASES])
def test_golden(folder: Path) -> None:
    for report in parity.run_case(folder):
        assert report.lines
        assert report.misses == 0, "\n".join(report.lines)


def test_golden_cases_found() -> None:
    assert len(CASES) >= 20
