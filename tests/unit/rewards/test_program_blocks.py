"""Programs in completions: where a block begins and ends, and what a test compares."""

import pytest

from open_instruct.rewards.code import find_program, split_assertion

PROGRAM = "def f():\n    return 3\n"
DOCSTRING = "def f():\n    '''Adds.\n\n    ```\n    f()\n    ```\n    '''\n    return 3\n"


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        (f"```python\n{PROGRAM}```", PROGRAM),
        (f"So:\n```python\n{DOCSTRING}```\nDone, ```x``` is not needed.", DOCSTRING),
        (f"````python\n{DOCSTRING}````", DOCSTRING),
        (f"```python\n{PROGRAM}", PROGRAM),
        (f"~~~python\n{PROGRAM}~~~", PROGRAM),
        (f"~~~\n{PROGRAM}~~~\n", PROGRAM),
        (
            (
                "1. First\n   ```python\n   "
                f"{PROGRAM.replace(chr(10), chr(10) + '   ').rstrip()}\n   ```"
            ),
            PROGRAM,
        ),
        (f"```python\nx = 1\n```\nor\n```python\n{PROGRAM}```\nPrints:\n```\n3\n```", PROGRAM),
        (f"```python\n{PROGRAM}```\n```bash\npython x.py\n```", PROGRAM),
        (f'```python title="f.py"\n{PROGRAM}```', PROGRAM),
        (f"<answer>\n{PROGRAM.rstrip()}\n</answer>", PROGRAM.rstrip()),
        (PROGRAM, PROGRAM),
        ("```python\nx = ~~~1\n```", "x = ~~~1\n"),
    ],
)
def test_the_last_block_of_python_is_the_program(completion: str, program: str) -> None:
    assert find_program(completion).strip() == program.strip()


@pytest.mark.parametrize(
    ("test", "call", "literal"),
    [
        ("assert f(1) == 3", "f(1)", "3"),
        ("assert 3 == f(1)", "f(1)", "3"),
        ("assert (-1, 'x') == (f(1))", "f(1)", "(-1, 'x')"),
        ("assert f(1) == f(2)", "assert f(1) == f(2)", ""),
        ("assert 1 < f(1)", "assert 1 < f(1)", ""),
    ],
)
def test_only_the_call_of_a_test_is_run(test: str, call: str, literal: str) -> None:
    assert split_assertion(test) == (call, literal)
