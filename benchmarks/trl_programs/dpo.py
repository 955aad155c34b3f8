"""TRL's DPOTrainer on the same model and rows; run by the programs above with an interpreter that has TRL."""

import importlib

from timed import parsed, train_timed
from trl import DPOConfig, DPOTrainer

if __name__ == "__main__":
    args = parsed("beta")
    frozen = {"beta": args.beta, "precompute_ref_log_probs": True}
    adapters = {}
    if args.lora_r is not None:
        lora_config = importlib.import_module("peft").LoraConfig
        adapters["peft_config"] = lora_config(
            r=args.lora_r, lora_alpha=2 * args.lora_r, target_modules="all-linear", task_type="CAUSAL_LM"
        )
    train_timed(args, DPOTrainer, DPOConfig, ["attention_mask"], own=frozen, **adapters)
