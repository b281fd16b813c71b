"""The process runner, the golden runner's --ranks, and one rank that has a process group."""

import json
import sys
from pathlib import Path

import pytest
import torch

from magi2_core.errors import BackendDiedError
from magi2_core.parallel.groups import Groups, ParallelConfig
from magi2_core.parallel.ranks import run_on_ranks

fleet = sys.modules["magi2_parallel_fleet"]

SCRIPT = """
import time

def rank_main(rank, world, init_method, arguments):
    print("rank", rank, "of", world, arguments)
    if arguments == ["fail"] and rank == 1:
        raise ValueError("rank one is out of paper")
    if arguments == ["fail"] or arguments == ["hang"]:
        time.sleep(60)
    return 0
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_run_on_ranks_outputs(script: Path) -> None:
    assert [text.strip() for text in run_on_ranks(script, 2, ["a"])] == ["rank 0 of 2 ['a']", "rank 1 of 2 ['a']"]


def test_run_on_ranks_ends_all_when_one_fails(script: Path) -> None:
    with pytest.raises(BackendDiedError, match=r"(?s)rank 1 of 2 ended with 1.*out of paper"):
        run_on_ranks(script, 2, ["fail"], timeout_seconds=50)


def test_run_on_ranks_time_limit(script: Path) -> None:
    with pytest.raises(BackendDiedError, match="rank 0 of 1 was not done after 1 s"):
        run_on_ranks(script, 1, ["hang"], timeout_seconds=1)


def test_one_rank_with_a_process_group_gives_the_same_bits(tmp_path: Path) -> None:
    case = fleet.write_case(tmp_path / "narrow", fleet.NARROW)
    wanted, routes = fleet.denoise(case, Groups.local())
    groups = Groups.create(ParallelConfig(), rank=0, init_method=(tmp_path / "rendezvous").as_uri())
    try:
        made, chosen = fleet.denoise(case, groups)
        # A step: two exchanges in each of 4 attentions and 2 expert layers, one gather of velocities; one gather more at the end.
        assert groups.traffic.calls == fleet.STEPS * (2 * 4 + 2 * 2 + 1) + 1 and groups.traffic.sent_bytes == 0
    finally:
        groups.close()
    assert made.keys() == wanted.keys()
    assert all(torch.equal(made[name], tensor) for name, tensor in wanted.items())
    assert all(torch.equal(one, other) for one, other in zip(chosen, routes, strict=True))


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        ("packing", ["--ranks", "2"], "kind 'packing' does not run on ranks"),
        ("preview_denoise", ["--ranks", "3"], "context parallel 3: must divide the 4 attention heads. Use one of 1, 2, 4."),
        ("preview_denoise", ["--ranks", "4", "--ep", "4"], "expert parallel 4"),
        ("preview_denoise", ["--ranks", "3", "--cfg-parallel"], "cannot be shared by 2 guidance branches"),
    ],
)
def test_golden_runner_refuses_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, arguments: list[str], message: str
) -> None:
    case = fleet.write_case(tmp_path / "case", fleet.NARROW)
    (case / "case.json").write_text(json.dumps({"kind": kind, "compare": {}}))
    assert fleet.parity("run").main([str(case), *arguments]) == 1
    assert message in capsys.readouterr().out


def test_golden_runner_needs_ranks_for_a_layout(tmp_path: Path) -> None:
    case = fleet.write_case(tmp_path / "case", fleet.NARROW)
    with pytest.raises(SystemExit):
        fleet.parity("run").main([str(case), "--cfg-parallel"])
