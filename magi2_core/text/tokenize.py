"""Text to token ids as the model was trained: the checkpoint's own tokenizer with one more split in front.

Runs in a worker or the CLI; `tokenizers` (it comes with transformers) is imported when called. Facts: spec preview.md 6.1,
components.md 5.2 and the text_encoder golden. No chat template, no special tokens added, no padding: a batch is one prompt.
"""

import importlib
import importlib.metadata
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from magi2_core.errors import CheckpointError, DependencyError, RequestError

from .caption import normalize_prompt

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_TOKENS = 7000
"""Longest prompt the release encodes; it cuts longer ones without a word, this pack refuses them unless told to cut."""

ISOLATED = "\u1100-\u11ff\u2e80-\ua4cf\ua840-\ud7af\uf900-\ufaff\ufe30-\ufe4f\uff65-\uffdc0-U"
"""Characters that become a piece of their own before the tokenizer's own split.

The release meant CJK with U+20000 and up; its engine reads that last range as the ASCII range 0-U (digits, : ; < = > ? @,
A-U), and the model was trained with what took effect.
"""

TRANSFORMERS = (5, 5)


@dataclass(frozen=True, kw_only=True)
class TokenizedPrompt:
    """`text` is what was tokenised (normalised), `ids` and `attention_mask` one number a token, `offsets` its [start, end) in `text`."""

    text: str
    ids: tuple[int, ...]
    attention_mask: tuple[int, ...]
    offsets: tuple[tuple[int, int], ...]


def require_transformers() -> Any:
    """The module transformers. Raises DependencyError, with both cures, when it is absent or older than 5.5."""
    wanted = ".".join(map(str, TRANSFORMERS))
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        raise _dependency_error("is not installed", wanted) from None
    if tuple(int(number) for number in re.findall(r"\d+", version)[:2]) < TRANSFORMERS:
        raise _dependency_error(f"is {version}", wanted)
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise _dependency_error(f"{version} does not import ({error})", wanted) from None


def _dependency_error(state: str, wanted: str) -> DependencyError:
    return DependencyError(
        f"The text encoder (Qwen3.5) needs the package transformers >= {wanted}, which {state}. "
        f"Install it: pip install 'transformers>={wanted}'. If this environment must keep its version, make a second one "
        f"with the same torch minor version and transformers >= {wanted}, and set MAGI2_PYTHON to its python: the workers then run there."
    )


def load_tokenizer(folder: Path) -> "Tokenizer":
    """The tokenizer of a text-encoder folder (tokenizer.json) with the isolating split in front of its own."""
    try:
        engine = importlib.import_module("tokenizers")
    except ImportError:
        raise _dependency_error("brings the package tokenizers, is not installed", ".".join(map(str, TRANSFORMERS))) from None
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"text encoder: {path} is missing. Download the folder text_encoder again.")
    try:
        tokenizer = engine.Tokenizer.from_file(str(path))
    except Exception as error:  # the engine raises the bare class
        raise CheckpointError(f"text encoder: {path} cannot be read ({error}). Download it again.") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    split = engine.pre_tokenizers.Split(engine.Regex(f"[{ISOLATED}]"), behavior="isolated")
    own = tokenizer.pre_tokenizer
    tokenizer.pre_tokenizer = split if own is None else engine.pre_tokenizers.Sequence([split, own])
    return tokenizer


def tokenize_prompt(tokenizer: "Tokenizer", prompt: str, *, max_tokens: int | None = MAX_TOKENS, truncate: bool = False) -> TokenizedPrompt:
    """Normalises and tokenises a prompt.

    Raises RequestError when nothing is left to encode, and above `max_tokens` (None: no limit) unless `truncate`, which
    keeps the first `max_tokens` as the release does.
    """
    text = normalize_prompt(prompt)
    try:
        encoding = tokenizer.encode(text)
    except (TypeError, UnicodeEncodeError):
        raise RequestError("the prompt holds a lone surrogate, half of a character: type or paste it again.") from None
    count = len(encoding.ids)
    if count == 0:
        reason = "is empty" if not prompt else "is a caption whose known fields are all empty" if not text else "has no token"
        raise RequestError(f"the prompt {reason}: say what the clip shows and sounds like.")
    if max_tokens is not None and count > max_tokens and not truncate:
        raise RequestError(f"the prompt has {count} tokens, at most {max_tokens} can be encoded: shorten it.")
    kept = count if max_tokens is None else min(count, max_tokens)
    return TokenizedPrompt(
        text=text,
        ids=tuple(encoding.ids[:kept]),
        attention_mask=tuple(encoding.attention_mask[:kept]),
        offsets=tuple(encoding.offsets[:kept]),
    )


def count_tokens(folder: Path, prompt: str) -> int:
    """Tokens of a prompt under the tokenizer of `folder`, without loading the model and without a limit."""
    return len(tokenize_prompt(load_tokenizer(folder), prompt, max_tokens=None).ids)
