"""The only caller of torch.distributed's collectives. Every function takes a Group and, without a process group, returns what it got.

Tensors travel as bytes, so every dtype works on every library. Sizes are always known to the receiver beforehand: counts are Python
integers from `split_evenly`, never read back from a device. Control messages (stop flags, hashes, errors) are CPU tensors and go over
gloo, so they neither wait for a device's queue nor start a kernel.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from magi2_core.errors import RankMismatchError

from .groups import Group, Groups


def _count(group: Group, sent_bytes: int) -> None:
    group.traffic.calls += 1
    group.traffic.sent_bytes += sent_bytes if group.size > 1 else 0


def _bytes(tensor: Tensor) -> Tensor:
    """The tensor's memory as uint8 [n]; shares it when contiguous."""
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0, dtype=torch.uint8)


def all_to_all(x: Tensor, group: Group, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    """Sends `send[r]` consecutive elements of the flat `x` to the group's rank r; returns what comes from ranks 0, 1, ..., flat.

    Args:
        x: 1-d and contiguous, `sum(send)` elements.
        send, receive: elements to and from every rank of the group.
    """
    if not group.is_real:
        return x
    import torch.distributed as dist

    size = x.element_size()
    out = x.new_empty(sum(receive))
    # As bytes: gloo has no bf16 exchange, and the libraries then share one path.
    target, source = (_bytes(out), _bytes(x))
    assert target.numel() == 0 or target.data_ptr() == out.data_ptr()
    dist.all_to_all_single(target, source, [count * size for count in receive], [count * size for count in send], group=group.handle)
    _count(group, (x.numel() - send[group.place]) * size)
    return out


def gather_rows(x: Tensor, group: Group, counts: Sequence[int]) -> Tensor:
    """Joins the rows of all ranks in rank order: [counts[mine], ...] to [sum(counts), ...] on every rank.

    The shares go padded to the largest one, at most one row more with `split_evenly`.
    """
    if not group.is_real:
        return x
    import torch.distributed as dist

    most = max(counts)
    padded = x.new_zeros(most, *x.shape[1:])
    padded[: x.shape[0]] = x
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather([_bytes(part) for part in parts], _bytes(padded), group=group.handle)
    _count(group, padded.numel() * padded.element_size() * (group.size - 1))
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def broadcast(x: Tensor, group: Group, source: int = 0) -> Tensor:
    """The tensor of the group's rank `source` on all; every rank passes a contiguous one of its shape, dtype and device, and it is filled."""
    if not group.is_real:
        return x
    import torch.distributed as dist

    assert x.is_contiguous()
    if x.numel():
        dist.broadcast(_bytes(x), src=group.ranks[source], group=group.handle)
        _count(group, x.numel() * x.element_size() if group.index == source else 0)
    return x


def send(x: Tensor, group: Group, target: int) -> None:
    """Hands `x` to the group's rank `target`, which calls `receive`."""
    import torch.distributed as dist

    dist.send(_bytes(x), dst=group.ranks[target], group=group.handle)
    _count(group, x.numel() * x.element_size())


def receive(x: Tensor, group: Group, source: int) -> None:
    """Fills the contiguous `x` with what the group's rank `source` sends."""
    import torch.distributed as dist

    assert x.is_contiguous()
    dist.recv(_bytes(x), src=group.ranks[source], group=group.handle)


def broadcast_text(text: str, group: Group) -> str:
    """The first rank's text on all."""
    if not group.is_real:
        return text
    data = torch.frombuffer(bytearray(text.encode() or b"\0"), dtype=torch.uint8) if group.is_first else torch.empty(0, dtype=torch.uint8)
    length = broadcast(torch.tensor([data.numel()], dtype=torch.int32), group)
    if not group.is_first:
        data = torch.empty(int(length), dtype=torch.uint8)
    return bytes(broadcast(data, group).numpy()).decode().rstrip("\0")


def broadcast_tensors(tensors: Mapping[str, Tensor], group: Group) -> dict[str, Tensor]:
    """The first rank's named CPU tensors on all; the other ranks pass anything."""
    if not group.is_real:
        return dict(tensors)
    shapes = {name: [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")] for name, tensor in tensors.items()}
    header = json.loads(broadcast_text(json.dumps(shapes) if group.is_first else "", group))
    found = {}
    for name, (shape, dtype) in header.items():
        found[name] = tensors[name].contiguous() if group.is_first else torch.empty(shape, dtype=getattr(torch, dtype))
        broadcast(found[name], group)
    return found


def agree_to_stop(groups: Groups, wish: bool) -> bool:
    """Whether the run stops here: the first rank decides for all, at the same boundary. One byte; call it once a step on every rank."""
    if not groups.world.is_real:
        return wish
    return bool(broadcast(torch.tensor([wish and groups.is_first], dtype=torch.uint8), groups.world).item())


def gather_text(text: str, group: Group) -> list[str]:
    """The short text (up to 256 bytes) of every rank, on all."""
    if not group.is_real:
        return [text]
    row = torch.zeros(1, 256, dtype=torch.uint8)
    data = text.encode()[:256]
    row[0, : len(data)] = torch.tensor(list(data), dtype=torch.uint8)
    return [bytes(line.numpy()).rstrip(b"\0").decode(errors="replace") for line in gather_rows(row, group, [1] * group.size)]


def check_same(groups: Groups, text: str) -> None:
    """Raises RankMismatchError on every rank, naming the ranks that differ from the first, unless all pass the same text."""
    digests = gather_text(hashlib.sha256(text.encode()).hexdigest(), groups.world)
    different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if different:
        starts = ", ".join(f"rank {rank}: {digest[:12]}" for rank, digest in enumerate(digests))
        raise RankMismatchError(
            f"ranks {', '.join(map(str, different))} of {groups.world.size} were given another job than rank 0 ({starts}). "
            "Nothing was started; restart the backend."
        )


def barrier(group: Group) -> None:
    """Waits for all ranks of the group."""
    if group.is_real:
        broadcast(gather_rows(torch.zeros(1, 1, dtype=torch.uint8), group, [1] * group.size), group)
