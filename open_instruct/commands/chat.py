"""`open-instruct chat`: talk to a trained model, and to another beside it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from open_instruct.commands.talking.models import TalkingModel, find_model, find_start_model
from open_instruct.config.parser import parse
from open_instruct.config.sections import Dtype, flag
from open_instruct.config.validation import limit_problems, refuse, template_variable_problems
from open_instruct.core.errors import InputError
from open_instruct.core.text import escape_controls
from open_instruct.data.chat import ChatFormat
from open_instruct.data.files.rows import MalformedRow
from open_instruct.data.tokenizer import load_tokenizer
from open_instruct.generation.replies import Sampling
from open_instruct.models.hf.hf_config import read_config_fields
from open_instruct.run.cadence import set_handler

if TYPE_CHECKING:
    from open_instruct.data.conversations.messages import Message
    from open_instruct.generation.replies import ReplyEngine

START = "start"
NEW = "/new"
EXIT = "/exit"
ASK = "you: "


@dataclass(kw_only=True)
class ChatFlags:
    """Talk to the model of a run, RUN, to the one in a folder or on the hub, MODEL, or to an
    adapter.

    In a terminal, /new begins another conversation, and Ctrl-D or /exit ends; Ctrl-C ends a reply.
    From a pipe, each line is a turn.

    Examples:
        open-instruct chat runs/first --beside start
        echo "What is 2 + 3?" | open-instruct chat runs/first/hf_model --temperature 0
    """

    beside: str | None = flag(
        "a second model, which answers too: a run, a folder, a name on the hub, or 'start', the "
        "model RUN began with",
        None,
        is_path=True,
    )
    system: str | None = flag("a system turn before the conversation", None)
    max_new_tokens: int = flag(
        "tokens of a reply; a longer one is cut, and that is said", 512, minimum=1
    )
    temperature: float | None = flag(
        ("of sampling; 0: the likeliest token each time; default: as generation_config.json says"),
        None,
        minimum=0,
    )
    top_p: float | None = flag(
        "of the likeliest tokens, those with this share are drawn from; default: as "
        "generation_config.json says",
        None,
        above=0,
        maximum=1,
    )
    seed: int | None = flag("makes a reply that is drawn the same each time", None, minimum=0)
    chat_template_name: str | None = flag(
        "a built-in template, or a Jinja file; default: the model's own", None
    )
    chat_template_kwargs: list[str] = flag(
        "variables of the chat template, each KEY=VALUE: 'enable_thinking=false'; else as the "
        "template has them",
        [],
    )
    param_dtype: Dtype | None = flag(
        "dtype of the computation; default: bfloat16 on CUDA, float32 on a CPU", None
    )
    engine: Literal["auto", "transformers", "vllm"] = flag(
        (
            "what makes the replies; 'auto': vLLM for one model on a GPU where it is installed, "
            "else transformers"
        ),
        "auto",
    )


@dataclass(slots=True, kw_only=True)
class Speaker:
    """A model in a conversation, with the turns as it has had them."""

    name: str
    engine: ReplyEngine
    chat: ChatFormat
    sampling: Sampling
    max_tokens: int
    """The most tokens that the model takes, prompt and reply together."""

    turns: list[Message] = field(default_factory=list)

    def prompt_token_ids(self) -> list[int]:
        """:raises InputError: the template refuses the conversation, or it has become too long."""
        try:
            text = self.chat.apply(self.turns, add_generation_prompt=True)
        except MalformedRow as error:
            raise InputError(f"{self.name}: {error}", kind="bad_row") from error
        token_ids: list[int] = self.chat.tokenize([text])[0]
        if len(token_ids) >= self.max_tokens:
            raise InputError(
                f"{self.name}: the conversation has {len(token_ids)} tokens, and the model takes "
                f"{self.max_tokens}: begin another one ({NEW})",
                kind="out_of_range",
            )
        return token_ids


def main(words: Sequence[str]) -> int:
    """:raises InputError: a flag, a model or a turn cannot be used."""
    if not words or words[0].startswith("-"):
        raise InputError(
            (
                "the first word is a run, a model's folder or a name on the hub: open-instruct "
                "chat RUN"
            ),
            kind="stray_word",
        )
    flags = parse(ChatFlags, words[1:])
    refuse([*limit_problems(flags), *template_variable_problems(flags.chat_template_kwargs)])
    models = [find_model(words[0])]
    if flags.beside is not None:
        models.append(
            find_start_model(words[0]) if flags.beside == START else find_model(flags.beside)
        )
    speakers = [open_speaker(model, flags, is_alone=len(models) == 1) for model in models]
    return talk(speakers, system=flags.system)


def open_speaker(model: TalkingModel, flags: ChatFlags, *, is_alone: bool) -> Speaker:
    """:raises InputError: the model, its tokenizer or its template cannot be used."""
    if flags.engine == "vllm" and model.adapter is not None:
        raise InputError(
            f"--engine vllm: {model.name} is an adapter; `open-instruct merge` makes a model of "
            "it, or take --engine transformers",
            kind="conflict",
            flag="engine",
        )
    tokenizer = load_tokenizer(str(model.tokenizer_folder))
    chat = ChatFormat.choose(
        tokenizer, flags.chat_template_name, variables=flags.chat_template_kwargs
    )
    # torch is loaded once everything else is known to be good.
    from open_instruct.commands.talking.transformers_replies import TransformersEngine
    from open_instruct.generation.vllm_replies import VLLMEngine, has_vllm_for_gpu

    takes_vllm = flags.engine == "vllm"
    if flags.engine == "auto":
        takes_vllm = is_alone and model.adapter is None and has_vllm_for_gpu()
    engine: ReplyEngine
    if takes_vllm:
        engine = VLLMEngine(model.folder, dtype=flags.param_dtype)
    else:
        engine = TransformersEngine(model, tokenizer, dtype=flags.param_dtype)
    sampling = Sampling(
        max_new_tokens=flags.max_new_tokens,
        temperature=flags.temperature,
        top_p=flags.top_p,
        seed=flags.seed,
        end_token_ids=chat.turn_end_token_ids(),
    )
    longest = read_config_fields(model.folder).get("max_position_embeddings")
    return Speaker(
        name=model.name,
        engine=engine,
        chat=chat,
        sampling=sampling,
        max_tokens=longest if isinstance(longest, int) else sys.maxsize,
    )


def talk(speakers: Sequence[Speaker], *, system: str | None) -> int:
    """Ask and answer until the input ends; returns the exit code."""
    is_terminal = sys.stdin.isatty()
    opening: list[Any] = [] if system is None else [{"role": "system", "content": system}]
    _begin_conversation(speakers, opening)
    for text in read_turns(is_terminal=is_terminal):
        if text == NEW:
            _begin_conversation(speakers, opening)
            continue
        for speaker in speakers:
            speaker.turns.append({"role": "user", "content": text})
            try:
                answer(speaker, shows_name=len(speakers) > 1)
            except InputError as error:
                if not is_terminal:
                    raise
                speaker.turns.pop()
                print(error, file=sys.stderr)
    return 0


def _begin_conversation(speakers: Sequence[Speaker], opening: Sequence[Message]) -> None:
    for speaker in speakers:
        speaker.turns = list(opening)


def read_turns(*, is_terminal: bool) -> Iterator[str]:
    """What the user says, turn by turn, without blank lines."""
    if not is_terminal:
        yield from filter(None, (line.strip() for line in sys.stdin))
        return
    print(f"{NEW} begins another conversation, {EXIT} or Ctrl-D ends, Ctrl-C ends a reply.")
    before = set_handler(signal.SIGINT, signal.default_int_handler)
    try:
        while (text := input(ASK).strip()) != EXIT:
            if text:
                yield text
    except (EOFError, KeyboardInterrupt):
        print()
    finally:
        set_handler(signal.SIGINT, before)


def answer(speaker: Speaker, *, shows_name: bool) -> None:
    """Print the reply to the turns so far as it comes, and add it to them.

    :raises InputError: the model cannot be asked.
    """
    prompt_token_ids = speaker.prompt_token_ids()
    if shows_name:
        print(f"[{speaker.name}]")
    pieces: list[str] = []
    with _end_reply_on_interrupt(speaker.engine):
        for piece in speaker.engine.stream(prompt_token_ids, speaker.sampling):
            pieces.append(piece)
            print(escape_controls(piece, "\n\t"), end="", flush=True)
    print()
    if speaker.engine.was_cut:
        print(
            f"(cut after {speaker.sampling.max_new_tokens} tokens: --max_new_tokens)",
            file=sys.stderr,
        )
    speaker.turns.append({"role": "assistant", "content": "".join(pieces).strip()})


@contextmanager
def _end_reply_on_interrupt(engine: ReplyEngine) -> Iterator[None]:
    """Ctrl-C ends the reply while a person talks; from a pipe it ends the program."""
    before = (
        set_handler(signal.SIGINT, lambda number, frame: engine.stop())
        if sys.stdin.isatty()
        else None
    )
    try:
        yield
    finally:
        set_handler(signal.SIGINT, before)
