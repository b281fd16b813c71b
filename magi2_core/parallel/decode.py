"""Decoder windows spread over the ranks, their frames collected on the first: windows do not depend on each other.

Windows go round: in each round every rank decodes one, then the first rank takes the frames in order, straight into the clip.
"""

from collections.abc import Callable, Iterator

from torch import Tensor

from .collectives import receive, send
from .groups import Groups


def spread_windows(groups: Groups, count: int, decode: Callable[[int], Tensor], target: Callable[[int], Tensor]) -> Iterator[int]:
    """Decodes windows 0..count-1; yields how many are finished after each round, on every rank.

    Args:
        decode: window number -> its frames, uint8 on the CPU, in the shape of its target.
        target: window number -> the contiguous part of the clip that its frames fill; asked for on the first rank only.
    """
    world = groups.world
    for begin in range(0, count, world.size):
        mine = begin + groups.rank
        frames = decode(mine) if mine < count else None
        if groups.is_first:
            assert frames is not None
            target(mine)[:] = frames
            for other in range(1, min(world.size, count - begin)):
                receive(target(begin + other), world, other)
        elif frames is not None:
            send(frames, world, 0)
        yield min(begin + world.size, count)
