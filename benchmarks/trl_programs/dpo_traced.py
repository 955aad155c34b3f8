"""The device's memory in a step of TRL's DPOTrainer on accelerate's FSDP2, as rank 0 of a pretended
world traces it.

Run by `offload_vs_trl.py` with an interpreter that has TRL; its word is a case as JSON. TRL,
accelerate, transformers and torch run as they are, on the pretended GPU of tests/fake_cuda. Put in
the place of theirs is what cannot run there: files of weights (`fsdp2_load_full_state_dict`),
values that are read (log-probs of the reference, whether a row is padded: none is), and kernels of
CUDA, which work in tensors that are there already: TRL's of Triton, and the product that adds
bfloat16 up in float32. Attention is the flash kernel, which PyTorch takes for such rows.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.fake_cuda.device import load_hooks, pretend_cuda, pretended_gpu
from tests.fake_cuda.memory import PHASES, Alive, watching

NUM_STEPS = 2


class NoKernel:
    """A kernel of Triton: called on a grid, it writes into what it is given."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments, **more: None


def flash(query: Any, key: Any, value: Any, **how: Any) -> Any:
    """What `scaled_dot_product_attention` is on a GPU where nothing is masked but what is to
    come.
    """
    import torch

    assert how["attn_mask"] is None and how["is_causal"]
    kernel = torch.ops.aten._scaled_dot_product_flash_attention
    return kernel(query, key, value, how["dropout_p"], True, scale=how["scale"])[0]


def in_place_of_kernels() -> None:
    import torch
    from transformers import masking_utils
    from trl.kernels import chunked_logprob
    from trl.trainer import utils

    for module in (chunked_logprob, utils):
        module._use_triton = lambda device: True
    chunked_logprob.triton = SimpleNamespace(cdiv=lambda size, by: -(-size // by))
    chunked_logprob._forward_kernel = chunked_logprob._backward_kernel = NoKernel()
    chunked_logprob._addmm_fp32 = lambda *arguments: None
    # It asks whether a row is padded.
    masking_utils._ignore_causal_mask_sdpa = lambda *arguments, **more: True
    torch.nn.functional.scaled_dot_product_attention = flash


def leave_weights_alone() -> None:
    """Shards are made where they belong, and not filled; nobody reads a reference, or a value to
    name it by.
    """
    import torch
    from accelerate.utils import fsdp_utils
    from trl.trainer import dpo_trainer

    def load_nothing(accelerator: Any, model: Any, full: Any, cpu_offload: bool = False) -> Any:
        device = "cpu" if cpu_offload else "cuda"
        shards = {
            name: torch.empty_like(shard, device=device)
            for name, shard in model.state_dict().items()
        }
        model.load_state_dict(shards, assign=True)
        return model

    fsdp_utils.fsdp2_load_full_state_dict = load_nothing
    dpo_trainer.hash_module = lambda module: ""
    dpo_trainer.prepare_fsdp = lambda model, accelerator: model
    dpo_trainer.create_model_from_path = lambda *arguments, **more: None
    dpo_trainer.DPOTrainer._prepare_dataset = lambda trainer, rows, *arguments: rows
    dpo_trainer.DPOTrainer._precompute_ref_logps = lambda trainer, rows, *arguments: rows


def trainer_of(case: dict[str, Any], out: Path) -> Any:
    import torch
    import transformers
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from trl import DPOConfig, DPOTrainer

    config = getattr(transformers, case["config_class"])(**case["fields"], pad_token_id=0)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.to_empty(device="cpu")  # pages that nobody touches take no memory
    reply = [3] * (case["length"] - case["prompt"])
    row = {"prompt_ids": [3] * case["prompt"], "chosen_ids": reply, "rejected_ids": reply}
    row |= {"ref_chosen_logps": 0.0, "ref_rejected_logps": 0.0}
    words = Tokenizer(models.WordLevel({"<pad>": 0}))
    args = DPOConfig(
        output_dir=str(out),
        bf16=True,
        gradient_checkpointing=False,
        fsdp=True,
        fsdp_config={
            "version": 2,
            "cpu_offload": case["offload"],
            "cpu_ram_efficient_loading": True,
            "activation_checkpointing": True,
        },
        per_device_train_batch_size=1,
        gradient_accumulation_steps=case["microbatches"],
        max_steps=NUM_STEPS,
        max_length=case["length"],
        precompute_ref_log_probs=True,
        dataloader_pin_memory=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    # Accelerate's own is bfloat16, which flags of transformers leave as it is.
    if case.get("reduces_in_float32"):
        dtypes = {
            "param_dtype": torch.bfloat16,
            "reduce_dtype": torch.float32,
            "output_dtype": torch.bfloat16,
        }
        args.fsdp_plugin_args["mixed_precision_policy"] = MixedPrecisionPolicy(**dtypes)
    return DPOTrainer(
        model=model,
        args=args,
        train_dataset=Dataset.from_list([row] * (case["world"] * case["microbatches"] * NUM_STEPS)),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>"),
    )


def watched(trainer: Any, alive: Alive) -> None:
    """Have the trainer say when it begins which phase of a step."""
    num_steps = 0

    def begins(phase: str, owner: Any, name: str) -> None:
        run = getattr(owner, name)

        def watched_run(*arguments: Any, **more: Any) -> Any:
            nonlocal num_steps
            alive.begin(f"{phase} {num_steps}")
            result = run(*arguments, **more)
            num_steps += name == "on_step_end"
            return result

        setattr(owner, name, watched_run)

    begins("forward", trainer, "compute_loss")
    begins("backward", trainer.accelerator, "backward")
    begins("optimizer step", trainer.accelerator, "clip_grad_norm_")
    begins("between", trainer.callback_handler, "on_step_end")


def traced(case: dict[str, Any], out: Path) -> dict[str, int]:
    """The most bytes alive in each phase of the last step."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(case["world"])}
    dist.init_process_group("fake", rank=0, world_size=case["world"], store=FakeStore())
    alive = Alive()
    with watching(alive) as watch, pretended_gpu(), watch:
        trainer = trainer_of(case, out)
        watched(trainer, alive)
        trainer.train()
    return {
        phase: most
        for phase in PHASES
        if (most := alive.most.get(f"{phase} {NUM_STEPS - 1}")) is not None
    }


def main(words: str) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        load_hooks(folder)
        pretend_cuda()
        in_place_of_kernels()
        leave_weights_alone()
        print(json.dumps(traced(json.loads(words), folder / "out")))


if __name__ == "__main__":
    main(sys.argv[1])
