"""Fleets from the command line: `serve`, `ps`, `kill`, and what `generate --backend` runs on."""

import argparse
import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from magi2_core.backend import runtime
from magi2_core.backend.client import BackendClient, BackendSpec
from magi2_core.checkpoint import catalog
from magi2_core.errors import BackendBusyError, BackendDiedError, Magi2Error, RequestError
from magi2_core.pipeline.hooks import StageHooks

from .plan import Plan

STOP_SECONDS = 10.0


def run(options: argparse.Namespace) -> int:
    """Runs one of the three; raises Magi2Error. Returns the exit code."""
    return {"serve": _serve, "ps": _ps, "kill": _kill}[options.command](options)


def _spec(options: argparse.Namespace, checkpoint: Path, **changes: Any) -> BackendSpec:
    names: Any = options.devices if options.devices == "auto" else tuple(part for part in options.devices.split(",") if part)
    given = {"checkpoint": str(checkpoint), "devices": names, "layout": options.layout}
    return BackendSpec(**{**given, "dtype": options.dtype or "auto", "kernels": options.kernels or "auto", **changes})


def _serve(options: argparse.Namespace) -> int:
    from magi2_core.backend.head import run_head
    from magi2_core.backend.launcher import HEAD_EXISTS

    checkpoint = catalog.get_checkpoint(options.checkpoint or catalog.EMBEDDED_NAME)
    times = {"idle_minutes": options.idle_minutes, "step_seconds": options.step_seconds}
    spec = _spec(options, checkpoint.path, mode="keep", **times)
    spec.validate()
    folder = runtime.prepare()

    def say(address: str) -> None:
        sys.stdout.write(f"{address}\n")
        sys.stdout.flush()
        token = f" Token: {folder / spec.key}.token" if address.startswith("tcp:") else ""
        sys.stderr.write(f"serving {checkpoint.name} as {spec.key}; the workers start with the first job. Ctrl-C ends it.{token}\n")

    code = run_head(spec.key, spec, folder, options.listen, on_ready=say)
    if code == HEAD_EXISTS:
        raise BackendBusyError(
            f"a fleet for this checkpoint and these devices runs already: {spec.key}. Use it (`ps` has its address), or end it: kill {spec.key}"
        )
    return code


def _ask(address: str, folder: Path) -> BackendClient:
    """A client attached to a head that is there already."""
    client = BackendClient(BackendSpec(checkpoint="", mode="attach", address=address), folder)
    client.connect()
    return client


def _ps(options: argparse.Namespace) -> int:
    folder = runtime.prepare()
    records = runtime.list_runtime_files(folder)
    for record in records:
        line = {
            "key": record.key,
            "pid": record.pid,
            "mode": record.mode,
            "address": record.address,
            "checkpoint": record.spec["checkpoint"],
        }
        if not runtime.is_alive(record.pid, record.started):
            line["state"] = "dead"
        else:
            try:
                client = _ask(record.address, folder)
                line |= describe(client.status())
                client.close()
            except Magi2Error as error:
                line["state"] = f"does not answer: {error}"
        sys.stdout.write(json.dumps(line) + "\n")
    if not records:
        sys.stderr.write("no fleet is running\n")
    return 0


def describe(status: dict[str, Any]) -> dict[str, Any]:
    """The part of a status that fits one line."""
    fleet, job = status["fleet"], status["job"]
    facts: dict[str, Any] = {"state": "busy" if job else "warm" if fleet["up"] else "idle", "ranks": len(fleet["ranks"])}
    facts |= {"layout": fleet["layout"], "waiting": len(status["queue"]), "clients": status["clients"] - 1}
    for name, key in (("memory_gb", "memory_bytes"), ("device_gb", "peak_bytes")):
        most = max((rank.get(key) or 0 for rank in fleet["ranks"]), default=0)
        if most:
            facts[name] = round(most / 1e9, 2)
    if job:
        facts["job"] = f"{job['stage']} {job['step']}/{job['total']}"
    return facts


def _kill(options: argparse.Namespace) -> int:
    folder = runtime.prepare()
    if bool(options.key) == options.all:
        raise RequestError("kill: name a fleet as `ps` lists it, or use --all.")
    records = [record for record in runtime.list_runtime_files(folder) if options.all or record.key == options.key]
    if not records and options.key:
        raise RequestError(f"no fleet is called {options.key!r}. Names: python -m magi2_core ps")
    for record in records:
        _end(record, folder)
        sys.stdout.write(f"ended {record.key}\n")
    if not records:
        sys.stderr.write("no fleet is running\n")
    return 0


def _end(record: runtime.RuntimeFile, folder: Path) -> None:
    """Asks a head to end; kills it when it does not; removes what it left."""
    if runtime.is_alive(record.pid, record.started):
        with contextlib.suppress(Magi2Error):
            _ask(record.address, folder).shutdown()
        if not runtime.wait_gone([record.pid], STOP_SECONDS):
            os.kill(record.pid, getattr(signal, "SIGKILL", signal.SIGTERM))
            if not runtime.wait_gone([record.pid], STOP_SECONDS):
                raise BackendDiedError(f"the head {record.key} (pid {record.pid}) cannot be ended. Its process hangs in the system.")
    lock = runtime.HeadLock(folder, record.key)
    if lock.acquire():
        runtime.remove_stale(folder, record.key)
        lock.release()


def settle(options: argparse.Namespace) -> None:
    """Checks the options of `generate` that choose a fleet; without --checkpoint takes that of the fleet to attach to. Raises RequestError."""
    given = [name for name in ("devices", "layout") if getattr(options, name) != "auto"]
    if options.backend == "local" and given:
        raise RequestError(f"--{given[0]} has no effect on one process. Add --backend auto (or keep), or leave it out.")
    if options.backend != "attach":
        if options.address:
            raise RequestError("--address is for --backend attach. Add that, or leave it out.")
        return
    given += [name for name in ("dtype", "kernels") if getattr(options, name)]
    if given:
        raise RequestError(f"--{given[0]} was settled when the fleet was started with `serve`. Leave it out.")
    if options.checkpoint:
        return
    client = _ask(options.address or "", runtime.prepare())
    try:
        options.checkpoint = str(client.status()["checkpoint"])
    finally:
        client.close()
    if not Path(options.checkpoint).is_dir():
        raise RequestError(f"the fleet serves {options.checkpoint}, which is not on this machine. Name its copy here with --checkpoint.")


def open_pipeline(plan: Plan, options: argparse.Namespace, hooks: StageHooks) -> Any:
    """What `generate` runs its stages on: this process, or a fleet. Raises when a component is absent, before anything loads."""
    has_image = plan.encode is not None and plan.encode.image is not None
    if options.backend == "local":
        from magi2_core.pipeline.build import build_pipeline

        pipeline = build_pipeline(
            plan.checkpoint.path, device=options.device, dtype=options.dtype, kernels=options.kernels or "auto", hooks=hooks
        )
        pipeline.require(plan.stages, image=has_image, decoder=plan.decode.decoder)
        return pipeline
    from magi2_core.backend.client import pool
    from magi2_core.backend.remote import RemotePipeline

    if options.device != "auto":
        raise RequestError("--device is for --backend local. Use --devices to name the devices of a fleet.")
    catalog.check_components(plan.checkpoint.path, plan.stages, image=has_image, decoder=plan.decode.decoder)
    return RemotePipeline(pool.get(_spec(options, plan.checkpoint.path, mode=options.backend, address=options.address or "")), hooks)
