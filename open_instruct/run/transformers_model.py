"""Opens a model by transformers, as users of an export do."""

from pathlib import Path
from typing import Any

from open_instruct.core.errors import InputError


def open_model(folder: Path, class_name: str, dtype: str | None) -> Any:
    """Open the model in a folder, on the GPU or, without one, on the CPU.

    Args:
        folder: an export, or any checkpoint in safetensors.
        class_name: of transformers, such as AutoModelForCausalLM.
        dtype: of the computation; default: bfloat16 on CUDA, float32 on a CPU.

    Raises:
        InputError: the folder lacks a tensor, which transformers would initialise at random.
    """
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    default_dtype = "bfloat16" if device.type == "cuda" else "float32"
    model_class: Any = getattr(transformers, class_name)
    model, report = model_class.from_pretrained(
        folder,
        use_safetensors=True,
        dtype=getattr(torch, dtype or default_dtype),
        output_loading_info=True,
    )
    if report["missing_keys"]:
        missing = ", ".join(sorted(report["missing_keys"])[:3])
        raise InputError(
            f"{folder} has no tensor {missing}: export the run again", kind="bad_model"
        )
    return model.eval().to(device)
