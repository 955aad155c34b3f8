"""Choose and check a chat template: a built-in one, a user's file, or the tokenizer's own.

A .jinja file beside this one is the template of that name. shared/made.yaml lists further ones,
each made of a file in shared/ and of settings that are written in front of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from open_instruct.config.name_hints import suggest_nearest
from open_instruct.core.errors import InputError
from open_instruct.core.files import read_user_file
from open_instruct.core.tables import read_yaml_table
from open_instruct.data.conversations.messages import Message
from open_instruct.data.templates.template_trial import refuse_endless
from open_instruct.data.templates.template_variables import (
    Variable,
    check_variables,
    parse_variables,
    write_defaults,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FOLDER = Path(__file__).parent
FILE_SUFFIXES = (".jinja", ".jinja2", ".j2")
MAX_BYTES = 2**20
# A template that writes one of these needs it as a single token, or a generated turn never ends.
SPECIAL_TOKENS = (
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
)

# A template that writes the date writes this one: what is learned must not depend on the day.
TEMPLATE_DAY = date(2024, 7, 26)
QUESTION: tuple[Message, ...] = ({"role": "user", "content": "?"},)
ANSWERED: tuple[Message, ...] = (*QUESTION, {"role": "assistant", "content": "!"})

ConversationForm = tuple[bool, bool, tuple[str, ...]]
"""What decides which way a template takes: does it ask for a reply, has it tools, which roles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """A Jinja chat template."""

    name: str
    """The template's name in messages."""
    text: str
    is_foreign: bool = False
    """Whether it is none of the built-in ones."""
    forms_tried: frozenset[ConversationForm] = frozenset()
    """The conversations of which it is known that rendering them ends."""


def choose_chat_template(
    tokenizer: PreTrainedTokenizerFast,
    name: str | None,
    *,
    add_bos: bool = False,
    variables: Sequence[str] = (),
) -> ChatTemplate:
    """The template that a run uses.

    Args:
        tokenizer: with a template of its own, where there is no `name`.
        name: of a built-in template or a file; None for the tokenizer's own.
        add_bos: whether a bos token is put in front.
        variables: words `KEY=VALUE` of `--chat_template_kwargs`.

    Raises:
        InputError: no such name or file; no name and no template of its own; the tokenizer lacks a
            token that the template needs; the template does not read one of the variables; or it
            cannot be parsed, or not in any reasonable time.
    """
    values = parse_variables(variables)
    if name is None:
        template = _take_tokenizer_template(tokenizer)
    else:
        is_foreign = name not in built_in_templates()
        template = ChatTemplate(name=name, text=read_template(name), is_foreign=is_foreign)
        _check_tokens(tokenizer, template)
    if template.is_foreign:
        template = _try_on_plain_conversations(tokenizer, template, values)
    check_syntax(f"{template.name} chat template", template.text)
    if values:
        template = _set_variables(template, values)
    if add_bos:
        template = _put_behind_bos(tokenizer, template)
    return template


def _take_tokenizer_template(tokenizer: PreTrainedTokenizerFast) -> ChatTemplate:
    text = tokenizer.chat_template
    if isinstance(text, dict):
        text = text.get("default")
    if not text:
        raise InputError(
            f"the tokenizer has no chat template: {suggest_template()}.", kind="bad_value"
        )
    if not isinstance(text, str):
        raise InputError(
            f"the tokenizer's own chat template is a {type(text).__name__}, not text: mend "
            f"tokenizer_config.json, or {suggest_template()}.",
            kind="bad_model",
        )
    return ChatTemplate(name="the tokenizer's own", text=text, is_foreign=True)


def _try_on_plain_conversations(
    tokenizer: PreTrainedTokenizerFast,
    template: ChatTemplate,
    values: Mapping[str, Variable],
) -> ChatTemplate:
    """The template, once it is known that rendering the plainest conversations ends.

    Jinja computes what is constant in a template while it compiles it, so that may have no end
    either.
    """
    renderings = []
    forms = set()
    for messages, asks in ((QUESTION, True), (QUESTION, False), (ANSWERED, False)):
        variables = build_variables(None, add_generation_prompt=asks)
        renderings.append(
            {
                **values,
                **tokenizer.special_tokens_map,
                **variables,
                "messages": messages,
            }
        )
        forms.add(find_form(messages, None, add_generation_prompt=asks))
    refuse_endless(template.text, renderings, template=template.name, remedy=suggest_template())
    return replace(template, forms_tried=frozenset(forms))


def _set_variables(template: ChatTemplate, values: dict[str, Variable]) -> ChatTemplate:
    from jinja2 import TemplateError

    try:
        check_variables(template.name, template.text, list(values))
    except (TemplateError, RecursionError) as error:
        raise InputError(
            f"{template.name} chat template cannot be parsed: {error}", kind="bad_value"
        ) from error
    return replace(template, text=write_defaults(template.text, values))


def find_form(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None,
    *,
    add_generation_prompt: bool,
) -> ConversationForm:
    """The form of a conversation, as far as it decides which way a template takes."""
    roles = tuple(str(message.get("role")) for message in messages)
    return add_generation_prompt, bool(tools), roles


def build_variables(tools: Sequence[Any] | None, *, add_generation_prompt: bool) -> dict[str, Any]:
    """What a template is rendered with beside the messages, the special tokens and functions."""
    return {
        "tools": tools or None,
        "add_generation_prompt": add_generation_prompt,
        "date_string": TEMPLATE_DAY.strftime("%d %b %Y"),
    }


def render_conversation(
    tokenizer: PreTrainedTokenizerFast,
    template: ChatTemplate,
    messages: Sequence[Any],
    variables: Mapping[str, Any],
) -> str:
    """The text that a template writes of a conversation; it may raise anything.

    :param variables: those of `build_variables`.
    """
    text = tokenizer.apply_chat_template(
        list(messages),
        chat_template=template.text,
        tokenize=False,
        strftime_now=TEMPLATE_DAY.strftime,
        **variables,
    )
    assert isinstance(text, str)
    return text


def read_template(name: str) -> str:
    """The text of the built-in template `name`, or of the file that it names.

    Raises:
        InputError: there is no such template or file, or it cannot be read.
    """
    if name in built_in_templates():
        return built_in_templates()[name]
    if name.endswith(FILE_SUFFIXES) or "/" in name or Path(name).is_file():
        return read_user_file(name, where=f"--chat_template_name {name}", most=MAX_BYTES)
    raise InputError(
        f"--chat_template_name {name!r} is not a "
        f"template{suggest_nearest(name, built_in_templates()) or '.'} Use one of "
        f"{', '.join(built_in_templates())}; a file of your own (FILE{FILE_SUFFIXES[0]}); or "
        "leave the flag out for the tokenizer's own.",
        kind="bad_value",
    )


@cache
def built_in_templates() -> dict[str, str]:
    """The text of every built-in template, by name."""
    templates = {
        file.stem: file.read_text(encoding="utf-8") for file in sorted(FOLDER.glob("*.jinja"))
    }
    settings_file = FOLDER / "shared" / "made.yaml"
    for name, settings in read_yaml_table(settings_file).items():
        if not name.startswith("."):
            templates[name] = _make_template(**settings)
    return templates


def _make_template(file: str, **settings: Any) -> str:
    # JSON and Jinja write these values alike.
    lines = [f"{{%- set {name} = {json.dumps(value)} -%}}\n" for name, value in settings.items()]
    text = (FOLDER / "shared" / f"{file}.jinja").read_text(encoding="utf-8")
    return "".join(lines) + text


def suggest_template() -> str:
    """What to do where a template will not do, for messages."""
    return f"choose one by --chat_template_name ({', '.join(built_in_templates())})"


def check_syntax(name: str, text: str) -> None:
    """Check a template, unless it may have a tag of transformers' own.

    Args:
        name: what the error calls it.
        text: of the template.

    Raises:
        InputError: it does not compile, or writes at random; names the line.
    """
    from jinja2 import Environment, TemplateSyntaxError, nodes

    if "generation" in text.replace("add_generation_prompt", ""):
        return
    environment = Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=False)
    try:
        environment.from_string(text)
        syntax_tree = environment.parse(text)
    except TemplateSyntaxError as error:
        raise InputError(
            f"{name}, line {error.lineno}: {error.message}", kind="bad_value"
        ) from error
    except Exception:
        return  # such as brackets too deep; what fails with real rows is reported with the row
    for node in syntax_tree.find_all((nodes.Filter, nodes.Name)):
        function = getattr(node, "name", None)
        if function in ("random", "lipsum"):
            raise InputError(
                f"{name}, line {node.lineno}: {function} writes another text each time; leave it "
                "out",
                kind="bad_value",
            )


def _check_tokens(tokenizer: PreTrainedTokenizerFast, template: ChatTemplate) -> None:
    special_tokens = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
    missing = [
        key for key, token in special_tokens.items() if key in template.text and token is None
    ]
    required = [token for token in SPECIAL_TOKENS if token in template.text]
    vocabulary = tokenizer.get_vocab() if required else {}
    missing += [token for token in required if token not in vocabulary]
    if missing:
        raise InputError(
            f"--chat_template_name {template.name} needs {', '.join(missing)}, which the "
            "tokenizer does not have; use the template that the model was trained with, or "
            "'simple_chat' or 'tulu', which need only an eos.",
            kind="conflict",
        )


def _put_behind_bos(tokenizer: PreTrainedTokenizerFast, template: ChatTemplate) -> ChatTemplate:
    if tokenizer.bos_token is None:
        raise InputError(
            "--add_bos: the tokenizer has no bos token; leave the flag out.", kind="conflict"
        )
    if _begins_with_bos(tokenizer, template):
        raise InputError(
            f"--add_bos: {template.name} chat template begins with the bos token itself; leave "
            "the flag out.",
            kind="conflict",
        )
    return replace(
        template,
        name=f"{template.name}, behind a bos token",
        text="{{ bos_token }}" + template.text,
    )


def _begins_with_bos(tokenizer: PreTrainedTokenizerFast, template: ChatTemplate) -> bool:
    """Whether a question, rendered, begins with the bos token.

    A template that refuses the question is judged by its first words.
    """
    bos_token = str(tokenizer.bos_token)
    variables = build_variables(None, add_generation_prompt=True)
    try:
        text = render_conversation(tokenizer, template, QUESTION, variables)
    except Exception:  # a foreign template may raise anything; with rows it is said
        begins_with_name = re.match(r"\s*\{\{-?\s*bos_token", template.text) is not None
        return begins_with_name or template.text.startswith(bos_token)
    return text.lstrip().startswith(bos_token)
