"""The environment that the workers will run in: this process's own Python or MAGI2_PYTHON, and which packages it has.

Only what is installed is read, nothing is imported: a prompt is checked by it when it is queued.
"""

import functools
import importlib.metadata
import importlib.util
import json
import logging
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable

from magi2_core import env
from magi2_core.errors import DependencyError

log = logging.getLogger("magi2.nodes")

TEXT_ENCODER, TEXT_ENCODER_VERSION = "transformers", (5, 5)
EVERY_STAGE = ("torch", "einops", "safetensors")
WRITER = "av"
PROBED = (*EVERY_STAGE, TEXT_ENCODER, WRITER)
PROBE_SECONDS = 10.0

PROBE = """
import importlib.metadata as metadata, importlib.util, json, sys
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        spec = importlib.util.find_spec(name)
        return "unknown" if spec and spec.origin else None
print("\\nmagi2 " + json.dumps({name: version(name) for name in sys.argv[1:]}))
"""
"""Run by the workers' interpreter; reads what is installed and imports none of it."""


def installed(package: str) -> str | None:
    """Version of a package of this process, "unknown" when it is there without metadata, None without it; it is not imported."""
    try:
        return importlib.metadata.version(package) or "unknown"
    except importlib.metadata.PackageNotFoundError:
        pass
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # somebody put a module without a spec into sys.modules
        return "unknown"
    return None if spec is None or spec.origin is None else "unknown"


def worker_packages() -> dict[str, str | None] | None:
    """PROBED -> version (None: absent) in the workers' environment; None when it does not tell."""
    python = env.worker_python()
    if python == env.own_python():
        return {name: installed(name) for name in PROBED}
    path = shutil.which(python)
    if path is None:
        return None
    stamp = os.stat(path).st_mtime_ns
    found = _probe(path, stamp)
    if found is not None and lacks(found):
        _probe.cache_clear()  # somebody may be about to install what is missing
    return found


@functools.lru_cache(maxsize=4)
def _probe(python: str, stamp: int) -> dict[str, str | None] | None:
    """Asks another interpreter, once for each state of its file; None when it does not answer, is too slow or says something else."""
    try:
        result = subprocess.run(
            [python, "-c", PROBE, *PROBED],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PROBE_SECONDS,
            env=env.child_environment({}),
            cwd=tempfile.gettempdir(),
        )
        line = next(line for line in reversed(result.stdout.decode(errors="replace").splitlines()) if line.startswith("magi2 "))
        found = json.loads(line.removeprefix("magi2 "))
        return {name: None if found[name] is None else str(found[name]) for name in PROBED}
    except (OSError, subprocess.SubprocessError, StopIteration, ValueError, KeyError, TypeError) as error:
        log.info("MAGI2_PYTHON=%s did not say which packages it has (%s); the processes will", python, type(error).__name__)
        return None


def lacks(packages: dict[str, str | None]) -> list[str]:
    """Those of `packages` that are absent or too old."""
    return [name for name, version in packages.items() if version is None or (name == TEXT_ENCODER and not _reads_prompts(version))]


def _reads_prompts(version: str) -> bool:
    return tuple(map(int, re.findall(r"\d+", version)[:2])) >= TEXT_ENCODER_VERSION


def environment_line() -> str:
    """The one command that makes an environment for the workers, and how it is used."""
    wanted = ".".join(map(str, TEXT_ENCODER_VERSION))
    return (
        f'python -m venv magi2-env && magi2-env/bin/pip install torch "transformers>={wanted}" numpy einops safetensors soundfile av Pillow, '
        "then start ComfyUI with MAGI2_PYTHON=/path/to/magi2-env/bin/python (with the same torch version as ComfyUI's)."
    )


def _owner() -> tuple[str, str]:
    """Whose environment the workers use, in words, and the pip command of it."""
    python = env.worker_python()
    return ("this ComfyUI", "pip") if python == env.own_python() else (f"MAGI2_PYTHON={python}", f'"{python}" -m pip')


def check_text_encoder() -> None:
    """Raises DependencyError, with both cures, when the workers' transformers cannot read a prompt."""
    packages = worker_packages()
    if packages is None or TEXT_ENCODER not in lacks(packages):
        return
    wanted = ".".join(map(str, TEXT_ENCODER_VERSION))
    owner, pip = _owner()
    raise DependencyError(
        f"the text encoder (Qwen3.5) needs transformers {wanted} or newer, {owner} has {packages[TEXT_ENCODER] or 'none'}. Either update "
        f'it: {pip} install "transformers>={wanted}", or leave it as it is and give the workers an environment of their own: '
        f"{environment_line()}"
    )


def check_python() -> None:
    """Raises DependencyError when the workers' Python does not exist."""
    python = env.worker_python()
    if python != env.own_python() and shutil.which(python) is None:
        raise DependencyError(
            f"MAGI2_PYTHON={python} is no program that can be started, and the MAGI-2 processes run with it. Correct it, or unset it to "
            f"use ComfyUI's own Python, or make an environment for it: {environment_line()}"
        )


def check_packages(names: Iterable[str]) -> None:
    """Raises DependencyError when the workers' Python lacks one of the packages `names` (of PROBED)."""
    packages = worker_packages() or {}
    missing = [name for name in names if name in packages and packages[name] is None]
    if missing:
        owner, pip = _owner()
        raise DependencyError(
            f"the MAGI-2 processes need {', '.join(missing)}, {owner} has none. Install: {pip} install {' '.join(missing)}"
        )
