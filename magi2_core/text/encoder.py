"""The text encoder: a prompt becomes the residual stream two layers before the end of Qwen3.5's text model.

Runs in a worker, on one rank. The model is transformers' `Qwen3_5TextModel`, built without its last two layers and its
final norm: hidden_states[-3] does not need them (1.5 GB of the release). Facts: spec components.md 5, preview.md 4.4, 6.1.
"""

import copy
import inspect
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from magi2_core.config_values import read_json
from magi2_core.errors import CheckpointError, DependencyError

from .caption import figure_marker, normalize_prompt
from .tokenize import MAX_TOKENS, TokenizedPrompt, load_tokenizer, require_transformers, tokenize_prompt
from .weights import load_weights

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SKIPPED_LAYERS = 2


@dataclass(frozen=True, kw_only=True)
class TextFeatures:
    """`features` [1, L, C] and `ids` [1, L] on the encoder's device.

    `offsets` is [start, end) of each token in `text`, the normalised prompt.
    """

    features: Tensor
    ids: Tensor
    offsets: tuple[tuple[int, int], ...]
    text: str


def figure_feature(features: TextFeatures, prompt: str, figure_id: int) -> Tensor:
    """The special embedding of a figure: mean [C], in the features' dtype, over the tokens of the first "<Figure N>" in `prompt`.

    A zero vector when the prompt, or what was kept of it, does not name the figure (as in the release).
    """
    marker = figure_marker(figure_id)
    start = normalize_prompt(prompt).find(marker)
    if start < 0:
        return features.features.new_zeros(features.features.shape[-1])
    end = start + len(marker)
    rows = [
        index
        for index, (first, last) in enumerate(features.offsets)
        if first < end and last > start and (index == 0 or (first, last) != (0, 0))
    ]
    if not rows:
        return features.features.new_zeros(features.features.shape[-1])
    return features.features[0, rows].mean(dim=0)


class TextEncoder:
    """Tokenizer and text model of one folder. Made by `from_folder`."""

    def __init__(self, model: Any, tokenizer: "Tokenizer", *, full_depth: bool) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.full_depth = full_depth

    @classmethod
    def from_folder(
        cls, folder: Path, *, device: torch.device | str, dtype: torch.dtype = torch.bfloat16, full_depth: bool = False
    ) -> "TextEncoder":
        """Loads a text_encoder folder in the released layout.

        Args:
            folder: config.json, tokenizer.json and the safetensors files.
            device, dtype: of all weights; the release computes in bfloat16.
            full_depth: also the last two layers and the final norm, for `hidden_states`.

        Raises DependencyError without transformers >= 5.5, CheckpointError when the folder does not fit.
        """
        folder = Path(folder)
        tokenizer = load_tokenizer(folder)
        model, known = build_model(read_json(folder / "config.json"), full_depth=full_depth)
        load_weights(model, folder, known=known, device=device, dtype=dtype)
        model.rotary_emb = type(model.rotary_emb)(config=model.config).to(device)
        left = [name for name, value in (*model.named_parameters(), *model.named_buffers()) if value.is_meta]
        assert not left, f"not materialised: {left}"
        return cls(model.eval().requires_grad_(False), tokenizer, full_depth=full_depth)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.embed_tokens.weight.device

    def to(self, device: torch.device | str) -> "TextEncoder":
        """Moves the weights; returns itself."""
        self.model.to(device)
        return self

    def count_tokens(self, prompt: str) -> int:
        """Tokens of a prompt, without a limit."""
        return len(tokenize_prompt(self.tokenizer, prompt, max_tokens=None).ids)

    @torch.no_grad()
    def encode(self, prompt: str, *, max_tokens: int = MAX_TOKENS, truncate: bool = False) -> TextFeatures:
        """Features of one prompt, in the weights' dtype.

        Raises RequestError on an empty prompt and, unless `truncate`, on one of more than `max_tokens` tokens.
        """
        tokens = tokenize_prompt(self.tokenizer, prompt, max_tokens=max_tokens, truncate=truncate)
        output = self._run(tokens, output_hidden_states=self.full_depth)
        features = output.hidden_states[-1 - SKIPPED_LAYERS] if self.full_depth else output.last_hidden_state
        return TextFeatures(features=features, ids=self._row(tokens.ids), offsets=tokens.offsets, text=tokens.text)

    @torch.no_grad()
    def hidden_states(self, prompt: str, *, max_tokens: int = MAX_TOKENS, truncate: bool = False) -> tuple[Tensor, ...]:
        """All hidden states [1, L, C]: embeddings, each layer's output, and last the final norm's in place of the last layer's."""
        assert self.full_depth, "hidden_states needs an encoder made with full_depth=True"
        tokens = tokenize_prompt(self.tokenizer, prompt, max_tokens=max_tokens, truncate=truncate)
        return self._run(tokens, output_hidden_states=True).hidden_states

    def _row(self, values: tuple[int, ...]) -> Tensor:
        return torch.tensor([values], dtype=torch.long, device=self.device)

    def _run(self, tokens: TokenizedPrompt, *, output_hidden_states: bool) -> Any:
        return self.model(
            input_ids=self._row(tokens.ids),
            attention_mask=self._row(tokens.attention_mask),
            use_cache=False,
            output_hidden_states=output_hidden_states,
        )


def build_model(values: dict[str, Any], *, full_depth: bool = False) -> tuple[Any, tuple[str, ...]]:
    """The text model of a config.json on the meta device, and the state names of the full-depth one."""
    require_transformers()
    try:
        from transformers import Qwen3_5TextConfig, Qwen3_5TextModel
    except ImportError as error:
        raise DependencyError(f"transformers lacks Qwen3_5TextModel ({error}). Install it: pip install -U 'transformers>=5.5'") from None
    text = values.get("text_config", values)
    if not isinstance(text, dict) or text.get("model_type") != "qwen3_5_text":
        kind = text.get("model_type") if isinstance(text, dict) else text
        raise CheckpointError(f"text encoder: config.json describes the text model {kind!r}, expected 'qwen3_5_text'.")
    try:
        config = Qwen3_5TextConfig(**text)
        full = _on_meta(Qwen3_5TextModel, config)
    except Exception as error:  # each version validates with classes of its own
        raise CheckpointError(f"text encoder: config.json is not usable ({' '.join(str(error).split())}).") from None
    known = tuple(full.state_dict())
    depth = config.num_hidden_layers
    if depth <= SKIPPED_LAYERS:
        raise CheckpointError(f"text encoder: config.json has {depth} layers, at least {SKIPPED_LAYERS + 1} are needed.")
    if full_depth:
        return full, known
    shallow = copy.deepcopy(config)
    shallow.num_hidden_layers = depth - SKIPPED_LAYERS
    shallow.layer_types = list(config.layer_types or ())[: depth - SKIPPED_LAYERS]
    model = _on_meta(Qwen3_5TextModel, shallow)
    model.norm = nn.Identity()
    return model, known


def _on_meta(model_class: Any, config: Any) -> Any:
    with torch.device("meta"):
        model = model_class(config)
    _use_plain_kernels(model)
    return model


def _use_plain_kernels(model: Any) -> None:
    """Makes the model compute with transformers' plain PyTorch functions, also where fla or causal-conv1d are installed.

    The release computes with the plain ones, and the fused ones cannot run while the encoder is on the CPU. transformers
    5.5 keeps the choice in the modules, later versions wrap the plain functions of the model's source file.
    """
    source = sys.modules[type(model).__module__]
    for name in ("torch_chunk_gated_delta_rule", "causal_conv1d_fn"):
        plain = inspect.unwrap(getattr(source, name)) if callable(getattr(source, name, None)) else None
        if plain is not None and plain.__module__ == source.__name__:
            setattr(source, name, plain)
    for module in model.modules():
        if hasattr(module, "chunk_gated_delta_rule"):
            module.chunk_gated_delta_rule = source.torch_chunk_gated_delta_rule
            module.causal_conv1d_fn = None
            with torch.device("meta"):
                module.norm = source.Qwen3_5RMSNormGated(module.head_v_dim, eps=module.layer_norm_epsilon)
