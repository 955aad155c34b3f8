"""`open-instruct chat`: what it says is what the model says, in the words it was trained with, and it ends cleanly."""

import io
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from open_instruct.chat.command import answer_one, converse
from open_instruct.chat.folder import TalkingFolder, talking_folder
from open_instruct.cli import main
from open_instruct.data.chat import ChatFormat
from open_instruct.models.fingerprint import weights_fingerprint
from open_instruct.models.hf.checkpoint_files import CheckpointFiles
from open_instruct.models.lora.files import BASE_FINGERPRINT
from open_instruct.parallel import peers
from open_instruct.toys.tiny import write_tiny_model

QUESTION = "What is\n2 + 2?"
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As an export lies in a run's folder, with a template that is not the tokenizer's own."""
    folder = write_tiny_model(tmp_path_factory.mktemp("run") / "hf_model", family="olmo2")
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.role }} said {{ message.content }}{{ eos_token }}{% endfor %}answer:"
    )
    # Of an engine's own settings: none of it is to count.
    (folder / "generation_config.json").write_text('{"repetition_penalty": 9.0, "max_new_tokens": 1}')
    return folder


def likeliest(folder: Path, prompt: str) -> str:
    """What follows on `prompt`, token by token, each time from the whole text."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    start = len(ids)
    with torch.no_grad():
        for _ in range(NUM_TOKENS):
            ids.append(network(torch.tensor([ids])).logits[0, -1].argmax().item())
            if ids[-1] == tokenizer.eos_token_id:
                break
    text: str = tokenizer.decode(ids[start:], skip_special_tokens=True)
    return text


Ask = Callable[..., tuple[int, str, str]]


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ask:
    """The command with these words, and a question through a pipe: exit code, stdout and stderr."""

    def run(*words: str, stdin: str = QUESTION) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = main(["chat", *words, "--temperature", "0", "--max_tokens", str(NUM_TOKENS)])
        return code, *capsys.readouterr()

    return run


def test_a_pipe_is_one_question_in_the_exports_own_words(model: Path, ask: Ask) -> None:
    code, out, _ = ask(str(model.parent), "--system_prompt", "Be brief.")
    eos = AutoTokenizer.from_pretrained(model).eos_token
    said = likeliest(model, f"system said Be brief.{eos}user said {QUESTION}{eos}answer:")
    assert (code, out) == (0, said + "\n")
    assert len(said) > 3


def write_adapter(folder: Path, model: Path, *, base: str | Path, **header: str) -> dict[str, torch.Tensor]:
    """Of `model`, as the files have it; `base` is what they name."""
    fields = json.loads((model / "config.json").read_text())
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["down_proj"], "base_model_name_or_path": str(base)}
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **settings}))
    generator = torch.Generator().manual_seed(1)
    sizes = {"lora_A": (4, fields["intermediate_size"]), "lora_B": (fields["hidden_size"], 4)}
    matrices = {
        f"base_model.model.model.layers.{layer}.mlp.down_proj.{name}.weight": torch.randn(size, generator=generator)
        for layer in range(fields["num_hidden_layers"])
        for name, size in sizes.items()
    }
    save_file(matrices, folder / "adapter_model.safetensors", metadata={"format": "pt", **header})
    return matrices


def test_an_adapter_talks_as_the_model_that_it_is_merged_into(
    model: Path, tmp_path: Path, ask: Ask, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = tmp_path / "adapter"
    matrices = write_adapter(adapter, model, base=model)
    words = ["--model_name_or_path", str(model), "--adapter_name_or_path", str(adapter)]
    assert main(["merge", *words, "--output_dir", str(tmp_path / "merged")]) == 0
    assert capsys.readouterr().err == ""
    by_itself = ask(str(tmp_path))[1]  # of a run that wrote nothing else
    assert by_itself == ask(str(tmp_path / "merged"))[1]
    assert by_itself != ask(str(model))[1]
    save_file(
        {name: matrix[:, :-1].clone() for name, matrix in matrices.items()}, adapter / "adapter_model.safetensors"
    )
    code, _, told = ask(str(adapter))
    assert code == 2 and f"{adapter} cannot be added to its model" in told


def test_an_adapter_of_another_model_is_not_merged(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two models of the same shapes: by the weights of the one that it names, or by what its own file says."""
    other = write_tiny_model(tmp_path / "other", family="olmo2", seed=1)
    hub, adapter, merged = "allenai/OLMo-2-0425-1B", tmp_path / "adapter", tmp_path / "merged"
    header = {BASE_FINGERPRINT: weights_fingerprint(CheckpointFiles.open(model))}
    for named, known, base, told in (
        (other, {}, model, f"was made beside {other}, and {model} has other weights; give that model"),
        (other, {}, other, ""),
        (hub, {}, model, f"warning: {adapter} says that it was made beside {hub}"),
        (hub, header, model, ""),
        (hub, header, other, f"was made beside {hub}, and {other} has other weights"),
    ):
        write_adapter(adapter, model, base=named, **known)
        words = ["--model_name_or_path", str(base), "--adapter_name_or_path", str(adapter)]
        code, said = main(["merge", *words, "--output_dir", str(merged)]), capsys.readouterr().err
        is_refused = "other weights" in told
        assert (code, merged.is_dir()) == ((2, False) if is_refused else (0, True)), said
        assert told in said and bool(told) == bool(said)
        shutil.rmtree(merged, ignore_errors=True)


def test_what_is_no_model_that_talks_is_told_in_a_sentence(model: Path, tmp_path: Path, ask: Ask) -> None:
    empty, run, reward = (tmp_path / name for name in ("empty", "run", "reward"))
    for folder in (empty, run / "step3", reward):
        folder.mkdir(parents=True)
    (run / "step3" / "checkpoint.json").write_text("{}")
    fields = json.loads((model / "config.json").read_text())
    reward_fields = fields | {"architectures": ["Olmo2ForSequenceClassification"]}
    (reward / "config.json").write_text(json.dumps(reward_fields))
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "/gone/away"}')
    for words, sentence in {
        (): "the first word is the folder of a model",
        ("/no/such",): "/no/such: there is no such folder",
        (str(model / "config.json"),): "config.json is a file",
        (str(empty),): "a checkpoint folder needs the config.json it was saved with",
        (str(run),): f"write one with open-instruct export {run} --output_dir DIR",
        (str(reward),): f"is a reward model, which writes nothing: open-instruct score {reward} FILE",
        (str(tmp_path),): f"{tmp_path} is an adapter of /gone/away, which is not there",
        (str(model), "--top_p", "0"): "--top_p 0",
    }.items():
        code, _, told = ask(*words)
        assert (code, sentence in told) == (2, True), told
    code, _, told = ask(str(model), stdin=" \n")
    assert code == 2 and "there is no question on stdin" in told


def test_a_model_that_lacks_a_tensor_does_not_talk(model: Path, tmp_path: Path, ask: Ask) -> None:
    """transformers would draw it, and the model talk nonsense."""
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file({"model.norm.weight": torch.ones(8)}, tmp_path / "model.safetensors")
    code, out, told = ask(str(tmp_path))
    assert (code, out) == (2, "") and "model.layers.0" in told


class Parrot:
    """Says the turns that it was asked with again; Ctrl-C comes within a reply to `stop`."""

    max_tokens = 200
    pieces: tuple[str, ...] = ("one ", "two")

    def __init__(self, chat: ChatFormat) -> None:
        self.chat = chat
        self.heard: list[str] = []

    def say(self, token_ids: Sequence[int], write: Callable[[str], None]) -> None:
        heard = self.chat.tokenizer.backend_tokenizer.decode(list(token_ids), skip_special_tokens=False)
        self.heard.append(heard.replace(self.chat.tokenizer.eos_token, "<|eot|>"))
        for piece in self.pieces:
            write(piece)
            if self.heard[-1].endswith("stop<|eot|>answer:"):
                peers.stop = KeyboardInterrupt()
                raise peers.stop


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def talk(parrot: Parrot, monkeypatch: pytest.MonkeyPatch, *questions: str) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal("\n".join(questions)))
    converse(parrot, parrot.chat, [])


@pytest.fixture
def parrot(model: Path) -> Parrot:
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    return Parrot(ChatFormat.choose(tokenizer, None))


def test_a_conversation_goes_on_until_its_end(
    parrot: Parrot, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    talk(parrot, monkeypatch, "first", "", "please stop", "third", "word " * 300, "anew")
    assert parrot.heard == [
        "user said first<|eot|>answer:",
        "user said first<|eot|>assistant said one two<|eot|>user said please stop<|eot|>answer:",
        # What came before Ctrl-C was said.
        "user said first<|eot|>assistant said one two<|eot|>user said please stop<|eot|>assistant said one <|eot|>"
        "user said third<|eot|>answer:",
        "user said anew<|eot|>answer:",
    ]
    out = capsys.readouterr().out
    assert out.count("model> one two\n") == 3 and "model> one \n" in out
    assert "tokens, and the model takes 200; beginning anew\n" in out
    assert out.endswith("you> \n") and peers.stop is None


def test_what_a_model_says_does_not_steer_the_terminal(
    parrot: Parrot, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parrot.pieces = ("\x1b[2J", "\x9b31m\u202e", "\tyes 👩‍🚀\n")
    talk(parrot, monkeypatch, "first")
    answer_one("first", parrot, parrot.chat, [])
    said = "".join(parrot.pieces)
    assert capsys.readouterr().out.count(said) == 2, "a file has what the model said"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    talk(parrot, monkeypatch, "first")
    answer_one("first", parrot, parrot.chat, [])
    assert capsys.readouterr().out.count("\\x1b[2J\\x9b31m\\u202e\tyes 👩‍🚀\n") == 2


def test_ctrl_c_at_a_question_ends_it(
    parrot: Parrot, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(prompt: str) -> str:
        peers.stop = KeyboardInterrupt()
        raise peers.stop

    monkeypatch.setattr("builtins.input", interrupted)
    converse(parrot, parrot.chat, [])
    assert peers.stop is None and capsys.readouterr().out == "\n"


def test_a_folder_of_a_model_is_itself(model: Path) -> None:
    assert talking_folder(str(model)) == talking_folder(str(model.parent)) == TalkingFolder(model=model)
