"""A module built on the meta device becomes a loaded one: checked against the headers first, then filled tensor by tensor.

Nothing is read before every name, shape and dtype agrees. Only the rows this rank keeps are copied out of the mapped files, each
straight to its device and dtype and assigned, so the host holds what it keeps plus at most one tensor. Facts: spec preview.md 2.4.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from magi2_core.errors import CheckpointError, Interrupted
from magi2_core.request import Progress

from .index import ComponentFiles, TensorEntry, open_reader, read_ahead
from .slices import Slice, SliceRule

ProgressCallback = Callable[[Progress], None]
StopCheck = Callable[[], bool]
DtypeRule = Callable[[str], torch.dtype | None]
"""Tensor name -> dtype the file must have, None for any floating-point one."""
M = TypeVar("M")
ModuleT = TypeVar("ModuleT", bound=nn.Module)


@dataclass(frozen=True, kw_only=True)
class LoadResult(Generic[M]):
    """The loaded module, ready to run, and the bytes that were read from its files."""

    module: M
    bytes_read: int


def file_dtypes(module: nn.Module) -> DtypeRule:
    """The rule "the file has the dtype that `module` has" for `load_module`'s `dtype_of`."""
    dtypes = {name: tensor.dtype for name, tensor in module.state_dict(keep_vars=True).items()}
    return dtypes.__getitem__


def check_names(component: ComponentFiles, wanted: Mapping[str, Tensor]) -> None:
    """Raises CheckpointError on the first tensor that the files lack or that the module does not know, with the count of all."""
    missing = [name for name in wanted if name not in component.tensors]
    unknown = [name for name in component.tensors if name not in wanted]
    if not missing and not unknown:
        return
    totals = f"({len(missing)} missing and {len(unknown)} unknown; the model has {len(wanted)} tensors)"
    if missing:
        raise component.fail(
            f"missing {totals}. Check that the sizes in config.json belong to these files, or download them again.", name=missing[0]
        )
    raise component.fail(
        f"unknown, the model has no such tensor {totals}. Check that the sizes in config.json belong to these files.",
        component.tensors[unknown[0]],
        unknown[0],
    )


def _check_tensor(component: ComponentFiles, name: str, wanted: Tensor, dtype: torch.dtype | None) -> None:
    entry = component.tensors[name]
    if entry.shape != tuple(wanted.shape):
        raise component.fail(f"shape is {list(entry.shape)}, expected {list(wanted.shape)}. Check the sizes in config.json.", entry, name)
    if dtype is None:
        if not entry.dtype.is_floating_point:
            raise component.fail(f"dtype is {entry.dtype}, expected a floating-point one.", entry, name)
    elif entry.dtype != dtype:
        raise component.fail(
            f"dtype is {entry.dtype}, expected {dtype}. Quantised or converted files are not read: use the released ones.", entry, name
        )


def check_module(module: nn.Module, component: ComponentFiles, dtype_of: DtypeRule | None = None) -> dict[str, Tensor]:
    """Raises CheckpointError unless names, shapes and dtypes of `component` are those of `module`; returns the module's tensors.

    `module` has the sizes of the files, whatever part of them a rank keeps. See `load_module` for `dtype_of`.
    """
    wanted = dict(module.state_dict(keep_vars=True))
    check_names(component, wanted)
    for name, tensor in wanted.items():
        _check_tensor(component, name, tensor, tensor.dtype if dtype_of is None else dtype_of(name))
    return wanted


def _fill(target: Tensor, stored: Tensor, part: Slice | None) -> Tensor:
    """Copies what was stored of a tensor into `target`; rows past the file's end become zero."""
    if target.shape == stored.shape:
        return target.copy_(stored)
    assert part is not None
    target.zero_().narrow(part.dim, 0, stored.shape[part.dim]).copy_(stored)
    return target


def _placed(module: nn.Module, name: str, shape: tuple[int, ...], wanted: Tensor, device: torch.device) -> Tensor | None:
    """Where the owner of the weight wants it, for one that keeps weights in another form; None for an ordinary parameter."""
    path, _, leaf = name.rpartition(".")
    place = getattr(module.get_submodule(path), "place_weight", None)
    return None if place is None else place(leaf, shape, wanted.dtype, device)


def _assign(module: nn.Module, name: str, value: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    if leaf in owner._parameters:
        owner._parameters[leaf] = nn.Parameter(value, requires_grad=False)
    else:
        owner._buffers[leaf] = value


def _load_file(
    module: nn.Module,
    component: ComponentFiles,
    file: Path,
    items: list[tuple[str, TensorEntry, Tensor]],
    slices: SliceRule | None,
    device: torch.device,
) -> int:
    """Loads the named tensors of one file into `module`; returns the bytes read."""
    count = 0
    parts = [slices(name) if slices else None for name, _, _ in items]
    with open(file, "rb") as handle, open_reader(file, component.state) as read:
        for index, (name, entry, wanted) in enumerate(items):
            for ahead in (index, index + 1)[index > 0 :]:
                if ahead < len(items):
                    read_ahead(handle.fileno(), items[ahead][1], parts[ahead])
            stored = read(entry, parts[index])
            part = parts[index]
            shape = tuple(wanted.shape) if part is None else part.local_shape(wanted.shape)
            target = _placed(module, name, shape, wanted, device)
            if target is not None:
                _fill(target, stored, part)
            elif component.is_owned and part is None and stored.dtype == wanted.dtype and stored.device == device:
                _assign(module, name, stored)
            else:
                _assign(module, name, _fill(torch.empty(shape, dtype=wanted.dtype, device=device), stored, part))
            count += stored.nbytes
    return count


def finish(module: nn.Module) -> None:
    """Runs `module.finish_loading()` where it exists, switches to evaluation, and makes sure that nothing is left without data."""
    if callable(getattr(module, "finish_loading", None)):
        module.finish_loading()  # type: ignore[operator]
    module.eval().requires_grad_(False)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        assert not tensor.is_meta, f"{type(module).__name__}.{name} has no data after loading"


def load_module(
    factory: Callable[[], ModuleT],
    component: ComponentFiles,
    *,
    device: torch.device | str,
    dtype_of: DtypeRule | None = None,
    slices: SliceRule | None = None,
    progress: ProgressCallback | None = None,
    should_stop: StopCheck | None = None,
) -> LoadResult[ModuleT]:
    """Builds `factory()` without memory, checks it against `component`, then loads it to `device`.

    Args:
        factory: makes the module in the sizes of the files and the dtypes to keep.
        component: headers of the weight files, from `read_component` or `torch_component`.
        dtype_of: tensor name -> dtype the FILE must have, None for any floating-point one; by default the module's own.
            The value is converted to the module's dtype after that check.
        slices: tensor name -> the part that this rank keeps, None for all of it; the loaded tensor has that part only.
        progress: called after each file with stage "load" and a message as "preview: shard 12/56".
        should_stop: asked before each file; True raises Interrupted.

    Raises CheckpointError naming component, file and tensor on the first disagreement, before any weight is read.
    """
    device = torch.device(device)
    with torch.device("meta"):
        module = factory()
    wanted = check_module(module, component, dtype_of)
    groups = component.by_file()
    bytes_read, started = 0, time.monotonic()
    for number, (file, entries) in enumerate(groups, start=1):
        if should_stop is not None and should_stop():
            raise Interrupted(f"loading of {component.name} was cancelled at shard {number} of {len(groups)}.")
        try:
            bytes_read += _load_file(module, component, file, [(name, entry, wanted[name]) for name, entry in entries], slices, device)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{component.name}: {file}: cannot be read ({error}). It changed since its header was checked.") from None
        if progress is not None:
            seconds = (time.monotonic() - started) / number
            text = f"{component.name}: shard {number}/{len(groups)}"
            remaining = seconds * (len(groups) - number)
            progress(Progress(stage="load", step=number, total=len(groups), seconds_per_step=seconds, eta_seconds=remaining, message=text))
    finish(module)
    return LoadResult(module=module, bytes_read=bytes_read)
