"""What the doctor says about a checkpoint folder: per component present or missing files, sizes, dtypes, faults, and how to get the rest.

Reads headers only, and compares their names, shapes and dtypes with the models. Returns data for programs and lines of text for people.
"""

import os
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from magi2_core.errors import CheckpointError

from .catalog import EMBEDDED, LAYOUTS, RELEASED_BYTES, REPOSITORY, REVISION, download_line, missing_files
from .index import ComponentFiles, read_component, read_torch_file

GIGABYTE = 1e9
MAX_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class ComponentReport:
    """One component: `state` is ok, missing, incomplete or damaged; `dtypes` maps a dtype to its number of tensors."""

    name: str
    folder: str
    state: str
    file_bytes: int
    released_bytes: int
    tensors: int
    dtypes: dict[str, int]
    missing: tuple[str, ...]
    fault: str


@dataclass(frozen=True, kw_only=True)
class CheckpointReport:
    """A checkpoint folder: its components, the bytes still to fetch for the release (None for an embedded or tiny one), free disk."""

    path: Path
    is_embedded: bool
    components: tuple[ComponentReport, ...]
    missing_bytes: int
    free_bytes: int
    is_complete: bool

    def lines(self) -> list[str]:
        """The report as text, one line a component, then what to do."""
        out = [f"checkpoint {self.path}{' (embedded)' if self.is_embedded else ''}"]
        for part in self.components:
            dtypes = ", ".join(f"{count} x {name}" for name, count in part.dtypes.items())
            held = f"{_size(part.file_bytes)}, {part.tensors} tensors ({dtypes})" if part.tensors else _size(part.file_bytes)
            out.append(f"  {part.name:<13}{part.state:<12}{held}")
            if part.missing:
                more = f" and {len(part.missing) - MAX_NAMED} more" if len(part.missing) > MAX_NAMED else ""
                out.append(f"    missing: {', '.join(part.missing[:MAX_NAMED])}{more} (needed for: {LAYOUTS[part.name].purpose})")
            if part.fault:
                out.append(f"    fault: {part.fault}")
        if self.is_complete:
            return out
        bad = [part.name for part in self.components if part.state != "ok"]
        out.append(f"  not usable: {', '.join(bad)}. The release is {REPOSITORY}, revision {REVISION}, {_size(RELEASED_BYTES)} in all.")
        out.append(f"  still to fetch: about {_size(self.missing_bytes)}; free on this disk: {_size(self.free_bytes)}")
        if self.missing_bytes > self.free_bytes:
            out.append(
                f"  the disk is too small by {_size(self.missing_bytes - self.free_bytes)}: free space or choose another --local-dir"
            )
        out.append("  get it (run the same line again to resume):")
        whole = len(bad) == len(self.components)
        out.extend(f"    {line}" for line in ([download_line(self.path)] if whole else [download_line(self.path, name) for name in bad]))
        return out


def _size(count: int) -> str:
    return f"{count / GIGABYTE:.1f} GB" if count >= GIGABYTE / 10 else f"{count / 1e6:.1f} MB"


def _dtypes(files: ComponentFiles) -> dict[str, int]:
    return dict(Counter(str(entry.dtype).removeprefix("torch.") for entry in files.tensors.values()).most_common())


def _torch_dtypes(state: dict[str, object]) -> dict[str, int]:
    """Dtypes of the tensors of a torch pickle, the nested state dicts of a `.ckpt` included."""
    counts: Counter[str] = Counter()
    for value in state.values():
        for item in value.values() if isinstance(value, dict) else (value,):
            if hasattr(item, "dtype"):
                counts[str(item.dtype).removeprefix("torch.")] += 1
    return dict(counts.most_common())


def report_component(name: str, root: Path) -> ComponentReport:
    """Looks at one component of the checkpoint folder `root`; never raises on a fault of the files, it is in the report."""
    layout = LAYOUTS[name]
    folder = Path(root) / layout.folder
    size = sum(entry.stat().st_size for entry in os.scandir(folder) if entry.is_file()) if folder.is_dir() else 0
    missing: tuple[str, ...] = ()
    dtypes: dict[str, int] = {}
    fault = ""
    try:
        missing = tuple(missing_files(name, root))
        if not missing:
            if layout.files and layout.files[0].endswith((".pth", ".ckpt")):
                dtypes = _torch_dtypes(read_torch_file(name, folder / layout.files[0]))
            else:
                dtypes = _dtypes(read_component(name, folder))
            # Model code is imported only here: the rest of a report needs headers only.
            from .components import check_component

            check_component(name, root)
    except CheckpointError as error:
        fault = str(error)
    state = "damaged" if fault else "ok" if not missing else "incomplete" if size else "missing"
    return ComponentReport(
        name=name,
        folder=layout.folder,
        state=state,
        file_bytes=size,
        released_bytes=layout.released_bytes,
        tensors=sum(dtypes.values()),
        dtypes=dtypes,
        missing=missing,
        fault=fault,
    )


def _free_bytes(folder: Path) -> int:
    """Free bytes of the disk that holds `folder` or its nearest existing parent."""
    place = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    return shutil.disk_usage(place).free


def report_checkpoint(root: Path) -> CheckpointReport:
    """Looks at every component of the checkpoint folder `root`, which need not exist yet."""
    root = Path(os.path.expanduser(root)).resolve()
    parts = tuple(report_component(name, root) for name in LAYOUTS)
    lacking = sum(max(part.released_bytes - part.file_bytes, 0) for part in parts if part.state in ("missing", "incomplete"))
    lacking += sum(part.released_bytes for part in parts if part.state == "damaged")
    return CheckpointReport(
        path=root,
        is_embedded=root == EMBEDDED,
        components=parts,
        missing_bytes=lacking,
        free_bytes=_free_bytes(root),
        is_complete=all(part.state == "ok" for part in parts),
    )
