"""What a stage calls while it runs: progress out, stop in, and the state of a run that was stopped."""

from collections.abc import Callable
from dataclasses import dataclass

from magi2_core.request import Latents, Progress


def _ignore(event: Progress) -> None:
    """Drops the event."""


def _never() -> bool:
    """Asks for no stop."""
    return False


def _drop(latents: Latents) -> None:
    """Keeps nothing."""


@dataclass(frozen=True)
class StageHooks:
    """`progress` gets an event a step, shard or window; `should_stop` is asked between them (True raises Interrupted); `on_partial` gets
    the latents of a cut sampling, with the solver state that `SampleRequest.resume` takes, before Interrupted is raised."""

    progress: Callable[[Progress], None] = _ignore
    should_stop: Callable[[], bool] = _never
    on_partial: Callable[[Latents], None] = _drop
