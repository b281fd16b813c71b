"""What the Status node says: fleets, the running job, checkpoints, and what is missing; nothing heavy is imported for it."""

from pathlib import Path
from typing import Any

from magi2_core import __version__
from magi2_core.checkpoint import catalog
from magi2_core.errors import DependencyError, Magi2Error

from . import environment, feedback, fleet, folders

PACKAGES = {
    "transformers": "the text encoder",
    "einops": "the models",
    "safetensors": "checkpoints",
    "av": "mp4 files",
    "soundfile": "wav files",
}


def public(status: dict[str, Any]) -> dict[str, Any]:
    """What anybody may know of a fleet: no paths, no addresses, no other clients. The status route sends this."""
    fleet_facts = status.get("fleet") or {}
    shown = ("rank", "device", "stage", "memory_bytes", "peak_bytes")
    job = status.get("job") or {}
    return {
        "checkpoint": Path(str(status.get("checkpoint", ""))).name,
        "up": bool(fleet_facts.get("up")),
        "mode": status.get("mode", ""),
        "layout": fleet_facts.get("layout", ""),
        "reason": fleet_facts.get("reason", ""),
        "idle_seconds": round(float(status.get("idle_seconds", 0.0)), 1),
        "ranks": [{name: rank[name] for name in shown if name in rank} for rank in fleet_facts.get("ranks", ())],
        "job": {name: job[name] for name in ("stage", "step", "total", "state") if name in job} or None,
        "waiting": len(status.get("queue") or ()),
    } | ({"error": status["error"]} if status.get("error") else {})


def _fleet_lines(facts: dict[str, Any]) -> list[str]:
    """One fleet in words: what it is, one line a rank, the job."""
    if not facts["up"]:
        return [f"fleet {facts['checkpoint']}: released, its next job starts it again. {facts.get('error', '')}".rstrip()]
    lines = [
        f"fleet {facts['checkpoint']}: {facts['reason'] or facts['layout']} Mode {facts['mode']}, idle for {facts['idle_seconds']:g} s."
    ]
    for rank in facts["ranks"]:
        memory = f"{rank.get('memory_bytes', 0) / 1e9:.1f} GB of memory"
        peak = f", {rank['peak_bytes'] / 1e9:.1f} GB on the device at most" if rank.get("peak_bytes") else ""
        lines.append(f"  rank {rank.get('rank')} on {rank.get('device')}: {memory}{peak}, last stage {rank.get('stage') or 'none'}")
    if facts["job"]:
        lines.append(
            f"  job: {facts['job'].get('stage')} {facts['job'].get('step')}/{facts['job'].get('total')}, {facts['waiting']} waiting"
        )
    return lines


def status_text() -> str:
    """The whole report."""
    lines = [f"ComfyUI-MAGI2 {__version__}"]
    try:
        fleets = fleet.statuses()
    except Magi2Error as error:
        fleets, lines = [], [*lines, f"fleet: {error}"]
    for status in fleets:
        lines += _fleet_lines(public(status))
    if not fleets:
        lines.append("fleet: none runs; the first stage of a workflow starts one")
    if feedback.last_event:
        lines.append(f"job: {feedback.last_event.get('text', '')}")
    for checkpoint in folders.checkpoints():
        absent = [name for name in catalog.LAYOUTS if name not in checkpoint.components]
        lines.append(f"checkpoint {checkpoint.name}: {'complete' if not absent else 'without ' + ', '.join(absent)}")
    missing = [f"{name} ({purpose}): pip install {name}" for name, purpose in PACKAGES.items() if environment.installed(name) is None]
    try:
        environment.check_text_encoder()
    except DependencyError as error:
        missing.append(str(error))
    return "\n".join([*lines, *(f"missing: {line}" for line in missing)])
