"""A pipeline that runs somewhere else: the four stages with the hooks of a local one, each a job of a BackendClient.

For callers that were written for `pipeline.build.Pipeline`, the command line's `generate` first of all.
"""

from typing import Any

from magi2_core.request import Clip, Conditioning, DecodeRequest, EncodeRequest, Latents, RefineRequest, SampleRequest

from .client import BackendClient

POLL_SECONDS = 0.1


class RemotePipeline:
    """The stages of a fleet. `hooks` has `progress`, `should_stop` and `on_partial` as `pipeline.hooks.StageHooks`."""

    def __init__(self, client: BackendClient, hooks: Any) -> None:
        self.client, self.hooks = client, hooks

    def encode(self, request: EncodeRequest) -> Conditioning:
        """Prompt (and picture) to conditioning."""
        return self._run(request)

    def sample(self, request: SampleRequest) -> Latents:
        """Conditioning to preview latents."""
        return self._run(request)

    def refine(self, request: RefineRequest) -> Latents:
        """Preview latents to refined latents."""
        return self._run(request)

    def decode(self, request: DecodeRequest) -> Clip:
        """Latents to frames and sound."""
        return self._run(request)

    def _run(self, request: Any) -> Any:
        """Sends one request and passes its events to the hooks. Raises its error, Interrupted once the ranks have stopped."""
        job = self.client.submit(request)
        is_cancelled = False
        try:
            while True:
                event = job.next_event(POLL_SECONDS)
                if not is_cancelled and self.hooks.should_stop():
                    job.cancel()
                    is_cancelled = True
                if event is None:
                    continue
                if event.kind == "progress":
                    self.hooks.progress(event.value)
                elif event.kind == "partial":
                    self.hooks.on_partial(event.value)
                elif event.kind == "done":
                    return event.value  # also after a cancel that came too late: nothing finished is thrown away
                else:
                    raise event.value
        finally:
            job.cancel()
