"""TRL's RewardTrainer on the same model and rows; run by `reward_vs_trl.py` with an interpreter
that has TRL.
"""

from functools import partial

from timed import parsed, train_timed
from transformers import AutoModelForSequenceClassification
from trl import RewardConfig, RewardTrainer

if __name__ == "__main__":
    args = parsed("center")
    own = {"center_rewards_coefficient": args.center}
    load = partial(AutoModelForSequenceClassification.from_pretrained, num_labels=1)
    train_timed(args, RewardTrainer, RewardConfig, ["attention_mask"], own=own, load=load)
