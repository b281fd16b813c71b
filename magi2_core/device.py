"""The only file that names cuda, musa or cpu, or a collective library.

MUSA facts (notes of the peers): `torch.version.musa` decides, `torch.cuda.is_available()` stays False until torchada is
imported, which then maps `torch.cuda` calls; device strings stay "cuda" after that. torch is imported lazily.
"""

import importlib
import platform
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .errors import DependencyError, RequestError

if TYPE_CHECKING:
    import torch


LAYOUT_FORM = "auto, or cp<N> followed by ep<M> and cfg2 where wanted, as in cp8ep4 or cp4cfg2ep4"


@dataclass(frozen=True, kw_only=True)
class DeviceInfo:
    """One accelerator (or the CPU): what a user sees and what tuning tables are keyed by."""

    name: str
    kind: str
    index: int
    total_bytes: int
    free_bytes: int
    architecture: str


def is_musa() -> bool:
    """True on a torch build for Moore Threads cards."""
    import torch

    return getattr(torch.version, "musa", None) is not None


def prepare_platform() -> str:
    """Imports what the platform needs and returns "cuda", "musa" or "cpu". Raises DependencyError without torchada on MUSA."""
    import torch

    if is_musa():
        try:
            importlib.import_module("torchada")
        except ImportError:
            raise DependencyError(
                "This torch is built for MUSA; the package torchada is needed. Install it: pip install torchada"
            ) from None
        return "musa"
    return "cuda" if torch.cuda.is_available() else "cpu"


def accelerator_module() -> Any:
    """`torch.cuda` or, on MUSA, `torch.musa`; None on a machine without an accelerator."""
    import torch

    kind = prepare_platform()
    if kind == "cpu":
        return None
    return torch.musa if kind == "musa" and hasattr(torch, "musa") else torch.cuda


def list_devices() -> list[DeviceInfo]:
    """Every accelerator of this process with its memory; the CPU alone when there is none."""
    kind = prepare_platform()
    module = accelerator_module()
    if module is None:
        return [
            DeviceInfo(
                name=platform.processor() or platform.machine(), kind="cpu", index=0, total_bytes=0, free_bytes=0, architecture="cpu"
            )
        ]
    found = []
    for index in range(module.device_count()):
        properties = module.get_device_properties(index)
        free, total = module.mem_get_info(index)
        found.append(
            DeviceInfo(
                name=properties.name,
                kind=kind,
                index=index,
                total_bytes=total,
                free_bytes=free,
                architecture=f"sm_{properties.major}{properties.minor}" if kind == "cuda" else "musa",
            )
        )
    return found


def resolve(name: str = "auto") -> "torch.device":
    """The torch device for `auto`, `cpu`, `cuda`, `cuda:1`, `musa` ...; raises RequestError when it is not there."""
    import torch

    kind = prepare_platform()
    if name == "auto":
        return torch.device("cpu" if kind == "cpu" else f"{kind}:0")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise RequestError(f"device {name!r} is not understood. Use auto, cpu, cuda, cuda:N, musa or musa:N.") from None
    if device.type == "cpu":
        return device
    module = accelerator_module()
    count = module.device_count() if module is not None else 0
    if device.type != kind or (device.index or 0) >= count:
        there = "torch finds no accelerator" if module is None else f"this machine has {count} {kind} device(s)"
        raise RequestError(f"device {name!r} is not there: {there}. Use auto or cpu, or check the driver.")
    return torch.device(device.type, device.index or 0)


def parse_layout(name: str) -> dict[str, int]:
    """Degrees by axis of a layout name: cp4cfg2 -> {"cp": 4, "cfg": 2}; cp is always there. Raises RequestError on another form."""
    parts = re.findall(r"(cp|ep|cfg)(\d+)", name)
    axes = [axis for axis, _ in parts]
    if "".join(axis + number for axis, number in parts) != name or "cp" not in axes or len(set(axes)) != len(axes):
        raise RequestError(f"layout {name!r} is not understood. Use {LAYOUT_FORM}.")
    degrees = {axis: int(number) for axis, number in parts}
    if degrees["cp"] < 1 or degrees.get("cfg", 1) < 1:
        raise RequestError(f"layout {name!r}: degrees start at 1. Use {LAYOUT_FORM}.")
    return degrees


def collective_backend(device: "torch.device") -> str:
    """Name of the collective library for tensors on `device`: nccl, mccl or gloo."""
    return {"cuda": "nccl", "musa": "mccl"}.get(device.type, "gloo")


def process_group_backend(device: "torch.device") -> str:
    """Backend of a process group on `device`: its own library, and gloo beside it for small messages between the hosts' CPUs."""
    library = collective_backend(device)
    return library if device.type == "cpu" else f"cpu:gloo,{device.type}:{library}"


def set_device(device: "torch.device") -> None:
    """Makes `device` the current one of this process; nothing on a CPU."""
    if device.type != "cpu":
        accelerator_module().set_device(device)


def default_dtype(device: "torch.device") -> "torch.dtype":
    """Arithmetic of the transformers when the user says nothing: bfloat16 on an accelerator, float32 on a CPU."""
    import torch

    return torch.float32 if device.type == "cpu" else torch.bfloat16


def synchronize(device: "torch.device") -> None:
    """Waits for the device's queued work; nothing on a CPU."""
    if device.type != "cpu":
        accelerator_module().synchronize(device)


def empty_cache(device: "torch.device") -> None:
    """Returns cached blocks of the allocator to the device; nothing on a CPU."""
    if device.type != "cpu":
        accelerator_module().empty_cache()


def peak_bytes(device: "torch.device", reset: bool = False) -> int:
    """Highest allocated bytes on `device` since the last reset; 0 on a CPU."""
    if device.type == "cpu":
        return 0
    module = accelerator_module()
    peak = int(module.max_memory_allocated(device))
    if reset:
        module.reset_peak_memory_stats(device)
    return peak


def all_finite(tensor: "torch.Tensor") -> bool:
    """Whether no entry is infinite or NaN, as |x| < inf: torch.isfinite took 1.8 s of a step in a published MUSA profile; the answer is the same."""
    return bool((tensor.abs() < float("inf")).all())


def use_full_fp32() -> None:
    """Switches TF32 off: the router, the adapters and the VAE are defined in true float32."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def is_out_of_memory(error: BaseException) -> bool:
    """True for the out-of-memory errors of a device's allocator, the CPU's (a plain RuntimeError) included."""
    import torch

    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in text or "can't allocate memory" in text
