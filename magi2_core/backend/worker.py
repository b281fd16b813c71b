"""One rank of a fleet: death watch, process groups, pipeline, and only then RPC, through which the driver calls its service.

Started by the head as `python packages.py magi2_core.backend.worker`; the device it is shown is the only one it sees. Calls may arrive
the moment RPC is up, so that comes last.
"""

import argparse
import faulthandler
import importlib
import json
import logging
import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

from magi2_core import env
from magi2_core.errors import Magi2Error
from magi2_core.parallel.groups import Groups, ParallelConfig
from magi2_core.pipeline.build import Pipeline, build_pipeline

from . import deathwatch, faults, rpc, runtime, service
from .spec import BackendSpec

LOG_CHECK_SECONDS = 30.0


def main() -> int:
    """Serves until the head ends."""
    parser = argparse.ArgumentParser()
    for name in ("spec", "layout", "device", "folder", "generation", "log"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--rank", type=int, required=True)
    options = parser.parse_args()
    options.umask = os.umask(0o077)  # of the user; it holds for the files that the user asks for
    deathwatch.watch_parent(lambda reason: os._exit(0))
    faulthandler.enable()
    logging.basicConfig(level=env.log_level(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)
    threading.Thread(target=_rotate, args=(Path(options.log),), name="magi2-log", daemon=True).start()
    try:
        _serve(options)
    except Magi2Error as error:
        text = " ".join(str(error).splitlines())
        sys.stderr.write(f"fatal {type(error).__name__}: {text}\n")
        sys.stderr.flush()
        os._exit(error.exit_code)
    return 0


def _serve(options: argparse.Namespace) -> None:
    spec = BackendSpec.from_json(options.spec)
    layout = ParallelConfig(**json.loads(options.layout))
    generation, rank = Path(options.generation), options.rank
    groups = create_groups(layout, rank, options.device, generation / "groups")
    pipeline = make_pipeline(spec, options.device, groups)

    def rejoin(tag: str) -> None:
        groups.adopt(create_groups(layout, rank, options.device, generation / f"groups-{tag}"))

    own = service.Service(pipeline, groups, folder=Path(options.folder), step_seconds=spec.step_seconds, rejoin=rejoin)
    own.video_mode = 0o666 & ~options.umask
    faults.install(own)
    service.install(own)
    logging.getLogger(__name__).info("rank %d of %d on %s, layout %s", rank, layout.world, options.device, layout.name)
    rpc.join(f"rank{rank}", rank + 1, layout.world + 1, (generation / "rpc").as_uri())
    own.loop()


def create_groups(layout: ParallelConfig, rank: int, device: str, file: Path) -> Groups:
    """The process groups of this rank; a fleet of one has none."""
    if layout.world == 1:
        return Groups.local()
    import torch.distributed as dist

    # Its functions take the default group of the moment of import as a default argument. Imported later, by torch itself, they would
    # keep a group alive that was left, sockets open: ranks that wait for this one would not notice.
    importlib.import_module("torch.distributed.nn.functional")
    store = dist.FileStore(str(file), layout.world)
    store.set_timeout(timedelta(seconds=rpc.START_SECONDS))
    return Groups.create(layout, rank=rank, device=device, store=store)


def make_pipeline(spec: BackendSpec, device: str, groups: Groups) -> Pipeline:
    """The pipeline of the specification; nothing is loaded yet."""
    placement = {"text_encoder": spec.text_encoder, "vae": spec.vae}
    return build_pipeline(
        Path(spec.checkpoint),
        device=device,
        dtype=None if spec.dtype == "auto" else spec.dtype,
        kernels=spec.kernels,
        placement={name: mode for name, mode in placement.items() if mode != "auto"},
        groups=groups,
    )


def _rotate(log: Path) -> None:
    """Gives the process a new log file when the old one is at its size."""
    while True:
        time.sleep(LOG_CHECK_SECONDS)
        if log.is_file() and log.stat().st_size >= runtime.LOG_BYTES:
            runtime.rotate(log)
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            os.close(descriptor)
