"""What a refusal carries beside its words: the kind of problem, its flag, and what would work."""

import pickle

import pytest

from open_instruct.commands.run_flags import parse_run
from open_instruct.config.validation import refuse
from open_instruct.core.errors import InputError, Problem, problems_of_kind
from open_instruct.objectives.dpo import DPO, DPOConfig

NEEDED = [
    "--model_name_or_path",
    "model",
    "--mixer_list",
    "rows.jsonl",
    "1.0",
    "--output_dir",
    "run",
]


def refusal_of(*words: str) -> InputError:
    with pytest.raises(InputError) as caught:
        DPO.validate(parse_run(DPOConfig, [*NEEDED, *words]))
    return caught.value


@pytest.mark.parametrize(
    ("text", "flag", "remedy"),
    [
        ("--beta 0: must be above 0", "beta", "must be above 0"),
        ("--offload cannot go with --single_gpu_mode; leave one out", "offload", "leave one out"),
        ("rows.jsonl has no rows. Give another file", None, "Give another file"),
        ("a--b is no flag", None, None),
        ("several things:\n  a: 1\nGive --output_dir anew", "output_dir", "Give --output_dir anew"),
    ],
)
def test_problem_reads_flag_and_remedy_from_its_sentence(
    text: str, flag: str | None, remedy: str | None
) -> None:
    problem = Problem(text)

    assert (problem, problem.flag, problem.remedy, problem.kind) == (text, flag, remedy, "input")


def test_problem_keeps_what_it_carries_when_wrapped_again() -> None:
    problem = Problem("sentence", kind="conflict", flag="beta", remedy="leave it out")

    error = InputError(problem)

    assert (error.kind, error.flag, error.remedy) == ("conflict", "beta", "leave it out")


def test_input_error_keeps_its_problems_when_it_crosses_processes() -> None:
    error = InputError("--beta 0: use 1", kind="out_of_range")

    copy = pickle.loads(pickle.dumps(error))

    assert str(copy) == str(error)
    assert [(each, each.kind, each.flag, each.remedy) for each in copy.problems] == [
        ("--beta 0: use 1", "out_of_range", "beta", "use 1")
    ]


def test_refuse_lists_problems_with_the_kind_of_the_function_that_found_them() -> None:
    @problems_of_kind("conflict")
    def find_problems() -> list[str]:
        return ["--a and --b: leave one out", Problem("--c is empty", kind="bad_value")]

    with pytest.raises(InputError) as caught:
        refuse(find_problems())

    assert [each.kind for each in caught.value.problems] == ["conflict", "bad_value"]
    assert str(caught.value) == "--a and --b: leave one out\n--c is empty"


@pytest.mark.parametrize(
    ("words", "kind", "flag"),
    [
        (["--lerning_rate", "1"], "unknown_flag", "lerning_rate"),
        (["--beta", "high"], "bad_value", "beta"),
        (["--beta", "1", "2"], "stray_word", "beta"),
        (["--beta", "0.1", "--beta", "0.2"], "repeated_flag", "beta"),
        (["--learning-rate", "-1"], "out_of_range", "learning_rate"),
        (["--lora_r", "8"], "unread_flag", "lora_r"),
        (["--use_lora", "--optimizer", "muon"], "conflict", "optimizer"),
    ],
)
def test_refused_flag_has_kind_and_name(words: list[str], kind: str, flag: str) -> None:
    error = refusal_of(*words)

    assert (error.kind, error.flag) == (kind, flag)
    assert error.remedy
