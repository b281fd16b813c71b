"""The text side of a tiny checkpoint: a small byte-level tokenizer and the configuration of a small Qwen3.5 text model."""

import importlib
import json
from pathlib import Path
from typing import Any

from magi2_core.errors import DependencyError

TEXT_PREFIX = "model.language_model."
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCABULARY = 384
SENTENCES = (
    "a red circle moves to the right over a blue background, low hum",
    "the camera follows a person who walks along the shore and speaks",
    "rain falls on a quiet street at night, with distant music",
    "<Figure 1> shows the first frame of the clip",
)


def write_tokenizer(folder: Path) -> int:
    """Trains a byte-level BPE on a few sentences and writes its two files; returns the number of tokens.

    All 256 bytes are in it, so any text can be encoded. Raises DependencyError without the package tokenizers.
    """
    try:
        engine = importlib.import_module("tokenizers")
    except ImportError:
        raise DependencyError(
            "A tiny checkpoint's tokenizer needs the package tokenizers (it comes with transformers >= 5.5). "
            "Install it: pip install 'transformers>=5.5'"
        ) from None
    tokenizer = engine.Tokenizer(engine.models.BPE())
    tokenizer.normalizer = engine.normalizers.NFC()
    tokenizer.pre_tokenizer = engine.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = engine.decoders.ByteLevel()
    trainer = engine.trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(engine.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL_TOKENS[2], "pad_token": SPECIAL_TOKENS[0]}
    config = names | {"model_max_length": 262144, "clean_up_tokenization_spaces": False, "add_prefix_space": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    return int(tokenizer.get_vocab_size())


def text_config(width: int, layers: int, vocabulary: int) -> dict[str, Any]:
    """text_encoder/config.json: every second layer full attention, the others gated delta rule, as in the release with other sizes."""
    head = 16
    rope = {
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    }
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "qwen3_5_text",
            "vocab_size": vocabulary,
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": head,
            "hidden_act": "silu",
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-6,
            "attention_bias": False,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": head,
            "linear_value_head_dim": head,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "full_attention_interval": 2,
            "layer_types": [("linear_attention", "full_attention")[index % 2] for index in range(layers)],
            "attn_output_gate": True,
            "partial_rotary_factor": 0.5,
            "rope_parameters": rope,
            "dtype": "bfloat16",
        },
    }
