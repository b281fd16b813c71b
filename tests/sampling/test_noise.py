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


def test_noise_stream_seeds_above_32_bits_differ() -> None:
    """torch's CPU generator drops the high bits; every seed up to 2^32 - 1 keeps the released stream, each larger one has its own."""
    shape = (40_000,)
    low = NoiseStream(5, "cpu", CPU).draw(shape)
    assert torch.equal(low, torch.randn(shape, generator=torch.Generator().manual_seed(5)))
    last = NoiseStream(2**32 - 1, "cpu", CPU).draw(shape)
    assert torch.equal(last, torch.randn(shape, generator=torch.Generator().manual_seed(2**32 - 1)))
    drawn = [low, last, *(NoiseStream(seed, "cpu", CPU).draw(shape) for seed in (2**32, 2**32 + 5, 2**40 + 5, 2**63 + 5, 2**64 - 1))]
    assert torch.corrcoef(torch.stack(drawn)).sub(torch.eye(len(drawn))).abs().max() < 0.025
    for noise in drawn:
        assert abs(noise.mean()) < 0.02 and abs(noise.std() - 1) < 0.02
        assert abs((noise.abs() < 1).float().mean() - 0.6827) < 0.01
    assert torch.equal(NoiseStream(2**32 + 5, "device", CPU).draw(shape), drawn[3])


def test_draw_rebuilt_stream_of_a_large_seed_goes_on() -> None:
    whole = NoiseStream(2**50 + 1, "cpu", CPU)
    whole.draw((3, 5))
    assert torch.equal(NoiseStream(2**50 + 1, "cpu", CPU, ((3, 5),)).draw((4, 4)), whole.draw((4, 4)))


def test_noise_stream_extreme_seeds_and_source() -> None:
    assert not torch.equal(NoiseStream(2**64 - 1, "cpu", CPU).draw((8,)), NoiseStream(0, "cpu", CPU).draw((8,)))
    with pytest.raises(RequestError, match="cpu"):
        NoiseStream(0, "gpu", CPU)
