"""A process that owns a fleet and then ends in one of several ways; run by test_lifecycle.py, prints pids when a job is under way.

Arguments: checkpoint, runtime directory, backend mode, way: wait (to be killed), execv or exit.
"""

import importlib.util
import json
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("magi2_packages", ROOT / "magi2_core" / "packages.py")
packages = importlib.util.module_from_spec(spec)
spec.loader.exec_module(packages)
packages.register()


def main() -> None:
    import torch

    from magi2_core.backend.client import BackendClient, BackendSpec
    from magi2_core.request import Conditioning, SampleRequest

    checkpoint, folder, mode, way = sys.argv[1:]
    text = torch.zeros(1, 3, 64, dtype=torch.bfloat16)
    request = SampleRequest(
        conditioning=Conditioning(text=text, negative=text),
        width=32,
        height=32,
        seconds=2.0,
        experimental_seconds=True,
        num_inference_steps=1000,
    )
    client = BackendClient(BackendSpec(checkpoint=checkpoint, devices=("cpu", "cpu"), mode=mode), Path(folder))
    job = client.submit(request)
    stage = ""
    while stage != "preview":
        stage = job.next_event(60).value.stage
    status = client.status()
    pids = [status["pid"], status["fleet"]["driver_pid"], *(rank["pid"] for rank in status["fleet"]["ranks"])]
    print(json.dumps({"pids": pids, "key": status["key"]}), flush=True)
    if way == "execv":
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(60)"])
    if way == "exit":
        return
    time.sleep(60)


main()
