"""The same clip on every layout, on real gloo processes: golden and random cases, whole pipelines, cancelling, and the exchanges.

Bit-equal to one rank: every exchange, decoder windows, what one rank encodes or decodes for all. Bit-equal among the ranks of a fleet:
all. Else a matrix product of another height, or the CPU's vector tails, may round another way (limits below).
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from magi2_core.checkpoint import components
from magi2_core.checkpoint.slices import is_expert_tensor
from magi2_core.checkpoint.tiny import make_tiny
from magi2_core.parallel.groups import Groups, ParallelConfig, split_evenly
from magi2_core.parallel.ranks import threads_of_a_rank
from magi2_core.pipeline.build import build_pipeline

fleet = sys.modules["magi2_parallel_fleet"]
LATENTS, CFG = 2e-5, 1e-4
"""Largest relative difference to one rank of the latents after a step and of the guided velocities."""


def layout(context: int, expert: int = 1, cfg: int = 1, refiner: int = 1) -> ParallelConfig:
    return ParallelConfig(world=context * cfg, context=context, expert=expert, cfg=cfg, refiner=refiner)


LAYOUTS = {
    2: [layout(2, 2), layout(2), layout(1, cfg=2)],
    3: [layout(3, 3)],
    4: [layout(4, 2), layout(4), layout(2, 2, cfg=2)],
    6: [layout(6, 6), layout(3, 3, cfg=2)],
    8: [layout(8, 4), layout(4, 4, cfg=2)],
}
PIPELINES = {2: layout(2, 2), 3: layout(3, 3, refiner=2)}
EACH = [(world, one.name) for world, several in LAYOUTS.items() for one in several]


@dataclass
class Fleets:
    """Cases, their results on one rank, and what each world size has found so far."""

    root: Path
    nano: Path
    golden: list[Path]
    found: dict[int, dict[str, Any]] = field(default_factory=dict)
    alone: dict[str, Any] = field(default_factory=dict)

    def cases(self, world: int) -> list[Path]:
        return [self.case("narrow"), *self.golden] if world in (2, 4) else [self.case("wide")]

    def case(self, name: str) -> Path:
        folder = self.root / name
        return folder if folder.is_dir() else fleet.write_case(folder, fleet.NARROW if name == "narrow" else fleet.WIDE)

    def checkpoint(self, world: int) -> Path:
        if world == 2:
            return self.nano
        folder = self.root / "tiny"
        return folder if folder.is_dir() else make_tiny(folder, sizes=fleet.WIDE)

    def pipeline_job(self, world: int) -> dict[str, Any]:
        # 4 s are 13 latents: two decoder windows at least, so that every rank of two has one.
        return {"folder": str(self.checkpoint(world)), "layout": vars(PIPELINES[world]), "image": world == 2, "seconds": 4.0}

    def run(self, world: int) -> dict[str, Any]:
        if world not in self.found:
            out = self.root / f"world{world}"
            out.mkdir()
            more = {"pipelines": {"clip": self.pipeline_job(world)}} if world in PIPELINES else {}
            try:
                self.found[world] = fleet.run_job(world, out, LAYOUTS[world], self.cases(world), checks=True, **more)
            except Exception as error:  # once a fleet, not once a test of it
                self.found[world] = {"failed": str(error)}
        if "failed" in self.found[world]:
            pytest.fail(self.found[world]["failed"], pytrace=False)
        return self.found[world]

    def reference(self, case: Path) -> tuple[dict[str, Tensor], list[Tensor]]:
        if case.name not in self.alone:
            self.alone[case.name] = fleet.denoise(case, Groups.local())
        return self.alone[case.name]


@pytest.fixture(scope="session")
def fleets(tmp_path_factory: pytest.TempPathFactory, golden_root: Path, nano_folder: Path) -> Fleets:
    golden = [path for path in [golden_root / "preview" / "e_denoise_i2v_4"] if path.is_dir()]
    return Fleets(tmp_path_factory.mktemp("fleets"), nano_folder, golden)


def relative(found: Tensor, wanted: Tensor) -> float:
    return ((found.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-30)).item()


def by_name(world: int, name: str) -> ParallelConfig:
    return next(one for one in LAYOUTS[world] if one.name == name)


@pytest.mark.parametrize(("world", "name"), EACH)
def test_denoise_equals_one_rank(fleets: Fleets, world: int, name: str) -> None:
    found = fleets.run(world)
    for case in fleets.cases(world):
        wanted, _ = fleets.reference(case)
        got = fleets.root / f"world{world}"
        tensors = fleet.saved(got, by_name(world, name), case)
        assert tensors.keys() == wanted.keys()
        compared = 0
        for key, tensor in wanted.items():
            if key.endswith("latent"):
                assert relative(tensors[key], tensor) <= LATENTS, (case.name, key)
                compared += 1
            elif "_cfg_" in key:
                assert relative(tensors[key], tensor) <= CFG, (case.name, key)
        assert compared >= 2 * fleet.STEPS
        assert found[name][case.name]["all_ranks_equal"]
        assert found[name][case.name]["sent_bytes"] > 0


@pytest.mark.parametrize(("world", "name"), EACH)
def test_denoise_routes_equal_one_rank(fleets: Fleets, world: int, name: str) -> None:
    fleets.run(world)
    config = by_name(world, name)
    for case in fleets.cases(world):
        _, alone = fleets.reference(case)
        ranks = fleet.saved_routes(fleets.root / f"world{world}", config, case)
        calls = {len(kept) for kept in ranks}
        assert calls == {len(alone)} and len(alone) >= fleet.STEPS
        for index, whole in enumerate(alone):
            joined = _join_routes([kept[index] for kept in ranks], config)
            assert torch.equal(joined, whole), (case.name, index)


def _join_routes(parts: list[Tensor], config: ParallelConfig) -> Tensor:
    """Ids [G, S, K] of the packed sequence from those of every rank: heads within an expert group, tokens over the groups and branches."""
    columns = []
    for start in range(0, config.world, config.expert):
        columns.append(torch.cat(parts[start : start + config.expert], dim=0))
    return torch.cat(columns, dim=1)


@pytest.mark.parametrize(("world", "name"), [entry for entry in EACH if entry[0] in (2, 4)])
def test_denoise_golden_rules_hold(fleets: Fleets, world: int, name: str) -> None:
    if not fleets.golden:
        pytest.skip("the goldens are not beside this checkout")
    fleets.run(world)
    cases = fleet.parity("case")
    for folder in fleets.golden:
        case = cases.Case(folder)
        produced = fleet.saved(fleets.root / f"world{world}", by_name(world, name), folder)
        report = cases.compare(case, produced, case.spec["compare"], case.outputs)
        assert report.lines and not report.misses, "\n".join(report.lines)


@pytest.mark.parametrize("world", LAYOUTS)
def test_checks_on_ranks(fleets: Fleets, world: int) -> None:
    checks = fleets.run(world)["checks"]
    assert len(checks) >= 7 and all(checks.values()), checks


@pytest.mark.parametrize("world", PIPELINES)
def test_pipeline_equals_one_rank(fleets: Fleets, world: int) -> None:
    from safetensors.torch import load_file

    fleets.run(world)
    got = load_file(fleets.root / f"world{world}" / "clip.safetensors")
    threads = torch.get_num_threads()
    torch.set_num_threads(threads_of_a_rank(world))  # the sums of a convolution follow the threads, in the last bits
    try:
        wanted = fleet.whole_clip(build_pipeline(fleets.checkpoint(world), device="cpu"), fleets.pipeline_job(world))
    finally:
        torch.set_num_threads(threads)
    assert got.keys() == wanted.keys() and ("special" in got) == (world == 2)
    exact = ("text", "special", "turbo.frames", "wan.frames", "turbo.waveform", "wan.waveform")
    for name, tensor in wanted.items():
        if name in exact:
            assert torch.equal(got[name], tensor), name
        else:
            assert relative(got[name], tensor) <= LATENTS, name


@pytest.mark.parametrize("world", PIPELINES)
def test_pipeline_reads_each_row_once(fleets: Fleets, world: int) -> None:
    """The sum over the ranks is the checkpoint, plus what is whole on several ranks, once for each more of them."""
    ranks = fleets.run(world)["clip"]["ranks"]
    config, root = PIPELINES[world], fleets.checkpoint(world)
    files = components.check_component("preview", root)
    experts = sum(entry.nbytes for name, entry in files.tensors.items() if is_expert_tensor(name))
    assert 0 < experts < files.total_bytes
    replicas = world // config.expert
    assert sum(rank["read"]["preview"] for rank in ranks) == replicas * experts + world * (files.total_bytes - experts)
    assert [("refiner" in rank["read"]) for rank in ranks] == [number < config.refiner for number in range(world)]
    assert ranks[0]["read"]["refiner"] == components.check_component("refiner", root).total_bytes
    for name in ("text_encoder", "vae_decoder", "audio"):
        assert [name in rank["read"] for rank in ranks] == [True] + [False] * (world - 1)


@pytest.mark.parametrize("world", PIPELINES)
def test_pipeline_cancels_and_refuses_on_all_ranks(fleets: Fleets, world: int) -> None:
    ranks = fleets.run(world)["clip"]["ranks"]
    assert {rank["cancelled"] for rank in ranks} == {f"preview: cancelled after 2 of {fleet.STEPS} steps."}
    assert all(rank["refused"] for rank in ranks)


def test_split_evenly_order() -> None:
    assert split_evenly(11, 4) == (3, 3, 3, 2) and split_evenly(2, 4) == (1, 1, 0, 0) and split_evenly(0, 2) == (0, 0)
