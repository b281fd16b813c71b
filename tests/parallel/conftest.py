"""One spawn a world size: each fixture runs everything that is tested on so many ranks."""

import importlib.util
import sys
from pathlib import Path

_spec = importlib.util.spec_from_file_location("magi2_parallel_fleet", Path(__file__).resolve().parent / "fleet.py")
fleet = sys.modules.setdefault(_spec.name, importlib.util.module_from_spec(_spec))
_spec.loader.exec_module(fleet)
