"""A checkpoint's checksums: `magi2_manifest.json` lists every file with its size and SHA-256; flipped bits are found by reading all.

Written for a tiny checkpoint when it is made and on request for a released one; `doctor --verify` compares. Also the short
identity of a checkpoint that goes into latents, made from headers and sizes so that it costs milliseconds.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from magi2_core.config_values import read_json
from magi2_core.errors import CheckpointError, Interrupted
from magi2_core.request import Progress
from magi2_core.whole_file import whole_file

from .catalog import LAYOUTS

MANIFEST_FILE = "magi2_manifest.json"
BLOCK_BYTES = 8 << 20
REPORT_BYTES = 1 << 30
SMALL_BYTES = 1 << 20

ProgressCallback = Callable[[Progress], None]
StopCheck = Callable[[], bool]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One file that disagrees with the manifest: `kind` is missing, size, sha256 or unlisted."""

    file: str
    kind: str
    message: str


def list_files(folder: Path) -> list[str]:
    """Relative paths (forward slashes) of a checkpoint's files, sorted; hidden files and folders, the manifest and `.part` files are left out."""
    found = []
    for base, folders, files in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in files:
            if name != MANIFEST_FILE and not name.startswith(".") and not name.endswith(".part"):
                found.append(Path(base, name).relative_to(folder).as_posix())
    return sorted(found)


class _Meter:
    """Counts bytes over all files, reports each gigabyte and each file, and raises when the caller wants to stop."""

    def __init__(self, total: int, progress: ProgressCallback | None, should_stop: StopCheck | None) -> None:
        self.total, self.progress, self.should_stop = total, progress, should_stop
        self.done = self.reported = 0

    def add(self, count: int, file: str, at_end: bool = False) -> None:
        if self.should_stop is not None and self.should_stop():
            raise Interrupted(f"checksums were cancelled at {file}.")
        self.done += count
        if self.progress is not None and (at_end or self.done - self.reported >= REPORT_BYTES):
            self.reported = self.done
            self.progress(Progress(stage="verify", step=self.done >> 20, total=max(self.total >> 20, 1), message=f"{file} (MiB)"))


def _blocks(path: Path) -> Iterator[bytes]:
    with open(path, "rb", buffering=0) as handle:
        while block := handle.read(BLOCK_BYTES):
            yield block


def _sha256(folder: Path, file: str, meter: _Meter) -> str:
    digest = hashlib.sha256()
    try:
        for block in _blocks(folder / file):
            digest.update(block)
            meter.add(len(block), file)
    except OSError as error:
        raise CheckpointError(f"{folder / file}: cannot be read ({error.strerror or error}).") from None
    meter.add(0, file, at_end=True)
    return digest.hexdigest()


def write_manifest(folder: Path, *, progress: ProgressCallback | None = None, should_stop: StopCheck | None = None) -> Path:
    """Hashes every file of `folder` and writes `magi2_manifest.json` there, whole or not at all. Raises OutputError, Interrupted."""
    folder = Path(folder)
    names = list_files(folder)
    if not names:
        raise CheckpointError(f"{folder} holds no files, so there is nothing to make a manifest of.")
    meter = _Meter(sum((folder / name).stat().st_size for name in names), progress, should_stop)
    files = {name: {"size": (folder / name).stat().st_size, "sha256": _sha256(folder, name, meter)} for name in names}
    target = folder / MANIFEST_FILE
    with whole_file(target, remedy="Check permissions and free space.") as temporary:
        temporary.write_text(json.dumps({"version": 1, "files": files}, indent=1) + "\n", encoding="utf-8")
    return target


def read_manifest(folder: Path) -> dict[str, tuple[int, str]]:
    """File -> (size, sha256). Raises CheckpointError when the manifest is absent, damaged or names a file outside the folder."""
    path = Path(folder) / MANIFEST_FILE
    if not path.is_file():
        raise CheckpointError(
            f"{path} is missing: there are no checksums to compare with. Write it from a copy you trust with doctor --write-manifest."
        )
    files = read_json(path).get("files")
    listed = {}
    for name, value in (files if isinstance(files, dict) else {}).items():
        parts = Path(name).parts
        if Path(name).is_absolute() or ".." in parts or not isinstance(value, dict):
            raise CheckpointError(f"{path}: entry {name!r} is not understood.")
        size, digest = value.get("size"), value.get("sha256")
        if not isinstance(size, int) or not isinstance(digest, str):
            raise CheckpointError(f"{path}: entry {name!r} has no size or sha256.")
        listed[name] = (size, digest)
    if not listed:
        raise CheckpointError(f"{path}: lists no files.")
    return listed


def verify_manifest(folder: Path, *, progress: ProgressCallback | None = None, should_stop: StopCheck | None = None) -> list[Fault]:
    """Every disagreement of the files with the manifest; empty = all is as written. Files of a wrong size are not hashed."""
    folder = Path(folder)
    listed = read_manifest(folder)
    faults, to_hash = [], []
    for name, (size, _) in listed.items():
        path = folder / name
        if not path.is_file():
            faults.append(Fault(file=name, kind="missing", message=f"{name}: missing"))
        elif path.stat().st_size != size:
            faults.append(Fault(file=name, kind="size", message=f"{name}: {path.stat().st_size} bytes, expected {size}"))
        else:
            to_hash.append(name)
    meter = _Meter(sum(listed[name][0] for name in to_hash), progress, should_stop)
    for name in to_hash:
        found = _sha256(folder, name, meter)
        if found != listed[name][1]:
            faults.append(
                Fault(file=name, kind="sha256", message=f"{name}: SHA-256 is {found}, expected {listed[name][1]}: the content changed")
            )
    for name in list_files(folder):
        if name not in listed and name.endswith((".safetensors", ".pth", ".ckpt", ".json")):
            faults.append(Fault(file=name, kind="unlisted", message=f"{name}: not in the manifest"))
    return faults


def checkpoint_hash(folder: Path) -> str:
    """Sixteen hex digits that name what makes latents: over names, sizes and the first MiB of the files of the preview transformer.

    Equal for copies of one checkpoint, with or without refiner and decoders; "" without a preview transformer. It does not find a
    flipped bit (`verify_manifest` does).
    """
    return _hash_components(folder, ("preview",)) if (Path(folder) / LAYOUTS["preview"].folder).is_dir() else ""


def installation_hash(folder: Path) -> str:
    """The same over all components that are there; early 0.1.0 wrote it into latents."""
    return _hash_components(folder, LAYOUTS)


def is_made_by(latents_hash: str, folder: Path) -> bool:
    """Whether latents that say `latents_hash` were made by the preview transformer of this checkpoint, as far as a hash tells."""
    own = checkpoint_hash(folder)
    return not own or latents_hash in (own, installation_hash(folder))


def _hash_components(folder: Path, components: Iterable[str]) -> str:
    folder = Path(folder)
    digest = hashlib.sha256()
    component_folders = {LAYOUTS[name].folder for name in components}
    for name in list_files(folder):
        if name.split("/")[0] not in component_folders:
            continue
        path = folder / name
        digest.update(f"{name}\0{path.stat().st_size}\0".encode())
        with open(path, "rb") as handle:
            digest.update(handle.read(SMALL_BYTES))
    return digest.hexdigest()[:16]
