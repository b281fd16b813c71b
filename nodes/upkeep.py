"""Unload and Status: give the GPUs back, and see what is running and what is missing."""

import time
from typing import Any

from comfy_api.latest import io

from . import fleet, report
from .compat import field, guarded, schema


class Unload(io.ComfyNode):
    """Releases the fleet when the execution gets here."""

    @classmethod
    def define_schema(cls) -> Any:
        """Ids, inputs and outputs are frozen."""
        return schema(
            "Magi2Unload",
            display_name="MAGI-2 Unload",
            description="Ends the MAGI-2 processes and frees their GPU memory, at this place of the workflow. Runs every time; so does what hangs "
            "on its output.",
            search_aliases=["free memory", "free vram", "release"],
            is_output_node=True,
            not_idempotent=True,
            inputs=[field(io.AnyType, "passthrough", optional=True, tooltip="Anything: it sets the moment, and comes out unchanged.")],
            outputs=[io.AnyType.Output("value", display_name="passthrough", tooltip="What came in.")],
        )

    @classmethod
    def fingerprint_inputs(cls, passthrough: Any = None) -> int:
        """Never cached."""
        return time.time_ns()

    @classmethod
    @guarded
    def execute(cls, passthrough: Any = None) -> io.NodeOutput:
        """Waits until the processes are gone."""
        fleet.release_all()
        return io.NodeOutput(passthrough)


class Status(io.ComfyNode):
    """What is running and what is missing, as text."""

    @classmethod
    def define_schema(cls) -> Any:
        """Ids, inputs and outputs are frozen."""
        return schema(
            "Magi2Status",
            display_name="MAGI-2 Status",
            description="Fleets, ranks, memory and the running job; checkpoints and packages that are missing.",
            search_aliases=["doctor", "vram", "info"],
            is_output_node=True,
            not_idempotent=True,
            inputs=[],
            outputs=[io.String.Output("status", display_name="status", tooltip="For a node that shows text.")],
        )

    @classmethod
    def fingerprint_inputs(cls) -> int:
        """Never cached."""
        return time.time_ns()

    @classmethod
    @guarded
    def execute(cls) -> io.NodeOutput:
        """Starts nothing: a fleet that does not run is told as such."""
        text = report.status_text()
        return io.NodeOutput(text, ui={"text": [text]})
