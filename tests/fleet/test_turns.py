"""Learners and engines on the same devices, in turns: whole runs, and what dies in each phase."""

import hashlib
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from olmo_core.nn.transformer import Transformer

from open_instruct.batching.documents import pack_documents
from open_instruct.commands.export import main as export
from open_instruct.core.records import Completion, Document, Span
from open_instruct.models.build import build_model
from open_instruct.models.hf.checkpoint_files import CheckpointFiles
from open_instruct.models.hf.hf_config import load_hf_config
from open_instruct.models.hf.names import TensorNames
from open_instruct.models.load import stream_load
from open_instruct.rl.traces import read_traces
from open_instruct.training.model.forward import token_logprobs
from tests.fleet import dying_engines, dying_run
from tests.fleet.grpo_case import NUM_PROMPTS_PER_STEP, NUM_STEPS, GRPOCase, finished
from tests.ranks import programs

pytestmark = pytest.mark.extended

SHARED = {"placement": "shared", "num_learners_per_node": 2}
CPU = torch.device("cpu")
SPLIT = {"num_learners_per_node": 2, "vllm_num_engines": 2}


def digest_of(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@pytest.fixture(scope="module")
def split(variant: Callable[..., GRPOCase]) -> GRPOCase:
    case = variant(**SPLIT)
    case.run()
    return case


def test_run_that_takes_turns_is_bitwise_the_one_that_does_not(
    split: GRPOCase, variant: Callable[..., GRPOCase]
) -> None:
    case = variant(**SHARED)
    said = case.run()
    rows = case.rows()
    assert len(rows) == NUM_STEPS
    assert all(row["time/switch"] > 0 for row in rows)
    assert max(row["logprob_diff/max"] for row in rows) < 1e-4
    assert "in turns" in said
    assert digest_of(case.output_dir / "hf_model") == digest_of(split.output_dir / "hf_model")


def test_engines_and_learners_that_die_in_their_turns_are_replaced(
    split: GRPOCase, variant: Callable[..., GRPOCase], tmp_path: Path
) -> None:
    """To the very weights of a run that loses nobody and takes no turns."""
    case = variant(**SHARED, max_restarts=len(dying_engines.PHASES_OF_TURNS) + 1)
    environment = dying_engines.write_deaths(tmp_path, dying_engines.PHASES_OF_TURNS)
    process = programs.start(case.command(), environment=environment, cwd=case.output_dir.parent)
    case.when_step(2, process, lambda: os.kill(case.pids()["learners"][1], signal.SIGKILL))
    said = finished(process, exit_code=0)
    assert tuple(dying_engines.read_deaths(tmp_path)) == dying_engines.PHASES_OF_TURNS
    assert "starting the learners again from the last checkpoint" in said
    assert [row["step"] for row in case.rows()] == [*range(1, NUM_STEPS + 1)]
    assert digest_of(case.output_dir / "hf_model") == digest_of(split.output_dir / "hf_model")


def test_learner_that_dies_between_host_and_device_or_as_it_gathers_is_replaced(
    split: GRPOCase, variant: Callable[..., GRPOCase]
) -> None:
    """With some of its state moved, either way, or with a part of what its engine waits for: to the
    very losses and weights of a run that loses nobody and takes no turns.
    """
    deaths = ("return-1", "gather-2", "rest-3")
    case = variant(**SHARED, max_restarts=len(deaths))
    case = replace(case, script="../tests/fleet/dying_run.py")
    folder = case.output_dir.parent / "dying"
    environment = dying_run.environment_of(folder)
    for death in deaths:
        (folder / death).touch()
    process = programs.start(case.command(), environment=environment, cwd=case.output_dir.parent)
    said = finished(process, exit_code=0)
    assert not {*deaths} & {path.name for path in folder.iterdir()}
    for number in range(1, len(deaths) + 1):
        assert f"from the last checkpoint ({number} of {len(deaths)})" in said
    losses = [[(row["step"], row["loss"]) for row in each.rows()] for each in (case, split)]
    assert losses[0] == losses[1]
    assert digest_of(case.output_dir / "hf_model") == digest_of(split.output_dir / "hf_model")


def test_paused_completions_go_on_with_the_weights_of_their_versions(
    variant: Callable[..., GRPOCase], tmp_path: Path
) -> None:
    """Of each token, though an engine is killed in its turn: its requests begin anew elsewhere."""
    flags = {
        "async_steps": 1,
        # Replies end at a 0, some early and some late: as a turn ends with its last one, some
        # that are ahead have begun by then and not ended.
        "prompts_ahead": NUM_PROMPTS_PER_STEP,
        "vllm_max_num_seqs": 4,
        "stop_strings": ["0"],
        "response_length": 256,
        "max_restarts": 1,
        "checkpointing_steps": 1,
        "keep_last_n_checkpoints": NUM_STEPS,
    }
    case = variant(**SHARED, **flags)
    process = case.start()
    case.when_step(2, process, lambda: os.kill(case.pids()["engines"][1], signal.SIGKILL))
    said = finished(process, exit_code=0)
    assert "starting it again (1 of 1 restarts)" in said
    folders = {0: case.model}
    for version in range(1, NUM_STEPS):
        folders[version] = tmp_path / f"step{version}"
        export([str(case.output_dir / f"step{version}"), "--output_dir", str(folders[version])])
    policies = {version: load_policy(folder) for version, folder in folders.items()}
    num_mixed = 0
    for step in range(1, NUM_STEPS + 1):
        for group in read_traces(case.output_dir, step):
            for completion in group.completions:
                versions = completion.versions
                assert list(versions) == sorted(versions)
                assert {*versions} <= {step - 2, step - 1}
                num_mixed += len({*versions}) > 1
                logprobs = {
                    version: score(policies[version], group.prompt.token_ids, completion)
                    for version in {*versions}
                }
                for place, version in enumerate(versions):
                    sampled = completion.logprobs[place]
                    assert abs(logprobs[version][place] - sampled) < 1e-4
    assert num_mixed
    rows = case.rows()
    assert [row["step"] for row in rows] == [*range(1, NUM_STEPS + 1)]
    assert max(row["staleness/max"] for row in rows) == 1
    assert max(row["staleness/older_fraction"] for row in rows) > 0


def test_engines_on_other_devices_go_on_while_learners_have_their_turn(
    split: GRPOCase, variant: Callable[..., GRPOCase]
) -> None:
    """On policy to the weights of a run in which none takes turns, and else from both versions."""
    mixed = {"placement": "mixed", "num_learners_per_node": 2, "vllm_num_engines": 3}
    case = variant(**mixed)
    said = case.run()
    assert "2 learners and 3 engines, the first 2 in turns" in said
    assert len(case.rows()) == NUM_STEPS
    assert all(row["time/switch"] > 0 for row in case.rows())
    assert max(row["logprob_diff/max"] for row in case.rows()) < 1e-4
    assert digest_of(case.output_dir / "hf_model") == digest_of(split.output_dir / "hf_model")
    ahead = variant(**mixed, async_steps=1, response_length=24, max_restarts=1)
    process = ahead.start()
    ahead.when_step(2, process, lambda: os.kill(process_of(ahead, 2), signal.SIGKILL))
    finished(process, exit_code=0)
    assert [row["step"] for row in ahead.rows()] == [*range(1, NUM_STEPS + 1)]
    assert max(row["staleness/max"] for row in ahead.rows()) == 1


def process_of(case: GRPOCase, engine: int) -> int:
    pid = case.pids()["engines"][engine]
    assert isinstance(pid, int)
    return pid


def load_policy(folder: Path) -> Transformer:
    hf_config = load_hf_config(folder)
    model = build_model(hf_config)
    model.init_weights(device=CPU, max_seq_len=512)
    stream_load(model, CheckpointFiles.open(folder), TensorNames(hf_config))
    return model


@torch.no_grad()
def score(model: Transformer, prompt: tuple[int, ...], completion: Completion) -> list[float]:
    """The log-probs of a completion's tokens."""
    token_ids = (*prompt, *completion.token_ids)
    replies = (Span(start=len(prompt), stop=len(token_ids)),)
    batch = pack_documents([Document(token_ids=token_ids, responses=replies)])
    return token_logprobs(model, batch, device=CPU).logprobs_N.tolist()


def test_completions_of_later_steps_wait_for_the_learners_turn_and_go_on(
    variant: Callable[..., GRPOCase],
) -> None:
    """On ZeRO too: asynchronous steps with engines of two devices, spare prompts in flight, and
    evaluations behind turns of the learners.
    """
    flags = {
        "dataset_mixer_eval_list": [variant().prompts, "2"],
        "local_eval_every": 2,
        "async_steps": 1,
        "num_spare_prompts": 1,
        "response_length": 24,
        "vllm_tensor_parallel_size": 2,
        "backend": "deepspeed",
        "deepspeed_stage": 2,
    }
    case = variant(**SHARED, **flags)
    case.run()
    rows = case.rows()
    assert len(rows) == NUM_STEPS
    assert max(row["staleness/max"] for row in rows) == 1
    assert [row["step"] for row in rows if "eval/reward" in row] == [2, 4]
    assert all(row["time/switch"] > 0 for row in rows)
