"""What the engine is asked: random ids of a tiny model, questions of a real one."""

import random
from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from agreement.engine import LONGEST_PROMPT

Prompt = tuple[int, ...]
DrawPrompt = Callable[[random.Random], Prompt]


def random_prompts(vocab_size: int) -> DrawPrompt:
    def draw(rng: random.Random) -> Prompt:
        return tuple(rng.randrange(vocab_size) for _ in range(rng.randint(1, LONGEST_PROMPT)))

    return draw


def questions_as_prompts(questions: Path, *, model: Path) -> DrawPrompt:
    """The lines of a file, each as a user's turn in the model's own template.

    Raises:
        ValueError: every prompt is longer than `LONGEST_PROMPT` tokens.
    """
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    prompts: list[Prompt] = []
    for line in questions.read_text().splitlines():
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": line}], tokenize=False, add_generation_prompt=True
        )
        prompts.append(tuple(tokenizer.encode(text, add_special_tokens=False)))
    short = [prompt for prompt in prompts if len(prompt) <= LONGEST_PROMPT]
    if not short:
        raise ValueError(f"{questions}: no line has {LONGEST_PROMPT} tokens or fewer as a prompt")
    return lambda rng: rng.choice(short)
