"""Made-up rows whose prompts and replies have chosen lengths."""

import json
import random
from pathlib import Path

LETTERS = "abcdefghijklmnopqrstuvwxyz"
VARIED = (0.25, 1.75)


def write_rows(
    path: Path,
    *,
    num_rows: int,
    prompt_words: int,
    reply_words: int,
    in_pairs: bool = True,
    seed: int = 0,
) -> Path:
    """Preference pairs, or conversations of one reply; lengths lie a quarter to seven quarters
    around those given.

    A word is random letters: about three tokens of the toy tokenizer.
    """
    rng = random.Random(seed)

    def text(num_words: int) -> str:
        count = max(1, round(num_words * rng.uniform(*VARIED)))
        return " ".join("".join(rng.choices(LETTERS, k=4)) for _ in range(count))

    with path.open("w", encoding="utf-8") as file:
        for _ in range(num_rows):
            prompt = {"role": "user", "content": text(prompt_words)}
            replies = [{"role": "assistant", "content": text(reply_words)} for _ in range(2)]
            chosen, rejected = ([prompt, reply] for reply in replies)
            row = {"chosen": chosen, "rejected": rejected} if in_pairs else {"messages": chosen}
            file.write(json.dumps(row) + "\n")
    return path
