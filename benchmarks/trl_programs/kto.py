"""TRL's KTOTrainer on the same model and rows; run by `kto_vs_trl.py` with an interpreter that has
TRL.

Real tokens are those of the replies that are learned and of the mismatched ones.
"""

from timed import parsed, train_timed
from trl import KTOConfig, KTOTrainer

if __name__ == "__main__":
    args = parsed("beta")
    # Its mismatched replies are those of neighbours, so it reads rows in their order.
    own = {
        "beta": args.beta,
        "precompute_ref_log_probs": True,
        "train_sampling_strategy": "sequential",
    }
    train_timed(args, KTOTrainer, KTOConfig, ["attention_mask", "KL_attention_mask"], own=own)
