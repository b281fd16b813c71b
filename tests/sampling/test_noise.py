"""The noise stream: released draws, rebuilding, injection."""

import hashlib

import pytest
import torch

from magi2_core.errors import RequestError
from magi2_core.sampling.noise import NoiseStream

CPU = torch.device("cpu")


def test_draw_matches_released_engine_on_a_cpu() -> None:
    """Hashes of the full-size draws of the released engine on a CPU, seed 42 (golden engine_misc)."""
    stream = NoiseStream(42, "cpu", CPU)
    video, audio = stream.draw((1, 48, 32, 32, 56)), stream.draw((1, 250, 64))
    digests = [hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for tensor in (video, audio)]
    assert digests == [
        "afdef912976f3b58a4d902c0d767f547d8fa65f5d199642133eb49c3c1f004d3",
        "d7346884b231c401f8faeb98f4c6bbc6ccafa9ce3ccbe1cf7585b3d6a1e053fc",
    ]


def test_draw_rebuilt_stream_goes_on() -> None:
    whole = NoiseStream(7, "cpu", CPU)
    first = [whole.draw((1, 3, 2, 2, 2)), whole.draw((1, 5, 4))]
    rebuilt = NoiseStream(7, "cpu", CPU, whole.draws)
    third = rebuilt.draw((1, 3, 3, 4, 4))
    assert torch.equal(third, whole.draw((1, 3, 3, 4, 4)))
    assert rebuilt.draws == whole.draws == ((1, 3, 2, 2, 2), (1, 5, 4), (1, 3, 3, 4, 4))
    assert not torch.equal(third.flatten()[:20], first[1].flatten())


def test_draw_injected_keeps_the_stream() -> None:
    plain, injected = NoiseStream(7, "cpu", CPU), NoiseStream(7, "cpu", CPU)
    plain.draw((2, 3))
    given = torch.ones(2, 3)
    assert torch.equal(injected.draw((2, 3), given), given)
    assert torch.equal(injected.draw((4,)), plain.draw((4,)))
    with pytest.raises(RequestError, match="injected video noise"):
        injected.draw((2, 3), torch.ones(3, 2), "video noise")


def test_noise_stream_extreme_seeds_and_source() -> None:
    assert not torch.equal(NoiseStream(2**64 - 1, "cpu", CPU).draw((8,)), NoiseStream(0, "cpu", CPU).draw((8,)))
    with pytest.raises(RequestError, match="cpu"):
        NoiseStream(0, "gpu", CPU)
