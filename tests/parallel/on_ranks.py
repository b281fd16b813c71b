"""One rank of the tests of parallel/: the cases of a job in every layout, then the checks that need no model. Started by fleet.run_job."""

import hashlib
import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from magi2_core.errors import Interrupted, RankMismatchError, RequestError
from magi2_core.parallel import collectives
from magi2_core.parallel.context import UlyssesAttention, UlyssesBlockAttention, heads_to_tokens, tokens_to_heads
from magi2_core.parallel.decode import spread_windows
from magi2_core.parallel.expert import HeadDispatcher
from magi2_core.parallel.groups import Groups, ParallelConfig, split_evenly
from magi2_core.parallel.lockstep import Lockstep
from magi2_kernels.block_attention import block_attention
from magi2_kernels.block_attention.layout import BlockLayout
from magi2_kernels.common.sequences import CuSeqlens
from magi2_kernels.sink_attention import gate_heads, sink_attention


def _fleet() -> Any:
    name = "magi2_parallel_fleet"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).resolve().parent / "fleet.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def rank_main(rank: int, world: int, init_method: str, arguments: list[str]) -> int:
    job = json.loads(Path(arguments[0]).read_text())
    out, found = Path(job["out"]), {}
    for entry in job["layouts"]:
        layout = ParallelConfig(**entry)
        groups = Groups.create(layout, rank=rank, init_method=init_method, timeout_seconds=120)
        found[layout.name] = _run_cases(groups, [Path(case) for case in job["cases"]], out)
    context = Groups.create(ParallelConfig(world=world, context=world, expert=world), rank=rank, init_method=init_method)
    if job.get("checks"):
        found["checks"] = {check.__name__: check(context) for check in CHECKS}
    for name, values in job.get("pipelines", {}).items():
        layout = ParallelConfig(**values["layout"])
        found[name] = _run_pipeline(Groups.create(layout, rank=rank, init_method=init_method), values, out / name)
    if rank == 0:
        (out / "found.json").write_text(json.dumps(found))
    context.close()
    return 0


def _digest(tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(tensors[name].contiguous().numpy().tobytes())
    return digest.hexdigest()


def _run_cases(groups: Groups, cases: list[Path], out: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for case in cases:
        begun, before = time.monotonic(), groups.traffic.sent_bytes
        tensors, routes = _fleet().denoise(case, groups)
        name = f"{groups.config.name}-{case.name}"
        save_file({str(index).zfill(4): ids for index, ids in enumerate(routes)}, str(out / f"{name}-routes{groups.rank}.safetensors"))
        digests = collectives.gather_text(_digest(tensors), groups.world)
        if groups.rank == 0:
            save_file({key: value.contiguous().clone() for key, value in tensors.items()}, str(out / f"{name}.safetensors"))
        found[case.name] = {
            "all_ranks_equal": len(set(digests)) == 1,
            "seconds": time.monotonic() - begun,
            "sent_bytes": groups.traffic.sent_bytes - before,
        }
    return found


# Checks without a model; each returns True or raises.


def _drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exchanges_move_exact_bits(groups: Groups) -> bool:
    """Tokens to heads and back, uneven counts (a rank may have none), several head counts, both dtypes, equal plain slicing."""
    group, size = groups.context, groups.context.size
    for total in (0, 1, size, 5 * size + 1, 7 * size - 1):
        counts = split_evenly(total, size)
        start = sum(counts[: groups.rank])
        mine = slice(start, start + counts[groups.rank])
        for dtype in (torch.float32, torch.bfloat16):
            q, k = _drawn(total, 2 * size, 8, dtype=dtype), _drawn(total, size, 8, seed=1, dtype=dtype)
            found = tokens_to_heads((q[mine], k[mine]), group, counts)
            assert torch.equal(found[0], q[:, 2 * groups.rank : 2 * groups.rank + 2]), total
            assert torch.equal(found[1], k[:, groups.rank : groups.rank + 1]), total
            assert torch.equal(heads_to_tokens(found[0], group, counts), q[mine])
            dispatcher = HeadDispatcher(groups.expert, lambda counts=counts: counts)
            there = dispatcher.dispatch(q[mine])
            assert torch.equal(there, found[0])
            assert torch.equal(dispatcher.combine(there), q[mine])
            assert torch.equal(collectives.gather_rows(q[mine], group, counts), q)
    return True


def attention_equals_one_rank(groups: Groups) -> bool:
    """Uneven packed sequences with two sinks, and grouped block attention; equal but for the vector tails of the CPU's exp."""
    size, total = groups.context.size, 53
    counts = split_evenly(total, size)
    start = sum(counts[: groups.rank])
    mine, heads = slice(start, start + counts[groups.rank]), 2 * size
    q, k, v = (_drawn(total, heads, 16, seed=seed) for seed in range(3))
    sinks, gate, cu = _drawn(2, heads, seed=3), _drawn(total, heads, seed=4), CuSeqlens.build([0, 30, 52, total])
    whole = gate_heads(sink_attention(q, k, v, sinks, cu), gate)
    shared = UlyssesAttention(groups.context)(q[mine], k[mine], v[mine], sinks, cu, gate[mine])
    torch.testing.assert_close(shared, whole[mine], rtol=1e-6, atol=1e-6)
    layout = BlockLayout.from_pairs(torch.tensor([20, 20]), torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1]), 13)
    whole = block_attention(q, k[:, ::2], v[:, ::2], layout)
    grouped = UlyssesBlockAttention(block_attention, groups.context)(q[mine], k[mine, ::2], v[mine, ::2], layout)
    torch.testing.assert_close(grouped, whole[mine], rtol=1e-6, atol=1e-6)
    return True


def check_same_names_the_rank(groups: Groups) -> bool:
    collectives.check_same(groups, "the same job")
    try:
        collectives.check_same(groups, "another job" if groups.rank == 1 else "the same job")
    except RankMismatchError as error:
        assert f"ranks 1 of {groups.world.size}" in str(error), error
        return True
    raise AssertionError("a different request passed")


def first_rank_decides_about_stopping(groups: Groups) -> bool:
    others_wish = collectives.agree_to_stop(groups, groups.rank > 0)
    return not others_wish and collectives.agree_to_stop(groups, groups.rank == 0)


def first_shares_results_and_errors(groups: Groups) -> bool:
    lockstep, ran = Lockstep(groups, lambda: groups.rank == 0), []

    def body() -> dict[str, torch.Tensor]:
        ran.append(groups.rank)
        assert lockstep.should_stop()
        return {"a": _drawn(3, 2), "empty": torch.zeros(0, 4, dtype=torch.bfloat16), "one": torch.tensor(2, dtype=torch.int64)}

    found = lockstep.first(body)
    assert ran == ([0] if groups.rank == 0 else [])
    assert torch.equal(found["a"], _drawn(3, 2)) and found["empty"].shape == (0, 4) and found["one"].item() == 2
    for raised, expected in (
        (RequestError("prompt: 9000 tokens"), RequestError),
        (Interrupted("x"), Interrupted),
        (ValueError("odd: 1"), None),
    ):

        def failing(raised: Exception = raised) -> dict[str, torch.Tensor]:
            raise raised

        try:
            lockstep.first(failing)
        except Exception as error:
            assert type(error) is (expected or (ValueError if groups.rank == 0 else RuntimeError)), error
            assert str(raised) in str(error)
        else:
            raise AssertionError("the error of the first rank was lost")
    return True


def texts_cross_unchanged(groups: Groups) -> bool:
    for text in ("", "x", "π – 滝", "long " * 20000):
        assert collectives.broadcast_text(text if groups.rank == 0 else "?", groups.world) == text
    assert collectives.gather_text(f"r{groups.rank}", groups.world) == [f"r{rank}" for rank in range(groups.world.size)]
    collectives.barrier(groups.world)
    return True


def windows_arrive_in_order(groups: Groups) -> bool:
    """Every count around the rank count; uneven windows; each decoded once, on the rank whose turn it is."""
    for count in range(1, 2 * groups.world.size + 2):
        starts = [number * (number + 1) // 2 for number in range(count + 1)]
        clip, mine = torch.zeros(starts[-1], 2, 3, dtype=torch.uint8), []

        def decode(number: int, mine: list[int] = mine) -> torch.Tensor:
            mine.append(number)
            return torch.full((number + 1, 2, 3), number + 1, dtype=torch.uint8)

        done = list(
            spread_windows(groups, count, decode, lambda number, clip=clip, starts=starts: clip[starts[number] : starts[number + 1]])
        )
        assert done[-1] == count and mine == list(range(groups.rank, count, groups.world.size))
        if groups.rank == 0:
            assert clip[:, 0, 0].tolist() == [number + 1 for number in range(count) for _ in range(number + 1)]
    return True


CHECKS = (
    exchanges_move_exact_bits,
    attention_equals_one_rank,
    check_same_names_the_rank,
    first_rank_decides_about_stopping,
    first_shares_results_and_errors,
    texts_cross_unchanged,
    windows_arrive_in_order,
)


def _run_pipeline(groups: Groups, values: dict[str, Any], out: Path) -> dict[str, Any]:
    """A whole clip of a checkpoint, stage by stage, and a run that is cancelled; rank 0 keeps what the comparison needs."""
    fleet = _fleet()
    from magi2_core.pipeline.build import build_pipeline

    pipeline = build_pipeline(Path(values["folder"]), device="cpu", groups=groups)
    made = fleet.whole_clip(pipeline, values)
    if groups.rank == 0:
        save_file(made, f"{out}.safetensors")
    cancelled = fleet.cancelled_at(pipeline, values, wish=groups.rank == 0)
    try:
        pipeline.sample(fleet.sample_request(pipeline, values, seed=groups.rank))
    except RankMismatchError:
        refused = True
    else:
        refused = groups.world.size == 1
    everywhere = collectives.gather_text(
        json.dumps({"read": pipeline.bytes_read, "cancelled": cancelled, "refused": refused}), groups.world
    )
    return {"ranks": [json.loads(text) for text in everywhere], "layout": groups.config.name}
