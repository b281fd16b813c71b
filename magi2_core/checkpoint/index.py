"""What the weight files of a component hold: names, shapes, dtypes and byte ranges, read from headers only; then tensors by mmap.

Every fault of a file is found here before any weight is read and is ONE CheckpointError naming component, file and tensor. The
safetensors header is parsed here because the library neither reports a tensor stored twice nor says how far a download got; the
data itself is read through safetensors and torch. Layouts: spec preview.md 2, components.md 1.2, 2.1, 3.2.
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from magi2_core.config_values import read_json
from magi2_core.errors import CheckpointError

from .catalog import INDEX_FILE, weight_files
from .slices import Slice

DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
MAX_HEADER_BYTES = 100_000_000
LFS_POINTER = b"version https://git-lfs"
AGAIN = "Download this file again (a resumed download keeps what is whole)."


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One stored tensor: `start` and `stop` are byte offsets in `file` (0, 0 in a torch pickle); `key` is its name in the file."""

    key: str
    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int = 0
    stop: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class ComponentFiles:
    """The tensors of one component by the name its module uses. `files` are in reading order; `state` is a torch state dict, mapped
    from the file or, with `is_owned`, computed in memory and free to be used as it is."""

    name: str
    folder: Path
    files: tuple[Path, ...]
    tensors: Mapping[str, TensorEntry]
    state: Mapping[str, Tensor] | None = None
    is_owned: bool = False

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.tensors.values())

    def fail(self, problem: str, entry: TensorEntry | None = None, name: str = "") -> CheckpointError:
        """A CheckpointError that names component, file and tensor."""
        place = entry.file if entry else self.files[0] if len(self.files) == 1 else self.folder / INDEX_FILE
        return CheckpointError(f"{self.name}: {place}, tensor {name or (entry.key if entry else '?')}: {problem}")

    def renamed(self, rename: Callable[[str], str | None]) -> "ComponentFiles":
        """The same files under other tensor names; names mapped to None are left out. Raises CheckpointError when two names meet."""
        tensors: dict[str, TensorEntry] = {}
        for key, entry in self.tensors.items():
            name = rename(key)
            if name is None:
                continue
            if name in tensors:
                raise self.fail(f"stored twice, as {tensors[name].key} and {entry.key}.", entry, name)
            tensors[name] = entry
        return replace(self, tensors=tensors)

    def by_file(self) -> list[tuple[Path, list[tuple[str, TensorEntry]]]]:
        """Names and entries grouped by file, each group in the order of the bytes."""
        groups: dict[Path, list[tuple[str, TensorEntry]]] = {file: [] for file in self.files}
        for name, entry in self.tensors.items():
            groups[entry.file].append((name, entry))
        return [(file, sorted(group, key=lambda item: item[1].start)) for file, group in groups.items()]


Reader = Callable[[TensorEntry, Slice | None], Tensor]
"""Entry and slice -> the stored part of it, a view of the mapped file: valid while the file is open, to be copied."""


def _pairs_once(where: str) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise CheckpointError(f"{where}, tensor {twice}: stored twice in one file. The file is damaged. {AGAIN}")
        return values

    return build


def _read_header_json(component: str, file: Path) -> tuple[dict[str, Any], int, int]:
    """The parsed header, the offset where data starts and the file's size."""
    where = f"{component}: {file}"
    try:
        size = file.stat().st_size
        with open(file, "rb") as handle:
            first = handle.read(8)
            if size < 8:
                raise CheckpointError(f"{where}: is cut after {size} bytes. {AGAIN}")
            if (first + handle.read(len(LFS_POINTER) - 8)) == LFS_POINTER:
                raise CheckpointError(f"{where}: is a Git LFS pointer, not the weights. Run `git lfs pull` or download the file.")
            handle.seek(8)
            length = int.from_bytes(first, "little")
            if length > MAX_HEADER_BYTES:
                raise CheckpointError(f"{where}: header length {length} is impossible, the file is damaged or no safetensors file. {AGAIN}")
            if 8 + length > size:
                raise CheckpointError(f"{where}: is cut inside its header: {size} bytes, the header ends at {8 + length}. {AGAIN}")
            text = handle.read(length)
    except OSError as error:
        raise CheckpointError(f"{where}: cannot be read ({error.strerror or error}).") from None
    try:
        header = json.loads(text, object_pairs_hook=_pairs_once(where))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: damaged header ({error}). {AGAIN}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{where}: damaged header (not an object). {AGAIN}")
    header.pop("__metadata__", None)
    return header, 8 + length, size


def _entry(component: str, file: Path, key: str, value: Any, base: int) -> TensorEntry:
    where = f"{component}: {file}, tensor {key}"
    try:
        shape, (start, stop), dtype = tuple(value["shape"]), value["data_offsets"], str(value["dtype"])
        whole = all(isinstance(number, int) and number >= 0 for number in (*shape, start, stop))
    except (TypeError, KeyError, ValueError):
        raise CheckpointError(f"{where}: damaged header entry {value!r}. {AGAIN}") from None
    if not whole or stop < start:
        raise CheckpointError(f"{where}: damaged header entry, shape {shape}, bytes {start} to {stop}. {AGAIN}")
    if dtype not in DTYPES:
        raise CheckpointError(f"{where}: dtype {dtype} is not read, expected one of {', '.join(DTYPES)}.")
    entry = TensorEntry(key=key, file=file, shape=shape, dtype=DTYPES[dtype], start=base + start, stop=base + stop)
    if entry.nbytes != stop - start:
        raise CheckpointError(
            f"{where}: header gives {stop - start} bytes for shape {list(shape)} {dtype}, expected {entry.nbytes}. {AGAIN}"
        )
    return entry


def read_safetensors_header(component: str, file: Path) -> dict[str, TensorEntry]:
    """Every tensor of one safetensors file, in the order of its bytes, checked against the file's size.

    Raises CheckpointError on a cut file, a damaged header, overlapping or missing byte ranges, a name stored twice.
    """
    header, base, size = _read_header_json(component, file)
    entries = sorted(
        (_entry(component, file, key, value, base) for key, value in header.items()), key=lambda entry: (entry.start, entry.stop)
    )
    end = base
    for entry in entries:
        if entry.start != end:
            raise CheckpointError(
                f"{component}: {file}, tensor {entry.key}: its bytes start at {entry.start}, expected {end}: the header is damaged. {AGAIN}"
            )
        end = entry.stop
    if size < end:
        cut = next(entry for entry in entries if entry.stop > size)
        raise CheckpointError(f"{component}: {file}, tensor {cut.key}: the file is cut: {size} bytes of {end}. {AGAIN}")
    if size > end:
        raise CheckpointError(f"{component}: {file}: has {size - end} bytes after its last tensor, expected {end} in all. {AGAIN}")
    return {entry.key: entry for entry in entries}


def _weight_map(component: str, folder: Path) -> dict[str, str] | None:
    path = folder / INDEX_FILE
    if not path.is_file():
        return None
    read_json(path)
    parsed = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_pairs_once(f"{component}: {path}"))
    return {str(key): str(value) for key, value in parsed["weight_map"].items()}


def read_component(name: str, folder: Path) -> ComponentFiles:
    """Reads the headers of a safetensors component: shards with an index, numbered shards, or one `model.safetensors`.

    Raises CheckpointError on an absent shard, any fault of a file, a tensor in two shards, or an index that disagrees with the shards.
    """
    folder = Path(folder)
    names = weight_files(name, folder)
    absent = [file for file in names if not (folder / file).is_file()]
    if absent:
        which = f"{absent[0]} and {len(absent) - 1} more" if len(absent) > 1 else absent[0]
        raise CheckpointError(
            f"{name}: {folder} has {len(names) - len(absent)} of {len(names)} weight files; missing {which}. Download them."
        )
    weight_map = _weight_map(name, folder)
    tensors: dict[str, TensorEntry] = {}
    for file in names:
        for key, entry in read_safetensors_header(name, folder / file).items():
            if key in tensors:
                raise CheckpointError(f"{name}: {folder / file}, tensor {key}: stored twice, also in {tensors[key].file.name}.")
            if weight_map is not None and weight_map.get(key) != file:
                said = f"the index says {weight_map[key]}" if key in weight_map else "unknown, the index does not list it"
                raise CheckpointError(f"{name}: {folder / file}, tensor {key}: {said}. {AGAIN}")
            tensors[key] = entry
    for key, file in (weight_map or {}).items():
        if key not in tensors:
            raise CheckpointError(f"{name}: {folder / file}, tensor {key}: missing, the index says it is in this file. {AGAIN}")
    return ComponentFiles(name=name, folder=folder, files=tuple(folder / file for file in names), tensors=tensors)


def read_torch_file(component: str, file: Path) -> dict[str, Any]:
    """Maps a `.pth` or `.ckpt` file (zip format, tensors only, nothing is executed). Raises CheckpointError."""
    if not file.is_file():
        raise CheckpointError(f"{component}: {file} is missing.")
    try:
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises RuntimeError, UnpicklingError, EOFError, OSError, ValueError ... for damage
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"{component}: {file}: is damaged, cut or no weight-only torch file ({reason[:200]}). {AGAIN}") from None
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{component}: {file}: holds a {type(state).__name__}, expected a state dict.")
    return dict(state)


def torch_component(component: str, file: Path, state: Mapping[str, Any], *, is_owned: bool = False) -> ComponentFiles:
    """The flat state dict `state` of `file` as a component. Raises CheckpointError on a non-tensor."""
    tensors: dict[str, TensorEntry] = {}
    for key, value in state.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(f"{component}: {file}, tensor {key}: is a {type(value).__name__}, expected a tensor.")
        tensors[str(key)] = TensorEntry(key=str(key), file=file, shape=tuple(value.shape), dtype=value.dtype)
    return ComponentFiles(name=component, folder=file.parent, files=(file,), tensors=tensors, state=state, is_owned=is_owned)


def read_ahead(descriptor: int, entry: TensorEntry, part: Slice | None) -> None:
    """Asks the system to fetch what `part` of a safetensors tensor needs; a hint, without effect where there is no such call.

    Asked for one tensor ahead of the copying it doubled the speed of a cold load (1.2 to 2.4 GB/s on a virtual disk).
    """
    if not hasattr(os, "posix_fadvise") or entry.start == entry.stop:
        return
    start, length = entry.start, entry.nbytes
    if part is not None and part.dim == 0:
        row = entry.nbytes // max(entry.shape[0], 1)
        first, last = part.stored(entry.shape[0])
        start, length = start + first * row, (last - first) * row
    if length:
        os.posix_fadvise(descriptor, start, length, os.POSIX_FADV_WILLNEED)


def _range(entry: TensorEntry, part: Slice) -> tuple[slice, ...]:
    return (*(slice(None),) * part.dim, slice(*part.stored(entry.shape[part.dim])))


@contextmanager
def open_reader(file: Path, state: Mapping[str, Tensor] | None = None) -> Iterator[Reader]:
    """Maps one weight file for reading; for a torch file pass its mapped state dict. No data moves until a tensor is copied."""
    if state is not None:

        def read_state(entry: TensorEntry, part: Slice | None) -> Tensor:
            tensor = state[entry.key]
            return tensor if part is None else tensor[_range(entry, part)]

        yield read_state
        return
    from safetensors import safe_open

    with safe_open(str(file), framework="pt", device="cpu") as handle:

        def read_mapped(entry: TensorEntry, part: Slice | None) -> Tensor:
            if part is None:
                return handle.get_tensor(entry.key)
            return handle.get_slice(entry.key)[_range(entry, part)]

        yield read_mapped
