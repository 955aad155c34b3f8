"""A reward that random weights earn some of, so that every step has something to learn."""


def share_of_digits(completions: list[str]) -> list[float]:
    return [
        sum(character.isdigit() for character in text) / max(len(text), 1) for text in completions
    ]
