"""How a step is launched: the choice with its errors, nothing that waits for the device in a call, and (on a GPU) capture and compile."""

import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from magi2_core.device import accelerator_module
from magi2_core.errors import DependencyError, Magi2Error, RequestError
from magi2_core.model.packing import PackedInputs
from magi2_core.model.velocity import PreviewVelocity, Velocities
from magi2_core.parallel.groups import Groups, Traffic
from magi2_core.pipeline import accelerate, build
from magi2_core.pipeline.accelerate import GraphForward, Target, choose_attention, choose_launch, choose_step
from magi2_core.pipeline.build import build_pipeline, choose_kernels
from magi2_core.sampling.denoise import DenoiseHooks, DenoiseOptions, denoise, start_state
from magi2_core.shapes import LatentShape
from magi2_kernels.common import choice
from magi2_kernels.sink_attention import providers

CPU = torch.device("cpu")


def velocity_of(model, text: int = 5, negative: int = 3) -> PreviewVelocity:
    width = model.config.text_in_channels
    generator = torch.Generator().manual_seed(text)
    features = [torch.randn(1, count, width, generator=generator).to(model.device, torch.bfloat16) for count in (text, negative)]
    shape = LatentShape(frames=2, height=4, width=6, channels=model.config.video_in_channels)
    return PreviewVelocity(model, latent_shape=shape, audio_latents=9, text=features[0], negative=features[1])


def latents_of(velocity: PreviewVelocity, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    audio = torch.randn(1, velocity.audio_latents, velocity.model.config.audio_in_channels, generator=generator)
    return torch.randn(velocity.latent_shape.size, generator=generator).to(velocity.model.device), audio.to(velocity.model.device)


def test_choose_attention_errors_say_what_to_do() -> None:
    target = Target(device=CPU, dtype=torch.bfloat16, head_dim=128)
    with pytest.raises(DependencyError, match="attention 'fa3' cannot be used here: it needs a GPU, this runs on the CPU"):
        choose_attention("fa3", target, "triton")
    with pytest.raises(RequestError, match=r"attention 'xformers' is unknown. Use auto, fa3"):
        choose_attention("xformers", target, "triton")
    assert choose_attention("auto", target, "reference").reason == "kernels reference"


def test_choose_attention_reads_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAGI2_ATTENTION", "flash")
    target = Target(device=CPU, dtype=torch.float32, head_dim=16)
    assert choose_attention("auto", target, "reference").name == "flash"
    assert choose_attention("reference", target, "reference").name == "reference"
    for name, says in (
        ("fa3", "MAGI2_ATTENTION: attention 'fa3' cannot be used"),
        ("bogus", "MAGI2_ATTENTION: attention 'bogus' is unknown"),
    ):
        monkeypatch.setenv("MAGI2_ATTENTION", name)
        with pytest.raises(Magi2Error, match=says):
            choose_attention("auto", target, "reference")


def test_choices_name_the_variable_they_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value, says, choose in (
        ("MAGI2_KERNELS", "bogus", "MAGI2_KERNELS=bogus: use auto, reference or triton", choose_kernels),
        ("MAGI2_KERNELS", "triton", "MAGI2_KERNELS=triton: Triton needs a GPU", choose_kernels),
        ("MAGI2_STEP", "bogus", "MAGI2_STEP=bogus: use auto", choose_step),
        ("MAGI2_STEP", "graph", "MAGI2_STEP=graph needs an accelerator", choose_step),
    ):
        monkeypatch.setattr(build, "is_interpreted", lambda: False)
        monkeypatch.setenv(name, value)
        with pytest.raises(RequestError, match=says):
            choose("auto", CPU)
        monkeypatch.setenv(name, "")
        assert choose("auto", CPU) in ("reference", "eager")


def test_choose_step_on_a_cpu() -> None:
    assert choose_step("auto", CPU) == "eager"
    for name, says in ((r"graph", "needs an accelerator"), ("fast", "use auto, eager, compile, graph")):
        with pytest.raises(RequestError, match=says):
            choose_step(name, CPU)


def test_choose_kernels_float32_takes_the_plain_ones(nano_folder: Path) -> None:
    accelerator = torch.device("meta")
    assert choose_kernels("auto", accelerator, torch.float32) == "reference"
    with pytest.raises(RequestError, match=r"takes bfloat16. Use dtype bfloat16, or kernels auto"):
        choose_kernels("triton", accelerator, torch.float32)


def test_pipeline_uses_the_attention_asked_for(nano_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = build_pipeline(nano_folder, device="cpu", attention="flash")
    assert made.machine()["attention"] == "flash"
    seen = []
    made._run("encode", None, None, lambda hooks: seen.append(providers.chosen()))
    assert seen == ["flash"] and providers.chosen() != "flash"


READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten._linalg_check_errors.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.bincount.default,
}


class HostReads(TorchDispatchMode):
    """Counts the ops that bring a number to the host, which waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in READS:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def test_velocity_reads_nothing_back(nano_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = build_pipeline(nano_folder, device="cpu")
    with pipeline.use("preview") as model:
        velocity = velocity_of(model)
        video, audio = latents_of(velocity)
        # The routed experts' plain implementation reads the offsets; everything around them must not.
        for layer in model.block.layers:
            if hasattr(layer.mlp, "moe_mlp"):
                monkeypatch.setattr(layer.mlp.moe_mlp, "forward", lambda x: x)
        with HostReads() as mode:
            velocity(video, audio, 700)
        assert not mode.found
        with HostReads() as mode:
            video.mean().item()
        assert mode.found


def test_solver_and_guidance_read_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    # The loop looks at the latents only when it has waited for a step's end anyway.
    happened: list[str] = []
    loop = sys.modules[denoise.__module__]
    monkeypatch.setattr(loop, "synchronize", lambda device: happened.append("end"))
    monkeypatch.setattr(loop, "check_finite", lambda sample, where: happened.append("look"))
    latents = {"video": torch.randn(1, 48, 2, 3, 4), "audio": torch.randn(1, 7, 64)}

    def model(video: torch.Tensor, audio: torch.Tensor, timestep: int) -> Velocities:
        return Velocities(video * 0.5, video * 0.25, audio * 0.5, audio * 0.25)

    state = start_state(5, 7.0, latents["video"], latents["audio"])
    with HostReads() as mode:
        denoise(model, state, DenoiseOptions(video_guidance=3.0, audio_guidance=2.0), DenoiseHooks())
    assert not mode.found and happened == ["end", "look"] * 5


def test_graph_forward_replays_from_the_second_step(nano_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bookkeeping on the CPU, with a stand-in for the graph that runs the captured call again on its own buffers."""

    class Graph:
        def replay(self) -> None:
            forward._out.copy_(model(forward._inputs))

    class Module:
        CUDAGraph = Graph

        @staticmethod
        def graph(graph):
            return torch.no_grad()

    monkeypatch.setattr(accelerate.devices, "accelerator_module", lambda: Module)
    with build_pipeline(nano_folder, device="cpu").use("preview") as model:
        forward = GraphForward(model)
        plain, replayed = velocity_of(model), velocity_of(model)
        replayed.forward = forward
        kept = []
        for step, timestep in enumerate((999, 700, 20)):
            latents = latents_of(plain, step)
            want, got = plain(*latents, timestep), replayed(*latents, timestep)
            assert torch.equal(want.video_cond, got.video_cond) and torch.equal(want.audio_uncond, got.audio_uncond)
            assert forward.captured == (step > 0)
            kept.append((want, got))
        assert all(torch.equal(want.video_cond, got.video_cond) for want, got in kept), "an earlier step's result was overwritten"


def test_graph_forward_failure_is_one_line_and_the_plain_path(
    nano_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Module:
        CUDAGraph = object

        @staticmethod
        def graph(graph):
            raise RuntimeError("operation not permitted\nwhen stream is capturing")

    monkeypatch.setattr(accelerate.devices, "accelerator_module", lambda: Module)
    with build_pipeline(nano_folder, device="cpu").use("preview") as model, caplog.at_level(logging.WARNING):
        velocity = velocity_of(model)
        velocity.forward = GraphForward(model)
        for timestep in (999, 500, 1):
            assert torch.isfinite(velocity(*latents_of(velocity), timestep).video_cond).all()
    assert [record.getMessage() for record in caplog.records] == [
        "capturing a step failed, going on without: RuntimeError: operation not permitted"
    ]


def test_graph_forward_of_ranks_replays_on_all_or_on_none(
    nano_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    modes = []

    class Module:
        CUDAGraph = object

        @staticmethod
        def graph(graph, capture_error_mode: str):
            modes.append(capture_error_mode)
            return torch.no_grad()

    monkeypatch.setattr(accelerate.devices, "accelerator_module", lambda: Module)
    monkeypatch.setattr(accelerate, "gather_text", lambda text, group: [text, "RuntimeError: no memory"])
    groups = SimpleNamespace(world=SimpleNamespace(is_real=True), traffic=Traffic(calls=7, sent_bytes=70))
    with build_pipeline(nano_folder, device="cpu").use("preview") as model, caplog.at_level(logging.WARNING):
        velocity = velocity_of(model)
        velocity.forward = GraphForward(model, groups)
        for timestep in (999, 500, 1):
            assert torch.isfinite(velocity(*latents_of(velocity), timestep).video_cond).all()
    assert not velocity.forward.captured and modes == ["thread_local"]
    assert (groups.traffic.calls, groups.traffic.sent_bytes) == (7, 70)
    assert [record.getMessage() for record in caplog.records] == [
        "capturing a step failed on rank 1, going on without: RuntimeError: no memory"
    ]


def test_graph_forward_tells_the_other_ranks_of_every_failure(
    nano_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank that fails before its capture begins must not leave the others waiting for its word."""

    def broken() -> None:
        raise RuntimeError("no graph here")

    told = []

    def gather(text: str, group: object) -> list[str]:
        told.append(text)
        return ["", text]

    monkeypatch.setattr(accelerate.devices, "accelerator_module", lambda: SimpleNamespace(CUDAGraph=broken))
    monkeypatch.setattr(accelerate, "gather_text", gather)
    groups = SimpleNamespace(world=SimpleNamespace(is_real=True), traffic=Traffic())
    with build_pipeline(nano_folder, device="cpu").use("preview") as model, caplog.at_level(logging.WARNING):
        velocity = velocity_of(model)
        velocity.forward = GraphForward(model, groups)
        for timestep in (999, 500):
            assert torch.isfinite(velocity(*latents_of(velocity), timestep).video_cond).all()
    assert told == ["RuntimeError: no graph here"]
    assert "failed on rank 1, going on without: RuntimeError: no graph here" in caplog.text


def test_graph_forward_counts_what_replays_send(monkeypatch: pytest.MonkeyPatch) -> None:
    traffic = Traffic()

    class Module:
        CUDAGraph = staticmethod(lambda: SimpleNamespace(replay=lambda: None))

        @staticmethod
        def graph(graph, capture_error_mode: str):
            return torch.no_grad()

    class Model:
        device = CPU

        def __call__(self, inputs: object) -> torch.Tensor:
            traffic.calls, traffic.sent_bytes = traffic.calls + 4, traffic.sent_bytes + 1000
            return torch.zeros(2)

    monkeypatch.setattr(accelerate.devices, "accelerator_module", lambda: Module)
    monkeypatch.setattr(accelerate, "gather_text", lambda text, group: [text, ""])
    inputs = PackedInputs(context=None, pieces=())
    forward = GraphForward(Model(), SimpleNamespace(world=SimpleNamespace(is_real=True), traffic=traffic))
    for step in range(1, 6):
        forward(inputs)
        assert (traffic.calls, traffic.sent_bytes) == (4 * step, 1000 * step)
    assert forward.captured


def test_compiled_forward_failure_is_one_line_and_the_plain_path(
    nano_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(self, *args, **kwargs) -> None:
        self._compiled_call_impl = lambda *args, **kwargs: (_ for _ in ()).throw(RuntimeError("no compiler\nlong trace"))

    monkeypatch.setattr(torch.nn.Module, "compile", broken)
    with build_pipeline(nano_folder, device="cpu").use("preview") as model, caplog.at_level(logging.WARNING):
        velocity = velocity_of(model)
        want = velocity(*latents_of(velocity), 300)
        velocity.forward = accelerate.CompiledForward(model)
        for _ in range(2):
            assert torch.equal(velocity(*latents_of(velocity), 300).video_cond, want.video_cond)
    assert [record.getMessage() for record in caplog.records] == [
        "compiling the layers failed, going on without: RuntimeError: no compiler"
    ]


needs_gpu = pytest.mark.skipif(accelerator_module() is None, reason="no accelerator")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("step", ["eager", "graph", "compile"])
def test_step_never_waits_for_the_device(nano_folder: Path, step: str) -> None:
    pipeline = build_pipeline(nano_folder, dtype="bfloat16", kernels="triton", step=step)
    with choice.using("triton"), providers.using(pipeline.launch.attention.name), pipeline.use("preview") as model:
        plain, other = velocity_of(model), velocity_of(model)
        other.forward = pipeline.forward_of(model)
        for timestep in (999, 998):
            other(*latents_of(other), timestep)
        latents = latents_of(other, 1)
        want = plain(*latents, 500)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            got = other(*latents, 500)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        error = ((got.video_cond - want.video_cond).norm() / want.video_cond.norm()).item()
        assert error < 2e-2
        if step == "graph":
            assert other.forward.captured


@pytest.mark.gpu
@needs_gpu
def test_compiled_layers_serve_another_prompt_length(nano_folder: Path) -> None:
    pipeline = build_pipeline(nano_folder, dtype="bfloat16", kernels="triton", step="compile")
    with choice.using("triton"), providers.using(pipeline.launch.attention.name), pipeline.use("preview") as model:
        for text in (5, 8):
            velocity = velocity_of(model, text)
            velocity.forward = pipeline.forward_of(model)
            velocity(*latents_of(velocity), 10)
        with torch.compiler.set_stance("fail_on_recompile"):
            for text in (11, 40):
                velocity = velocity_of(model, text)
                velocity.forward = pipeline.forward_of(model)
                velocity(*latents_of(velocity), 10)


@pytest.mark.parametrize(
    ("step", "kernels", "is_real", "says"),
    [
        ("graph", "reference", False, "needs the Triton kernels: .* Use eager or auto"),
        ("compile", "reference", False, "needs the Triton kernels: .* Use eager or auto"),
        ("compile", "triton", True, "without a fleet: .* Use eager, graph or auto"),
    ],
)
def test_choose_launch_refuses_what_it_would_not_do(
    step: str, kernels: str, is_real: bool, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that was asked for is never launched another way in silence."""
    monkeypatch.setenv("MAGI2_STEP", step)
    target = Target(device=torch.device("meta"), dtype=torch.bfloat16, head_dim=16)
    with pytest.raises(RequestError, match=rf"step '{step}' .*{says}"):
        choose_launch("reference", "auto", target, kernels, SimpleNamespace(world=SimpleNamespace(is_real=is_real)))


def test_choose_launch_takes_a_graph_in_a_fleet() -> None:
    groups = SimpleNamespace(world=SimpleNamespace(is_real=True))
    target = Target(device=torch.device("meta"), dtype=torch.bfloat16, head_dim=16)
    assert choose_launch("reference", "graph", target, "triton", groups).step == "graph"


def test_choose_launch_logs_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        launch = choose_launch("auto", "auto", Target(device=CPU, dtype=torch.float32, head_dim=16), "reference", Groups.local())
    assert launch.step == "eager"
    assert [record.getMessage() for record in caplog.records] == ["kernels reference, attention reference (kernels reference), step eager"]


def test_compiled_forward_makes_room_for_other_kinds_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo import config

    name = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"
    before = getattr(config, name)
    try:
        setattr(config, name, 8)
        forward = accelerate.CompiledForward(SimpleNamespace(block=SimpleNamespace(layers=[])))
        assert getattr(config, name) == accelerate.MOST_GRAPHS and forward.is_compiled
        setattr(config, name, 1000)
        accelerate.CompiledForward(forward.model)
        assert getattr(config, name) == 1000  # the user's own larger one stays
    finally:
        setattr(config, name, before)
