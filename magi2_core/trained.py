"""What a small checkpoint was trained for, by its own `generation.json`, and one line for a request that goes beyond it.

Nothing is refused: a checkpoint that says nothing (the released one) was trained for everything that requests allow. A leaf; the command
line and the nodes ask it.
"""

import re
from typing import Any

from .config import GenerationDefaults
from .request import EncodeRequest, RefineRequest, SampleRequest

WORD = re.compile(r"[^\W\d_]+(?:-[^\W\d_]+)*")
MOST_WORDS = 4
"""So many unknown words are named."""


def describe_untrained(name: str, defaults: GenerationDefaults, *requests: Any) -> str:
    """One line that says what of these requests the checkpoint `name` was not trained for; "" when there is nothing."""
    found = [text for request in requests for text in _beyond(defaults, request)]
    if not found:
        return ""
    return f"{name} was not trained for {' and not for '.join(found)}: the clip may be noise, or show something else."


def _beyond(defaults: GenerationDefaults, request: Any) -> list[str]:
    trained = defaults.trained
    found = []
    if isinstance(request, EncodeRequest):
        unknown = [word for word in dict.fromkeys(WORD.findall(request.prompt.lower())) if word not in trained.words]
        if trained.words and unknown:
            named = ", ".join(f'"{word}"' for word in unknown[:MOST_WORDS]) + (" ..." if len(unknown) > MOST_WORDS else "")
            found.append(f'{named} (but for prompts like "{defaults.default_prompt}")')
    elif isinstance(request, SampleRequest):
        if "preview" in trained.untrained:
            found.append("sampling (its weights are random)")
        size = f"{request.width}x{request.height}"
        if trained.sizes and size not in trained.sizes:
            found.append(f"{size} pixels (but for {', '.join(trained.sizes)})")
        if trained.seconds and request.seconds not in trained.seconds:
            found.append(f"{request.seconds:g} seconds (but for {', '.join(f'{value:g}' for value in trained.seconds)})")
    elif isinstance(request, RefineRequest) and "refiner" in trained.untrained:
        found.append("refining (its refiner's weights are random)")
    return found
