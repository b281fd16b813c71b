"""How a preview step reaches the device: which attention library, and whether its kernels are launched one by one, as compiled regions,
or as one captured graph. Chosen when a pipeline is built, never switched by itself; a compile or capture that fails says so once and
the request goes on with plain launches. Measurements: tests/bench/results/SUMMARY.md.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from magi2_core import device as devices
from magi2_core import env
from magi2_core.errors import DependencyError, RequestError
from magi2_core.model.packing import PackedInputs, TokenPiece
from magi2_core.model.preview import PreviewTransformer
from magi2_core.parallel.collectives import gather_text
from magi2_core.parallel.groups import Groups
from magi2_kernels.sink_attention.providers import Resolved, Target, resolve

log = logging.getLogger(__name__)

Forward = Callable[[PackedInputs], Tensor]
"""One evaluation of the preview transformer."""

STEPS = ("eager", "compile", "graph")
"""`auto` is eager: on an H200 a captured step takes the same time to 0.1 % at 272p and 540p, compiled layers are slower."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """`attention`: provider of the preview's attention and why; `step`: eager, compile or graph; `groups` of this rank."""

    attention: Resolved
    step: str
    groups: Groups = field(default_factory=Groups.local)


def choose_launch(attention: str, step: str, target: Target, kernels: str, groups: Groups) -> Launch:
    """Both choices for a pipeline, as one log line. Raises RequestError, DependencyError."""
    chosen = choose_step(step, target.device)
    if chosen != "eager" and kernels != "triton":
        raise RequestError(f"step {chosen!r} needs the Triton kernels: plain ones wait for the device inside a step. Use eager or auto.")
    if chosen == "compile" and groups.world.is_real:
        raise RequestError(
            f"step {chosen!r} is for one process without a fleet: compiled layers were never run with exchanges between them. Use eager, graph or auto."
        )
    launch = Launch(attention=choose_attention(attention, target, kernels), step=chosen, groups=groups)
    log.info("kernels %s, attention %s (%s), step %s", kernels, launch.attention.name, launch.attention.reason, launch.step)
    return launch


def choose_attention(name: str, target: Target, kernels: str) -> Resolved:
    """The provider for `auto` (or MAGI2_ATTENTION) or a name; plain kernels take the reference unless another is asked for.

    Raises RequestError on an unknown name, DependencyError when the one asked for cannot be used, with what to install.
    """
    asked, name = name, env.attention_choice() if name == "auto" else name
    source = "MAGI2_ATTENTION: " if asked == "auto" and name != "auto" else ""
    if name == "auto" and kernels == "reference":
        return Resolved(name="reference", reason="kernels reference")
    try:
        return resolve(name, target)
    except ValueError as error:
        raise RequestError(f"{source}{error}") from None
    except RuntimeError as error:
        raise DependencyError(f"{source}{error}") from None


def choose_step(name: str, device: torch.device) -> str:
    """The way for `auto` (or MAGI2_STEP) or a name; on a CPU always eager. Raises RequestError."""
    asked, name = name, env.acceleration_choice() if name == "auto" else name
    said = env.chosen_as("step", asked, name, "MAGI2_STEP")
    if name not in ("auto", *STEPS):
        raise RequestError(f"{said}: use auto, {', '.join(STEPS)}.")
    if device.type == "cpu":
        if name in ("compile", "graph"):
            raise RequestError(f"{said} needs an accelerator: use eager or auto on a CPU.")
        return "eager"
    return "eager" if name == "auto" else name


def forward_of(model: PreviewTransformer, step: str, groups: Groups | None = None) -> Forward:
    """The model's forward for one request, launched the chosen way.

    Args:
        model: loaded, on its device; it must stay there while the result is used.
        step: of `choose_launch`.
        groups: of this rank when the model's seams talk to others; all of them then launch the same way.
    """
    if step == "eager":
        return model
    if step == "compile":
        return CompiledForward(model)
    return GraphForward(model, groups)


MOST_GRAPHS = 64
"""Three a number of token runs; PyTorch's own 8 would end in plain layers after three kinds of request."""


class CompiledForward:
    """Every layer is a region; layers of one kind share one compiled graph, and sizes are symbolic, so another prompt length needs no new one.
    Another number of token runs does (with a picture, without a negative prompt): up to `MOST_GRAPHS` are kept."""

    def __init__(self, model: PreviewTransformer) -> None:
        from torch._dynamo import config

        self.model, self._failed = model, False
        limit = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"  # the older name
        setattr(config, limit, max(getattr(config, limit), MOST_GRAPHS))
        for layer in model.block.layers:
            if layer._compiled_call_impl is None:
                layer.compile(dynamic=True)

    @property
    def is_compiled(self) -> bool:
        """Whether no compilation has failed."""
        return not self._failed

    def __call__(self, inputs: PackedInputs) -> Tensor:
        """Runs the compiled layers; after a failure to compile, the plain ones."""
        if not self._failed:
            try:
                return self.model(inputs)
            except Exception as error:
                if devices.is_out_of_memory(error):
                    raise
                self._failed = True
                log.warning("compiling the layers failed, going on without: %s", _first_line(error))
                for layer in self.model.block.layers:
                    layer._compiled_call_impl = None
        return self.model(inputs)


class GraphForward:
    """One graph for one request: the first step runs plainly (kernels are built and loaded then), the second is captured and replayed
    from then on. Captured memory goes back when this object does. Where ranks talk inside a step, the exchanges are captured with it,
    and either every rank replays or none does. A peer that is lost during a replay is found by the fleet's watchdog, not by the library's
    timeout, and process groups can be closed only when this object is gone.
    """

    def __init__(self, model: PreviewTransformer, groups: Groups | None = None) -> None:
        self.model, self.groups = model, groups or Groups.local()
        self._steps = 0
        self._graph: Any = None
        self._inputs: PackedInputs | None = None
        self._out: Tensor | None = None
        self._each = (0, 0)

    @property
    def captured(self) -> bool:
        """Whether steps are replayed."""
        return self._graph is not None

    def __call__(self, inputs: PackedInputs) -> Tensor:
        """The velocities of `inputs`, whose layout and constant rows are those of the first call."""
        self._steps += 1
        if self._steps == 2:
            self._capture(inputs)
        if self._graph is None:
            return self.model(inputs)
        assert self._inputs is not None and self._out is not None
        for kept, piece in zip(self._inputs.pieces, inputs.pieces, strict=True):
            for mine, given in ((kept.features, piece.features), (kept.code, piece.code)):
                if mine is not None and given is not None:
                    mine.copy_(given)
        self._graph.replay()
        self.groups.traffic.calls += self._each[0]
        self.groups.traffic.sent_bytes += self._each[1]
        return self._out.clone()

    def _capture(self, inputs: PackedInputs) -> None:
        traffic = self.groups.traffic
        before, failure, made = (traffic.calls, traffic.sent_bytes), "", None
        try:
            made = self._captured(inputs)
        except Exception as error:
            failure = _first_line(error)
        # What was captured has not been sent; every replay sends it.
        self._each = (traffic.calls - before[0], traffic.sent_bytes - before[1])
        traffic.calls, traffic.sent_bytes = before
        failures = gather_text(failure, self.groups.world)
        first = next((rank for rank, text in enumerate(failures) if text), None)
        if first is None and made is not None:
            self._graph, self._inputs, self._out = made
        elif first is not None:
            where = f" on rank {first}" if self.groups.world.is_real else ""
            log.warning("capturing a step failed%s, going on without: %s", where, failures[first])

    def _captured(self, inputs: PackedInputs) -> tuple[Any, PackedInputs, Tensor]:
        """The graph of a step, the inputs it reads and the result it writes."""
        module, device = devices.accelerator_module(), self.model.device
        kept = replace(inputs, pieces=tuple(_own(piece) for piece in inputs.pieces))
        devices.empty_cache(device)
        graph = module.CUDAGraph()
        # The collective library looks after its earlier calls from a thread of its own: only this thread is held to what a capture allows.
        mode = {"capture_error_mode": "thread_local"} if self.groups.world.is_real else {}
        try:
            with module.graph(graph, **mode):
                out = self.model(kept)
        except Exception:
            devices.synchronize(device)
            raise
        return graph, kept, out


def _own(piece: TokenPiece) -> TokenPiece:
    """A piece whose changing tensors are its own; constant rows are shared."""
    if piece.features is None:
        return piece
    return replace(piece, features=piece.features.clone(), code=None if piece.code is None else piece.code.clone())


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
