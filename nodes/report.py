"""What the Status node says: fleets, the running job, checkpoints, and what is missing; nothing heavy is imported for it."""

import importlib.metadata
import re
from typing import Any

from magi2_core import __version__, env
from magi2_core.checkpoint import catalog
from magi2_core.errors import DependencyError, Magi2Error

from . import feedback, fleet, folders

TEXT_ENCODER_PACKAGE, TEXT_ENCODER_VERSION = "transformers", (5, 5)
PACKAGES = {
    "transformers": "the text encoder",
    "einops": "the models",
    "safetensors": "checkpoints",
    "av": "mp4 files",
    "soundfile": "wav files",
}


def installed(package: str) -> str | None:
    """Version of an installed package, None without it; the package is not imported."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_text_encoder_package() -> None:
    """Raises DependencyError when the workers would run on this interpreter and its transformers cannot read the prompt."""
    if env.worker_python() != env.own_python():
        return  # another interpreter: the worker says what it lacks
    version = installed(TEXT_ENCODER_PACKAGE)
    if version is not None and tuple(map(int, re.findall(r"\d+", version)[:2])) >= TEXT_ENCODER_VERSION:
        return
    wanted = ".".join(map(str, TEXT_ENCODER_VERSION))
    raise DependencyError(
        f"the text encoder (Qwen3.5) needs transformers {wanted} or newer, this ComfyUI has {version or 'none'}. Either update it: "
        f'pip install "transformers>={wanted}", or leave it as it is and give the workers an environment of their own: '
        f'python -m venv magi2-env && magi2-env/bin/pip install torch "transformers>={wanted}" numpy einops safetensors soundfile av Pillow, '
        "then start ComfyUI with MAGI2_PYTHON=/path/to/magi2-env/bin/python (with the same torch version as ComfyUI's)."
    )


def _fleet_lines(status: dict[str, Any]) -> list[str]:
    """One fleet: its own facts first, then one line a rank."""
    ranks = status.get("ranks") or []
    facts = [f"{name} {value}" for name, value in status.items() if isinstance(value, (str, int, float, bool)) and value not in ("", None)]
    lines = [f"fleet: {', '.join(facts)}"]
    for rank in ranks if isinstance(ranks, (list, tuple)) else ():
        lines.append(f"  rank: {', '.join(f'{name} {value}' for name, value in rank.items() if not isinstance(value, (dict, list)))}")
    job = status.get("job")
    if job:
        lines.append(f"  job: {', '.join(f'{name} {value}' for name, value in job.items()) if isinstance(job, dict) else job}")
    return lines


def status_text() -> str:
    """The whole report."""
    lines = [f"ComfyUI-MAGI2 {__version__}"]
    try:
        fleets = fleet.statuses()
    except Magi2Error as error:
        fleets, lines = [], [*lines, f"fleet: {error}"]
    for status in fleets:
        lines += _fleet_lines(status)
    if not fleets:
        lines.append("fleet: none runs; the first stage of a workflow starts one")
    if feedback.last_event:
        lines.append(f"job: {feedback.last_event.get('text', '')}")
    for checkpoint in folders.checkpoints():
        absent = [name for name in catalog.LAYOUTS if name not in checkpoint.components]
        lines.append(f"checkpoint {checkpoint.name}: {'complete' if not absent else 'without ' + ', '.join(absent)}")
    missing = [f"{name} ({purpose}): pip install {name}" for name, purpose in PACKAGES.items() if installed(name) is None]
    try:
        check_text_encoder_package()
    except DependencyError as error:
        missing.append(str(error))
    return "\n".join([*lines, *(f"missing: {line}" for line in missing)])
