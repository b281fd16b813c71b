"""Keeps the ranks of a stage together: one decision about stopping, and work that one rank does for all.

Every rank runs the same stage function. Where only the first has something to do (an encoder, a sequential decoder), `first` runs it
there and hands the tensors, or the error, to all, so that no rank waits for one that failed.
"""

from collections.abc import Callable, Mapping

from torch import Tensor

from magi2_core.errors import error_type

from .collectives import agree_to_stop, broadcast_tensors, broadcast_text
from .groups import Groups

Alone = Callable[[], Mapping[str, Tensor]]


class Lockstep:
    """One stage of one job on this rank. `should_stop` is the rank's own wish; only the first rank's counts."""

    def __init__(self, groups: Groups, should_stop: Callable[[], bool]) -> None:
        self.groups = groups
        self._wish = should_stop
        self._is_alone = False

    def should_stop(self) -> bool:
        """The decision of all ranks, asked for by all at the same place; inside `first` that of the first rank alone."""
        return self._wish() if self._is_alone else agree_to_stop(self.groups, self._wish())

    def first(self, body: Alone) -> dict[str, Tensor]:
        """Runs `body` on the first rank; returns its named CPU tensors on all ranks, or raises its error on all."""
        if not self.groups.world.is_real:
            return dict(body())
        found: Mapping[str, Tensor] = {}
        failure: Exception | None = None
        if self.groups.is_first:
            self._is_alone = True
            try:
                found = body()
            except Exception as error:
                failure = error
            finally:
                self._is_alone = False
        text = "" if failure is None else f"{type(failure).__name__}:{failure}"
        said = broadcast_text(text, self.groups.world)
        if failure is not None:
            raise failure
        if said:
            raise _rebuilt(said)
        return broadcast_tensors(found, self.groups.world)


def _rebuilt(said: str) -> Exception:
    """The first rank's error: of the same class when it is the pack's, else a RuntimeError with its words."""
    name, _, message = said.partition(":")
    kind = error_type(name)
    return RuntimeError(f"rank 0: {name}: {message}") if kind is None else kind(message)
