"""How long the page of a run with 10,000 saved rollouts takes to make, and how large it is. Exit
code 1 above 5 s.

python benchmarks/report_page.py --num_rollouts 10240 --mean_tokens 340
"""

import json
import math
import random
import sys
import tempfile
import time
from pathlib import Path

from harness.program import parser_of

from open_instruct.config.rollout_sections import RolloutSection
from open_instruct.core.records import Check, Completion, Prompt, RolloutGroup, Verdict
from open_instruct.report.page import report_page
from open_instruct.rl.samples import RolloutStepBatch, training_samples
from open_instruct.rl.traces import write_traces

BOUND_S = 5.0
GROUP_SIZE, GROUPS_OF_A_STEP = 8, 32
VOCABULARY = 150_000
LETTERS = "abcdefghijklmno "


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--num_rollouts", type=int, default=10_240)
    parser.add_argument("--mean_tokens", type=int, default=340)
    args = parser.parse_args()
    chance = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        num_steps = -(-args.num_rollouts // (GROUP_SIZE * GROUPS_OF_A_STEP))
        rows = [
            {"step": step, "reward": chance.random(), "time/step": 1.0}
            for step in range(1, num_steps + 1)
        ]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        for step in range(1, num_steps + 1):
            groups = tuple(
                _group(chance, step, index, args.mean_tokens) for index in range(GROUPS_OF_A_STEP)
            )
            batch = RolloutStepBatch(groups=groups)
            write_traces(
                run, step, batch, training_samples(batch, config=RolloutSection(), version=step - 1)
            )
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        page = report_page([run], max_rollouts=args.num_rollouts)
        took_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    print(
        f"{args.num_rollouts:,} rollouts: {took_s:.2f} s ({cpu_s:.2f} s of one core), "
        f"{len(page) / 1e6:.1f} MB"
    )
    print(f"at most {BOUND_S:g} s: {'yes' if took_s <= BOUND_S else 'no'}")
    return int(took_s > BOUND_S)


def _group(chance: random.Random, step: int, index: int, mean_tokens: int) -> RolloutGroup:
    def completion(sample: int) -> Completion:
        num_tokens = max(1, int(chance.lognormvariate(math.log(mean_tokens) - 0.125, 0.5)))
        return Completion(
            token_ids=tuple(chance.choices(range(VOCABULARY), k=num_tokens)),
            logprobs=tuple(-chance.expovariate(2.5) for _ in range(num_tokens)),
            versions=(step - 1,) * num_tokens,
            text="".join(chance.choices(LETTERS, k=4 * num_tokens)),
            finish_reason="stop",
            seed=sample,
        )

    rewards = [float(chance.random() < 0.5) for _ in range(GROUP_SIZE)]
    return RolloutGroup(
        ticket=step * GROUPS_OF_A_STEP + index,
        prompt=Prompt(
            row_id=index,
            token_ids=(1, 2),
            text="<|user|>\nWhat?\n",
            checks=(Check(verifier="math", ground_truth="4"),),
        ),
        completions=tuple(map(completion, range(GROUP_SIZE))),
        verdicts=tuple(Verdict(reward=reward, scores={"math": reward}) for reward in rewards),
    )


if __name__ == "__main__":
    sys.exit(main())
