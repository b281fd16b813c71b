"""Layouts: what is chosen, what is refused and with which words, who is in which group."""

from dataclasses import replace

import pytest
import torch

from magi2_core.config import MoEConfig, PreviewConfig, RefinerConfig
from magi2_core.errors import CheckpointError, RequestError
from magi2_core.model.preview import PreviewTransformer
from magi2_core.parallel import collectives
from magi2_core.parallel.apply import apply_parallel
from magi2_core.parallel.groups import Group, Groups, ParallelConfig, plan_layout, refiner_ranks
from magi2_core.parallel.lockstep import Lockstep

PREVIEW, REFINER = PreviewConfig(), RefinerConfig()
TWO_HEADS = MoEConfig(num_heads=2, num_experts=4, top_k=2, moe_layers=(1,), expert_intermediate_size=8)
FEW = PreviewConfig(hidden_size=128, head_dim=32, moe=MoEConfig(num_heads=2))


@pytest.mark.parametrize(
    ("devices", "name", "refiner"),
    [
        (1, "cp1", 1),
        (2, "cp2ep2", 2),
        (3, "cp3ep3", 2),
        (4, "cp4ep4", 4),
        (5, "cp4ep4", 4),
        (6, "cp6ep6", 4),
        (7, "cp6ep6", 4),
        (8, "cp8ep4", 8),
        (12, "cp12ep12", 8),
        (16, "cp8cfg2ep4", 8),
    ],
)
def test_plan_layout_auto_released(devices: int, name: str, refiner: int) -> None:
    config = plan_layout(devices, PREVIEW, refiner=REFINER)
    assert (config.name, config.refiner) == (name, refiner)
    assert config.name in config.reason and str(devices) in config.reason
    assert ("unused" in config.reason) == (config.world < devices)
    assert PREVIEW.moe.num_heads % config.expert == 0
    assert plan_layout(devices, PREVIEW, choice=name).world == config.world


def test_plan_layout_auto_few_heads() -> None:
    assert plan_layout(4, FEW).name == "cp4ep2"
    assert plan_layout(8, FEW).name == "cp4cfg2ep2"


@pytest.mark.parametrize(
    ("choice", "world", "expert"), [("cp4", 4, 4), ("cp4ep1", 4, 1), ("cp8ep2", 8, 2), ("cp4cfg2", 8, 4), ("cp2cfg2ep2", 4, 2)]
)
def test_plan_layout_named(choice: str, world: int, expert: int) -> None:
    config = plan_layout(8, PREVIEW, choice=choice)
    assert (config.world, config.expert) == (world, expert)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("cp5", r"context parallel 5.*24 attention heads.*1, 2, 3, 4, 6, 8, 12, 24"),
        ("cp8ep8", r"expert parallel 8.*8 ranks.*12 MoE heads.*one of 1, 2, 4\."),
        ("cp8ep3", r"expert parallel 3.*one of 1, 2, 4\."),
        ("cp4cfg3", r"CFG parallel 3.*1 or 2"),
        ("cp8cfg2", r"needs 16 devices, there are 8.*1, 2, 3, 4, 6, 8 ranks"),
        ("tp4", r"'tp4'.*cp8ep4"),
        ("ep4", r"'ep4' is not understood"),
        ("cp4cp2", r"not understood"),
        ("cp0", r"start at 1"),
        ("", r"not understood"),
    ],
)
def test_plan_layout_refuses(choice: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        plan_layout(8, PREVIEW, choice=choice)


def test_plan_layout_needs_a_device() -> None:
    with pytest.raises(RequestError, match="at least one device"):
        plan_layout(0, PREVIEW)


def test_validate_world_and_refiner() -> None:
    with pytest.raises(RequestError, match="fleet has 6"):
        ParallelConfig(world=6, context=4).validate(PREVIEW)
    with pytest.raises(RequestError, match=r"refiner ranks 3.*32 query and 8 key/value.*1, 2, 4\."):
        ParallelConfig(world=6, context=6, refiner=3).validate(PREVIEW, REFINER)


def test_refiner_ranks_rule() -> None:
    assert [refiner_ranks(REFINER, world) for world in range(1, 10)] == [1, 2, 2, 4, 4, 4, 4, 8, 8]
    assert refiner_ranks(RefinerConfig(hidden_size=64, head_dim=32, num_query_groups=1), 8) == 1
    assert refiner_ranks(replace(REFINER, num_query_groups=4), 8) == 4


def test_groups_local_does_everything_alone(small_tensor: torch.Tensor) -> None:
    groups = Groups.local()
    assert groups.branch == "both" and groups.is_first and not groups.world.is_real and groups.refiner.is_member
    assert collectives.all_to_all(small_tensor, groups.context, [4], [4]) is small_tensor
    assert collectives.gather_rows(small_tensor, groups.context, [4]) is small_tensor
    assert collectives.broadcast(small_tensor, groups.world) is small_tensor
    assert collectives.agree_to_stop(groups, True) and not collectives.agree_to_stop(groups, False)
    collectives.check_same(groups, "anything")
    assert Lockstep(groups, lambda: True).should_stop()
    assert Lockstep(groups, lambda: False).first(lambda: {"a": small_tensor})["a"] is small_tensor
    assert Groups.create(ParallelConfig(), rank=0).config == ParallelConfig()
    module = torch.nn.Linear(1, 1)
    assert apply_parallel(module, groups) is module


@pytest.fixture
def small_tensor() -> torch.Tensor:
    return torch.arange(4)


def test_groups_create_refuses_a_rank_outside() -> None:
    with pytest.raises(RequestError, match="ranks 0 to 3"):
        Groups.create(ParallelConfig(world=4, context=4), rank=4)


def test_group_place_outside() -> None:
    group = Group(ranks=(0, 1), index=None)
    assert not group.is_member and not group.is_first
    with pytest.raises(AssertionError, match=r"\(0, 1\)"):
        _ = group.place


def test_apply_parallel_refuses_weights_of_all_heads() -> None:
    config = PreviewConfig(num_layers=3, hidden_size=64, head_dim=16, text_in_channels=16, mm_layers=(0, 2), moe=TWO_HEADS)
    with torch.device("meta"):
        model = PreviewTransformer(config)
    real = Group(ranks=(0, 1), index=0, handle=object())
    groups = Groups(config=ParallelConfig(world=2, context=2, expert=2), context=real, expert=real)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.moe_mlp\.gate has 8 rows.*holds 4"):
        apply_parallel(model, groups)


def test_groups_branch_of_cfg_parallel() -> None:
    config = ParallelConfig(world=2, cfg=2)
    branches = [Groups(config=config, rank=rank, cfg=Group(ranks=(0, 1), index=rank)).branch for rank in (0, 1)]
    assert branches == ["cond", "uncond"]
