"""The only reader of environment variables in the pack. Every variable is a function here, documented in the README."""

import os
import sys
import tempfile
from pathlib import Path


def api_key() -> str:
    """Key of the prompt-enhancement service (`MAGI2_API_KEY`), "" when unset. Never logged, never stored."""
    return os.environ.get("MAGI2_API_KEY", "")


def _home() -> Path:
    """The user's home folder; the folder for temporary files of a user who has none (a container with a bare user id)."""
    found = os.path.expanduser("~")
    return Path(tempfile.gettempdir() if found == "~" else found)


def cache_dir() -> Path:
    """Folder for things that can be made again (`MAGI2_CACHE_DIR`; default: the user's cache folder / magi2)."""
    chosen = os.environ.get("MAGI2_CACHE_DIR")
    if chosen:
        return Path(chosen)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or _home() / "AppData" / "Local") / "magi2"
    if sys.platform == "darwin":
        return _home() / "Library" / "Caches" / "magi2"
    return Path(os.environ.get("XDG_CACHE_HOME") or _home() / ".cache") / "magi2"


def runtime_dir() -> Path:
    """Folder of sockets, logs and mapped files of the backend (`MAGI2_RUNTIME_DIR`; default: per user, 0700 when made)."""
    chosen = os.environ.get("MAGI2_RUNTIME_DIR")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base and Path(base).is_dir():
        return Path(base) / "magi2"
    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
    return Path(tempfile.gettempdir()) / f"magi2-{user}"


def model_dirs() -> list[Path]:
    """Extra folders that hold checkpoints (`MAGI2_MODELS`, separated as PATH is)."""
    return [Path(part) for part in os.environ.get("MAGI2_MODELS", "").split(os.pathsep) if part]


def worker_python() -> str:
    """Interpreter of the worker processes (`MAGI2_PYTHON`; default: this one)."""
    return os.environ.get("MAGI2_PYTHON") or sys.executable


def own_python() -> str:
    """Interpreter of this process."""
    return sys.executable


CHILD_VARIABLES = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "TMPDIR", "TEMP", "TMP", "SYSTEMROOT", "LOCALAPPDATA", "LD_LIBRARY_PATH")
CHILD_PREFIXES = ("MAGI2_", "LC_", "XDG_", "OMP_", "MKL_", "NCCL_", "MCCL_", "GLOO_", "TP_", "TRITON_", "CUDA_", "MUSA_", "HF_")
HOST_ONLY = ("CUDA_MODULE_LOADING", "CUDA_LAUNCH_BLOCKING", "MAGI2_API_KEY")


def child_environment(changes: dict[str, str]) -> dict[str, str]:
    """The environment of a process of the backend: built from the variables it needs, not inherited.

    PYTHONPATH and the allocator settings of the host program stay behind, and so does the key of the prompt service.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if (name in CHILD_VARIABLES or name.startswith(CHILD_PREFIXES)) and name not in HOST_ONLY
    }
    # PASSIVE: threads of a worker that wait for each other sleep. Spinning, two workers on a busy CPU took ten times as long a step.
    return {"NCCL_NVLS_ENABLE": "0", "PYTHONUNBUFFERED": "1", "OMP_WAIT_POLICY": "PASSIVE", **kept, **changes}


def visible_devices() -> list[str] | None:
    """What CUDA_VISIBLE_DEVICES (or MUSA_VISIBLE_DEVICES) leaves visible, None when neither is set."""
    for name in ("CUDA_VISIBLE_DEVICES", "MUSA_VISIBLE_DEVICES"):
        if name in os.environ:
            return [part.strip() for part in os.environ[name].split(",") if part.strip()]
    return None


def backend_token() -> str:
    """Token for a head that is reached over TCP from another machine (`MAGI2_TOKEN`), "" when unset."""
    return os.environ.get("MAGI2_TOKEN", "")


def test_faults() -> str:
    """A file of faults to inject (`MAGI2_TEST_FAULTS`): for the tests of this pack only, never set it otherwise."""
    return os.environ.get("MAGI2_TEST_FAULTS", "")


def comfyui_path() -> Path | None:
    """Folder of a ComfyUI to start headless (`COMFYUI_PATH`), None when unset."""
    chosen = os.environ.get("COMFYUI_PATH")
    return Path(chosen) if chosen else None


def comfyui_python() -> str | None:
    """Interpreter that has ComfyUI's packages (`COMFYUI_PYTHON`), None when unset."""
    return os.environ.get("COMFYUI_PYTHON") or None


def log_level() -> str:
    """Level of the pack's loggers (`MAGI2_LOG_LEVEL`; default INFO)."""
    return (os.environ.get("MAGI2_LOG_LEVEL") or "INFO").upper()


LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def kernel_choice() -> str:
    """Which kernels are used (`MAGI2_KERNELS`: auto, triton or reference; default auto: Triton on a supported GPU)."""
    return (os.environ.get("MAGI2_KERNELS") or "auto").lower()


def attention_choice() -> str:
    """Which library computes the preview's attention (`MAGI2_ATTENTION`: auto, fa3, mate, cudnn, flash, flex or reference; default auto)."""
    return (os.environ.get("MAGI2_ATTENTION") or "auto").lower()


def acceleration_choice() -> str:
    """How a preview step is launched (`MAGI2_STEP`: auto, eager, compile or graph; default auto: eager, see tests/bench/results/SUMMARY.md)."""
    return (os.environ.get("MAGI2_STEP") or "auto").lower()


def chosen_as(what: str, asked: str, name: str, variable: str) -> str:
    """How a message calls the choice `name`: by the variable that it came from when the caller `asked` for "auto"."""
    return f"{variable}={name}" if asked == "auto" else f"{what} {name!r}"


def set_sleeping_threads() -> None:
    """Lets threads that wait for each other sleep, unless the user chose otherwise: spinning, a step on a busy CPU took ten times as long.

    Read when torch is loaded, so set before.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def set_deterministic_workspace() -> None:
    """Gives cuBLAS the fixed workspace that deterministic algorithms need, unless the user chose one. Read by torch only once, so set early."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
