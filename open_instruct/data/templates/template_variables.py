"""Variables of chat templates that a user sets, such as `enable_thinking`.

They are written in front of the template's text, each as a default. So whoever renders the template
has them: rows, prompts, engines, and those who open the exported model, who may still set them
otherwise.
"""

import json
import math
from collections.abc import Sequence

from open_instruct.config.name_hints import suggest_nearest
from open_instruct.core.errors import InputError
from open_instruct.core.text import join_choices
from open_instruct.data.templates.template_renderer import build_environment

Variable = str | int | float | bool | None

# What transformers renders every template with, beside the functions of Jinja and special tokens.
RENDERED_WITH = frozenset(
    {
        *("messages", "tools", "documents", "add_generation_prompt"),
        *("raise_exception", "strftime_now", "date_string"),
        *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token"),
        *("mask_token", "additional_special_tokens"),
    }
)

ASKING = ("defined", "undefined", "default", "d")  # tests and filters of Jinja


def parse_variables(words: Sequence[str]) -> dict[str, Variable]:
    """The values of words `KEY=VALUE`: a scalar of JSON, and else the text itself.

    Example: `parse_variables(["enable_thinking=false", "style=short"]) == {"enable_thinking":
    False, "style": "short"}`.
    """
    variables: dict[str, Variable] = {}
    for word in words:
        name, _, text = word.partition("=")
        variables[name] = _parse_scalar(text)
    return variables


def _parse_scalar(text: str) -> Variable:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if isinstance(value, list | dict):
        return text
    if isinstance(value, float) and not math.isfinite(value):
        return text
    return value


def find_variables(template: str) -> set[str]:
    """The names that a template's text reads, and that neither it nor a renderer sets.

    A name that the template sets is one of them where it asks whether the name is set already.

    Raises:
        jinja2.TemplateError: the text is no template.
    """
    from jinja2 import meta, nodes

    environment = build_environment()
    syntax_tree = environment.parse(template)
    set_by_itself = {name.name for name in syntax_tree.find_all(nodes.Name) if name.ctx == "store"}
    tested_names = {
        node.node.name
        for node in syntax_tree.find_all((nodes.Test, nodes.Filter))
        if node.name in ASKING and isinstance(node.node, nodes.Name)
    }
    names = meta.find_undeclared_variables(syntax_tree) - (set_by_itself - tested_names)
    return names - RENDERED_WITH - environment.globals.keys()


def check_variables(template_name: str, text: str, names: Sequence[str]) -> None:
    """Refuse variables that a template never reads, or that every renderer sets itself.

    Args:
        template_name: what the error calls the template.
        text: of the template.
        names: of the variables.

    Raises:
        InputError: names the variable, and those that the template reads.
    """
    template_variables = find_variables(text)
    others = (
        f"it reads {join_choices(sorted(template_variables))}"
        if template_variables
        else "it reads none"
    )
    for name in names:
        if name in RENDERED_WITH:
            raise InputError(
                f"--chat_template_kwargs {name}: is set wherever a template is rendered, and "
                f"cannot be chosen; of {template_name} chat template's own variables {others}",
                kind="conflict",
                flag="chat_template_kwargs",
            )
        if name not in template_variables:
            raise InputError(
                f"--chat_template_kwargs {name}: {template_name} chat template reads no such "
                f"variable{suggest_nearest(name, template_variables) or ';'} {others}",
                kind="bad_value",
                flag="chat_template_kwargs",
            )


def write_defaults(text: str, variables: dict[str, Variable]) -> str:
    """The text of a template with defaults of variables in front.

    A renderer that is given such a variable has its own value.
    """
    lines = []
    for name, value in variables.items():
        # Jinja reads JSON's scalars; but for null, which it calls none.
        literal = "none" if value is None else json.dumps(value, ensure_ascii=False)
        lines.append(f"{{% set {name} = {name} if {name} is defined else {literal} %}}\n")
    return "".join(lines) + text
