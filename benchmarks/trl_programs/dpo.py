"""TRL's DPOTrainer on the same model and rows; run by the programs above with an interpreter that
has TRL.
"""

import importlib
from functools import partial

from timed import parsed, train_timed
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import DPOConfig, DPOTrainer

if __name__ == "__main__":
    args = parsed("beta")
    frozen = {"beta": args.beta, "precompute_ref_log_probs": True}
    adapters = {}
    if args.lora_r is not None:
        lora_config = importlib.import_module("peft").LoraConfig
        adapters["peft_config"] = lora_config(
            r=args.lora_r,
            lora_alpha=2 * args.lora_r,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
    if args.load_in_4bit:
        rounded = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype="float32",
        )
        adapters["load"] = partial(
            AutoModelForCausalLM.from_pretrained, quantization_config=rounded
        )
    train_timed(args, DPOTrainer, DPOConfig, ["attention_mask"], own=frozen, **adapters)
