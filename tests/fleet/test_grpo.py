"""Whole runs of GRPO: real Ray, real learners over gloo, a real vLLM engine, one command each."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from open_instruct.cluster.watchdog import SHARED_MEMORY
from open_instruct.rollout.traces import read_traces
from open_instruct.verifiers.reward_models import RewardModel
from tests.fleet import dying_run
from tests.fleet.grpo_case import (
    NUM_PROMPTS_PER_STEP,
    NUM_SAMPLES_PER_PROMPT,
    NUM_STEPS,
    GRPOCase,
    Process,
    assert_no_process_left,
    finished,
    marked,
    write_prompts,
)
from tests.ranks import programs
from tests.ranks.fork_server import REPOSITORY
from tests.ranks.shallow import write_shallow_model
from tests.waiting import eventually

# What scripts read; see README.
EVERY_STEP = {
    *("step", "loss", "reward", "verifier/digits", "kl", "clip_fraction", "rho/mean", "rho/max", "grad_norm", "lr"),
    *("logprob_diff/mean", "logprob_diff/max", "staleness/mean", "sequence_length/mean", "truncated_fraction"),
    *("zero_std_fraction", "num_tokens", "time/generate", "time/train", "time/sync", "time/step"),
}
# Nothing in it depends on the clock.
TIMED = ("time/", "tokens_per_second", "peak_memory")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> GRPOCase:
    folder = tmp_path_factory.mktemp("grpo")
    model = write_shallow_model(folder / "model", family="olmo2", is_narrow=False)
    return GRPOCase(
        model=model,
        prompts=write_prompts(folder / "prompts.jsonl", 6),
        output_dir=folder / "out",
        flags={"checkpointing_steps": 2},
    )


@pytest.fixture(scope="module")
def variant(base: GRPOCase, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., GRPOCase]:
    def make(**flags: Any) -> GRPOCase:
        return replace(base, output_dir=tmp_path_factory.mktemp("run") / "out", flags=base.flags | flags)

    return make


@pytest.fixture(scope="module")
def undisturbed(variant: Callable[..., GRPOCase]) -> GRPOCase:
    """On-policy, two learners: what disturbed runs are compared with."""
    case = variant(
        num_learners_per_node=2,
        dataset_mixer_eval_list=[variant().prompts, "2"],
        local_eval_every=2,
    )
    case.run()
    return case


def weights(case: GRPOCase) -> dict[str, torch.Tensor]:
    return load_file(case.output_dir / "hf_model" / "model.safetensors")


def untimed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if not name.startswith(TIMED)} for row in rows]


def test_engines_and_learners_agree_on_experts(variant: Callable[..., GRPOCase], tmp_path: Path) -> None:
    """Their sizes are those of vLLM's kernel on a CPU, in which they lie in another order."""
    model = write_shallow_model(tmp_path / "model", family="qwen3_moe", is_narrow=False)
    case = variant(model_name_or_path=model, num_learners_per_node=2, total_episodes=3 * 8)
    case.run()
    rows = case.rows()
    assert len(rows) == 3 and all(row["grad_norm"] > 0 for row in rows)
    assert max(row["logprob_diff/max"] for row in rows) < 1e-4
    assert all(1 < row["router/max_load"] < 4 for row in rows)


def test_replayed_experts_bring_learners_closer_to_engines_that_round(
    variant: Callable[..., GRPOCase], tmp_path: Path
) -> None:
    """The same completions of the same weights, with the engine's choice of experts and, where the step is taken again,
    with the learner's own."""
    model = write_shallow_model(tmp_path / "model", family="qwen3_moe", is_narrow=False)
    flags = {"vllm_dtype": "bfloat16", "routing_replay": "on", "total_episodes": 8, "response_length": 24}
    case = variant(model_name_or_path=model, **flags)
    case.run()
    words = [str(REPOSITORY / "open_instruct" / "cli.py"), "replay", str(case.output_dir), "--step", "1"]
    again = programs.start([*words, "--json", str(tmp_path / "again.json")], cwd=tmp_path)
    assert "here the learner chooses its own" in finished(again, exit_code=0)
    own: dict[str, float] = json.loads((tmp_path / "again.json").read_text())["recomputed"]
    (replayed,) = case.rows()
    assert "router/replayed" not in own
    assert replayed["router/replayed"] > 0.9 and replayed["router/differing"] < 0.1
    assert all(replayed[f"logprob_diff/{of}"] <= own[f"logprob_diff/{of}"] for of in ("mean", "max"))


def test_what_a_run_leaves_behind(undisturbed: GRPOCase) -> None:
    rows = undisturbed.rows()
    assert [row["step"] for row in rows] == list(range(1, NUM_STEPS + 1))
    assert all(set(row) >= EVERY_STEP for row in rows)
    assert all(row["reward"] == row["verifier/digits"] > 0 for row in rows)
    assert all(row["grad_norm"] > 0 for row in rows)
    assert [("eval/reward" in row, "eval/pass_at_1" in row) for row in rows] == [(False,) * 2, (True,) * 2] * 2
    out = undisturbed.output_dir
    assert {path.name for path in out.iterdir()} >= {"config.yaml", "layout.json", "run.log", "hf_model", "step4"}
    assert not (out / "pids.json").exists()
    assert json.loads((out / "layout.json").read_text())["shard_degree"] == 2


def test_a_run_that_has_ended_is_exported_again(undisturbed: GRPOCase) -> None:
    before = weights(undisturbed)
    shutil.rmtree(undisturbed.output_dir / "hf_model")
    undisturbed.run()
    after = weights(undisturbed)
    assert before.keys() == after.keys() and all(torch.equal(after[name], before[name]) for name in before)


def test_engines_and_learners_agree_after_every_sync(undisturbed: GRPOCase) -> None:
    assert max(row["logprob_diff/max"] for row in undisturbed.rows()) < 1e-4
    assert all(row["staleness/max"] == 0 for row in undisturbed.rows())


def test_engines_get_what_adapters_add(variant: Callable[..., GRPOCase]) -> None:
    """Added to a base of 4 bits, which is another policy than the start model that engines begin with; or alone. From
    the first completion on, also where a run begins with an adapter, which the engines' start model has not."""
    flags = {"use_lora": "true", "learning_rate": "5e-3", "beta": 0.05}
    case = variant(num_learners_per_node=2, use_qlora="true", **flags)
    case.run()
    rows = case.rows()
    assert all(row["grad_norm"] > 0 for row in rows)
    assert max(row["logprob_diff/max"] for row in rows) < 1e-4
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-6) and rows[-1]["kl"] > 1e-5
    again = variant(
        **flags,
        adapter_name_or_path=case.output_dir / "adapter",
        lora_sync="adapter",
        total_episodes=16,
        dataset_mixer_eval_list=[variant().prompts, "2"],
    )
    again.run()
    rows = again.rows()
    assert len(rows) == 2 and "eval/reward" in rows[-1]
    assert max(row["logprob_diff/max"] for row in rows) < 1e-4 and rows[0]["kl"] > 1e-5


def test_traces_hold_the_version_of_every_token(undisturbed: GRPOCase) -> None:
    """Those that a run keeps without a flag."""
    for step in range(1, NUM_STEPS + 1):
        versions = {
            version
            for group in read_traces(undisturbed.output_dir, step)
            for completion in group.completions
            for version in completion.versions
        }
        assert versions == {step - 1}


def test_learners_on_nodes_of_two_sizes(variant: Callable[..., GRPOCase]) -> None:
    """Their sizes reach the layout as they are, and new weights reach completions that are being generated."""
    case = variant(num_learners_per_node=[1, 2], async_steps=1, num_mini_batches=2, vllm_num_engines=2)
    case.run()
    layout = json.loads((case.output_dir / "layout.json").read_text())
    assert layout["gpus_per_node"] == [1, 2] and layout["shard_groups"] == [[0], [1], [2]]
    rows = case.rows()
    assert len(rows) == NUM_STEPS
    assert max(row["staleness/max"] for row in rows) == 1


def test_an_engine_of_two_devices(
    variant: Callable[..., GRPOCase], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its processes keep outside themselves, in ways of vLLM's own, is not there any more in the end."""

    def shared() -> set[str]:
        names = {path.name for path in SHARED_MEMORY.iterdir()}
        return {name for name in names if name.startswith(("psm_", "sem.mp-", "vllm_"))}

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    before = shared()
    case = variant(vllm_tensor_parallel_size=2, param_dtype="bfloat16", total_episodes=8)
    process = case.start()
    while_it_ran: set[str] = set()
    case.when_step(1, process, lambda: while_it_ran.update(shared()))
    finished(process, exit_code=0)
    own = while_it_ran - before
    assert own
    deadline_s = time.monotonic() + 30  # a test beside this one may keep such things too, for a moment
    while own & shared() and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert not own & shared()
    assert not list(tmp_path.glob("vllm_*"))


@pytest.fixture(scope="module")
def reward_model(base: GRPOCase) -> Path:
    """Made of a few pairs by the command that its users give."""
    folder, digits, letters = base.output_dir.parent, "4 5 6", "a b c"
    turns = [{"role": "user", "content": "Number?"}]
    pair = {
        name: [*turns, {"role": "assistant", "content": text}]
        for name, text in (("chosen", digits), ("rejected", letters))
    }
    (folder / "pairs.jsonl").write_text(f"{json.dumps(pair)}\n" * 4)
    flags = {"model_name_or_path": base.model, "mixer_list": "pairs.jsonl 1.0", "output_dir": folder / "rewards"}
    flags |= {"max_train_steps": 2, "per_device_train_batch_size": 2, "max_seq_length": 64, "param_dtype": "float32"}
    words = [word for name, value in flags.items() for word in (f"--{name}", *str(value).split())]
    script = str(REPOSITORY / "open_instruct" / "reward_model.py")
    finished(programs.start([script, *words], environment={"PYTHONPATH": str(REPOSITORY)}, cwd=folder), exit_code=0)
    return folder / "rewards" / "hf_model"


def test_one_device_for_learner_and_engine(
    variant: Callable[..., GRPOCase], reward_model: Path, tmp_path: Path
) -> None:
    """A reward model judges too, a reference policy stands beside, and every step learns from conversations as well.

    Completions are finished before weights change, so that each is of one version.
    """
    chats = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "Number?"}, {"role": "assistant", "content": "4 5 6"}]
    chats.write_text(f"{json.dumps({'messages': turns})}\n" * 3)
    case = variant(
        single_gpu_mode="true",
        weight_sync_backend="gloo",
        async_steps=1,
        inflight_updates="false",
        beta=0.1,
        verifier=["tests.fleet.grpo_case:ShareOfDigits", f"reward_model:{reward_model}"],
        num_verifier_processes=1,
        verifier_timeout_s=60,
        dataset_mixer_list=[write_prompts(tmp_path / "prompts.jsonl", 6, verifiers=["digits", "reward_model"]), "1.0"],
        sft_mixer_list=[chats, "1.0"],
        sft_rows_per_step=2,
        save_traces="true",
    )
    case.run()
    rows = case.rows()
    assert len(rows) == NUM_STEPS
    assert rows[0]["kl"] == 0 and rows[-1]["kl"] > 0
    assert rows[-1]["ce"] < rows[0]["ce"]
    assert all(row["num_verifier_problems"] == 0 for row in rows)
    judge = RewardModel(str(reward_model))
    judge.load()
    for step in range(1, NUM_STEPS + 1):
        for group in read_traces(case.output_dir, step):
            assert all(len(set(completion.versions)) == 1 for completion in group.completions)
    for group in read_traces(case.output_dir, NUM_STEPS):
        for completion, verdict in zip(group.completions, group.verdicts, strict=True):
            said = judge.judge(group.prompt.text, completion.text, None, is_truncated=completion.is_truncated)
            assert verdict.scores["reward_model"] == pytest.approx(said, abs=1e-4)
            assert verdict.reward == pytest.approx((verdict.scores["digits"] + said) / 2, abs=1e-4)


def test_a_critic_learns_beside_the_policy(variant: Callable[..., GRPOCase], reward_model: Path) -> None:
    """It starts from a reward model, learns alone in the first step, and makes advantages of groups of one."""
    flags = {"critic_model_name_or_path": reward_model, "critic_learning_rate": "1e-3", "critic_warmup_steps": 1}
    sizes = {"num_unique_prompts_rollout": 4, "num_samples_per_prompt_rollout": 1, "total_episodes": 12}
    case = variant(advantages="gae", num_learners_per_node=2, checkpointing_steps=3, **flags, **sizes)
    case.run()
    first, *others = case.rows()
    assert len(others) == 2 and "policy_loss" not in first and "zero_std_fraction" not in first
    assert all(row["grad_norm"] > 0 and row["logprob_diff/max"] < 1e-4 for row in others)
    assert all(row["critic/grad_norm"] > 0 for row in (first, *others))
    before, after = (load_file(folder / "model.safetensors") for folder in (reward_model, case.output_dir / "critic"))
    assert before.keys() == after.keys() and not torch.equal(before["score.weight"], after["score.weight"])
    critic: Any = AutoModelForSequenceClassification
    assert critic.from_pretrained(case.output_dir / "critic").score.weight.shape[0] == 1
    without = sizes | {"num_unique_prompts_rollout": 2, "num_samples_per_prompt_rollout": 2}
    other = replace(case, flags=variant(num_learners_per_node=2, **without).flags)
    assert "--advantage_normalization_type" in finished(other.start(), exit_code=2)


def test_a_verifier_that_always_raises_ends_the_run(variant: Callable[..., GRPOCase]) -> None:
    case = variant(verifier="broken.py:Broken")
    (case.output_dir.parent / "broken.py").write_text(
        "from open_instruct.verifiers.verifier import Verifier\n"
        "class Broken(Verifier):\n"
        "    name = 'digits'\n"
        "    def score(self, completion, ground_truth):\n"
        "        return completion.digits\n"
    )
    said = finished(case.start(), exit_code=1)
    for text in (said, (case.output_dir / "run.log").read_text()):
        assert text.count("return completion.digits") == 1
        assert "the verifier digits: AttributeError: 'str' object has no attribute 'digits'" in text
    assert f"all {NUM_PROMPTS_PER_STEP * NUM_SAMPLES_PER_PROMPT} verdicts of a step failed" in said
    assert not case.rows()


def assert_same_weights(ours: GRPOCase, theirs: GRPOCase) -> None:
    for name, tensor in weights(theirs).items():
        assert torch.equal(tensor, weights(ours)[name]), name


def test_killed_engines_and_a_killed_learner_are_replaced(
    variant: Callable[..., GRPOCase], undisturbed: GRPOCase
) -> None:
    """The learner from the last checkpoint, with the new engine, to the very weights of an undisturbed run.

    Engines are sent what has changed of the weights, and whole weights where one of both is new. Through a folder an
    engine dies as it reads a version, and another one, a moment later in another version, as it puts it in place.
    """
    case = variant(num_learners_per_node=2, checkpointing_steps=2, weight_sync="delta", weight_sync_backend="files")
    process = case.start()
    folder = case.output_dir / "weight_sync"
    killed: list[int] = []

    def wait_for_version(version: int) -> None:
        eventually(lambda: list(folder.glob(f"*-{version}.json")), what=f"no link of version {version}")

    def kill_engine() -> None:
        # Beside it all: another run in the folder is refused, also while this one is frozen.
        os.kill(process.pid, signal.SIGSTOP)
        try:
            assert f"in use by process {process.pid} on" in finished(case.start(), exit_code=2)
        finally:
            os.kill(process.pid, signal.SIGCONT)
        wait_for_version(2)
        os.kill(case.pids()["engines"][0], signal.SIGKILL)

    def kill_learner() -> None:
        killed.append(case.pids()["learners"][1])
        os.kill(killed[0], signal.SIGKILL)

    case.when_step(1, process, kill_engine)
    case.when_step(3, process, kill_learner)
    wait_for_version(4)
    time.sleep(0.05)
    os.kill(case.pids()["engines"][0], signal.SIGKILL)
    said = finished(process, exit_code=0)
    assert not folder.exists()
    assert "engine 0 was lost" in said and "starting it again (1 of 3 restarts)" in said
    assert f"learner rank 1 (node 127.0.0.1, pid {killed[0]})" in said
    assert "starting the learners again from the last checkpoint (1 of 3)" in said
    steps = list(range(1, NUM_STEPS + 1))
    assert [row["step"] for row in case.rows()] == steps
    assert_same_weights(case, undisturbed)
    assert {path.name for path in (case.output_dir / "traces").iterdir()} == {f"step{step}.parquet" for step in steps}
    for step in steps:  # some of them were taken twice
        assert token_ids_of(case, step) == token_ids_of(undisturbed, step)
        assert case.rows()[step - 1]["reward"] == undisturbed.rows()[step - 1]["reward"]


def test_whoever_dies_in_a_phase_of_a_weight_sync_is_replaced(
    variant: Callable[..., GRPOCase], undisturbed: GRPOCase
) -> None:
    """Engines and learners, each in the middle of taking, comparing, loading or sending changes, one version after the
    other: to the very weights of an undisturbed run."""
    case = variant(num_learners_per_node=2, weight_sync="delta", weight_sync_backend="gloo")
    case = replace(case, script="../tests/fleet/dying_run.py")
    folder = case.output_dir.parent / "dying"
    environment = dying_run.environment_of(folder)
    deaths = ("stage-2", "compare-3", "apply-3", "send-4")
    for death in deaths:
        (folder / death).touch()
    process = programs.start(case.command(), environment=environment, cwd=case.output_dir.parent)
    said = finished(process, exit_code=0)
    assert not {*deaths} & {path.name for path in folder.iterdir()}
    assert "engine 0 was lost" in said and "starting it again (2 of 3 restarts)" in said
    assert "learner rank 1 (node 127.0.0.1" in said and "learner rank 0 (node 127.0.0.1" in said
    assert "starting the learners again from the last checkpoint (2 of 3)" in said
    assert [row["step"] for row in case.rows()] == list(range(1, NUM_STEPS + 1))
    assert_same_weights(case, undisturbed)
    for step in range(1, NUM_STEPS + 1):
        assert token_ids_of(case, step) == token_ids_of(undisturbed, step)


def token_ids_of(case: GRPOCase, step: int) -> list[tuple[int, ...]]:
    groups = read_traces(case.output_dir, step)
    return [completion.token_ids for group in groups for completion in group.completions]


def assert_same_steps(ours: GRPOCase, theirs: GRPOCase) -> None:
    # The last step's tokens are of the third version that learners have sent.
    assert max(row["logprob_diff/max"] for row in ours.rows()) < 1e-4
    for our, their in zip(ours.rows(), theirs.rows(), strict=True):
        assert our["reward"] == their["reward"]
        assert our["loss"] == pytest.approx(their["loss"], abs=1e-6)
        assert our["grad_norm"] == pytest.approx(their["grad_norm"], rel=1e-4)


def test_learners_on_deepspeed_take_the_same_steps_and_are_replaced(
    variant: Callable[..., GRPOCase], undisturbed: GRPOCase
) -> None:
    """Under ZeRO-3: one is killed, all start again from the last checkpoint, and engines get what they have trained.

    Through shared memory, over which an engine is lost too.
    """
    flags = {"deepspeed_stage": 3, "weight_sync": "delta", "weight_sync_backend": "shm"}
    case = replace(variant(num_learners_per_node=2, **flags), script="grpo_fast.py")
    process = case.start()
    case.when_step(1, process, lambda: os.kill(case.pids()["engines"][0], signal.SIGKILL))
    case.when_step(3, process, lambda: os.kill(case.pids()["learners"][1], signal.SIGKILL))
    said = finished(process, exit_code=0)
    assert (
        "2 learners: DeepSpeed ZeRO-3" in said
        and "starting the learners again from the last checkpoint (1 of 3)" in said
    )
    assert "engine 0 was lost" in said and "starting it again (1 of 3 restarts)" in said
    assert "command: grpo\n" in (case.output_dir / "config.yaml").read_text()
    rows = case.rows()
    assert [row["step"] for row in rows] == list(range(1, NUM_STEPS + 1))
    assert_same_steps(case, undisturbed)
    for name, tensor in weights(undisturbed).items():
        torch.testing.assert_close(weights(case)[name], tensor, rtol=0, atol=1e-4)


def test_a_terminated_run_saves_and_resumes(variant: Callable[..., GRPOCase], undisturbed: GRPOCase) -> None:
    case = variant(num_learners_per_node=2, checkpointing_steps=100, weight_sync="delta", weight_sync_backend="gloo")
    process = case.start()
    case.when_step(1, process, lambda: stop_all(process))
    said = finished(process, exit_code=143)
    assert "SIGTERM: stopped after step" in said.splitlines()[-1]
    assert_nothing_left(case, process)

    said = case.run()
    assert "resuming after step" in said
    assert untimed(case.rows())[-1]["reward"] == untimed(undisturbed.rows())[-1]["reward"]
    assert_same_weights(case, undisturbed)


@pytest.mark.parametrize(
    ("words", "number", "last_words", "exit_code"),
    [
        ("prompts: ", signal.SIGHUP, "SIGHUP while ", 129),
        ("load their libraries", signal.SIGTERM, "SIGTERM while starting learners and engines", 143),
    ],
    ids=["reading", "starting"],
)
def test_a_run_that_is_stopped_while_it_starts_leaves_nothing(
    variant: Callable[..., GRPOCase], words: str, number: int, last_words: str, exit_code: int
) -> None:
    case = variant(num_learners_per_node=2)
    process = case.start()
    when_logged(case, process, words)
    os.killpg(process.pid, number)
    said = finished(process, exit_code=exit_code)
    assert last_words in said.splitlines()[-1]
    assert "There is no checkpoint yet" in said.splitlines()[-1]
    assert "Traceback" not in said
    assert_nothing_left(case, process)


def when_logged(case: GRPOCase, process: Process, words: str) -> None:
    log = case.output_dir / "run.log"
    deadline_s = time.monotonic() + 120
    while not (log.exists() and words in log.read_text()):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline_s, "it did not get that far"
        time.sleep(0.01)


def stop_all(process: Process) -> None:
    """As systemd and job schedulers do, which signal whatever a run has started, in whichever session."""
    pids = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
    for pid in {*pids, *marked(process)}:
        os.kill(pid, signal.SIGTERM)


def assert_nothing_left(case: GRPOCase, process: Process) -> None:
    assert not (case.output_dir / "run.lease").exists()
    assert not (case.output_dir / "pids.json").exists()
    assert_no_process_left(process)


def test_a_hangup_of_the_terminal_ends_the_run_behind_a_checkpoint(variant: Callable[..., GRPOCase]) -> None:
    """The whole group is told of it, and twice."""
    case = variant(checkpointing_steps=100, total_episodes=8000)
    process = case.start()
    case.when_step(1, process, lambda: os.killpg(process.pid, signal.SIGHUP))
    os.killpg(process.pid, signal.SIGHUP)
    said = finished(process, exit_code=129)
    step = len(case.rows())
    assert said.splitlines()[-1].startswith(f"SIGHUP: stopped after step {step}; "), said
    assert (case.output_dir / f"step{step}" / "checkpoint.json").exists()
    assert_nothing_left(case, process)


def test_a_ray_that_dies_ends_the_run_at_once_in_a_sentence(variant: Callable[..., GRPOCase]) -> None:
    case = variant()
    process = case.start()
    when_logged(case, process, "load their libraries")
    (server,) = [pid for pid in marked(process) if "gcs_server" in Path(f"/proc/{pid}/comm").read_text()]
    os.kill(server, signal.SIGKILL)
    said = finished(process, exit_code=1)
    assert "the run's own Ray was killed or crashed while starting" in said.splitlines()[-1], said
    assert "the same command, given again, starts from the beginning" in said.splitlines()[-1]
    assert_nothing_left(case, process)
