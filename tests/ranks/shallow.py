"""Tiny models of fewer and narrower layers, for tests that prove of each layer what they prove of
one.
"""

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

from open_instruct.commands.tiny_model import SIZES, write_tiny_model

NUM_LAYERS = 2
"""With one there is nothing between layers; a step through more takes as much longer."""


def write_shallow_model(
    folder: Path,
    *,
    layers: int = NUM_LAYERS,
    is_narrow: bool = True,
    like: str = "tiny",
    **given: Any,
) -> Path:
    """As `write_tiny_model` of the size `like`, but of fewer layers; the last one has no window.

    Narrow ones are half as wide, and vLLM on a CPU does not take their heads.
    """
    size = {**SIZES[like], "num_hidden_layers": layers}
    if is_narrow:
        size |= {name: size[name] // 2 for name in ("hidden_size", "intermediate_size")}
    with patch.dict(SIZES, {"shallow": size}):
        write_tiny_model(folder, size="shallow", **given)
    config = json.loads((folder / "config.json").read_text())
    if "sliding_attention" in config.get("layer_types", []):
        config["layer_types"][-1] = "full_attention"
        (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder
