"""Run by test_load.py in a process of its own: loads a slice of a big checkpoint and prints peak RssAnon growth, kept, largest, read bytes."""

import importlib.util
import sys
import threading
import time
from pathlib import Path

root, folder, heads, dtype = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
spec = importlib.util.spec_from_file_location("packages", root / "magi2_core" / "packages.py")
packages = importlib.util.module_from_spec(spec)
spec.loader.exec_module(packages)
packages.register()

import torch  # noqa: E402
from torch import nn  # noqa: E402

from magi2_core.checkpoint.index import read_component  # noqa: E402
from magi2_core.checkpoint.load import load_module  # noqa: E402
from magi2_core.checkpoint.slices import expert_slices  # noqa: E402
from magi2_core.config import MoEConfig  # noqa: E402


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.moe_mlp = nn.Module()
        self.moe_mlp.W_up = nn.Parameter(torch.empty(8 * 64, 512 * 1024, dtype=getattr(torch, dtype)))
        self.norm = nn.Parameter(torch.empty(1024))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))


def rss_anon() -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) * 1024


torch.set_num_threads(1)
files = read_component("preview", folder)
before, peak, done = rss_anon(), 0, threading.Event()


def watch() -> None:
    global peak
    while not done.is_set():
        peak = max(peak, rss_anon() - before)
        time.sleep(0.002)


watcher = threading.Thread(target=watch)
watcher.start()
result = load_module(
    Model,
    files,
    device="cpu",
    dtype_of=lambda name: torch.float32 if name.endswith("norm") else torch.bfloat16,
    slices=expert_slices(MoEConfig(num_heads=8, num_experts=64, top_k=2), 1, 8 // heads),
)
peak = max(peak, rss_anon() - before)
done.set()
watcher.join()
tensors = list(result.module.state_dict().values())
print(peak, sum(t.nbytes for t in tensors), max(t.nbytes for t in tensors), result.bytes_read)
