"""Chat templates, tokenizers, and the span of the last assistant turn."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from open_instruct.data.chat import ChatFormat
from open_instruct.data.conversations.messages import Message
from open_instruct.data.files.rows import MalformedRow
from open_instruct.data.templates.chat_templates import (
    ChatTemplate,
    built_in_templates,
    choose_chat_template,
    read_template,
)
from open_instruct.data.templates.text_compare import squeeze
from open_instruct.data.tokenizer import load_tokenizer
from tests.refusals import refused
from tests.unit.token_data import chat_format, encoded, marked, turns

CHATML = ["<|im_start|>", "<|im_end|>"]
LLAMA3 = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
EOS = "<|endoftext|>"


def make_tokenizer(
    special: list[str], *, nfc: bool = False, **kwargs: Any
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer that merges often, over line breaks too."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[EOS, *special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = ["the reply to the user\n\nis here,\n\n\nassistant and system: yes yes no no"]
    text += ["\n" * 4, "\n\n", "  the  \n"]
    tokenizer.train_from_iterator(text * 20, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOS, bos_token=EOS, **kwargs
    )


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer([*CHATML, *LLAMA3])


def said(*replies: str) -> list[Message]:
    return [{"role": "assistant", "content": reply} for reply in replies]


def own(tokenizer: Any, text: str) -> ChatFormat:
    return ChatFormat(tokenizer, ChatTemplate(name="own", text=text))


# --- spans
# ----------------------------------------------------------------------------------------------

EXPECTED = {
    "simple_chat": ("System: be kind\nUser: hi\nAssistant:", f" hello{EOS}"),
    "tulu": ("<|system|>\nbe kind\n<|user|>\nhi\n<|assistant|>\n", f"hello{EOS}"),
    "olmo2": (f"{EOS}<|system|>\nbe kind\n<|user|>\nhi\n<|assistant|>\n", f"hello{EOS}"),
    "zephyr": (f"<|system|>\nbe kind{EOS}\n<|user|>\nhi{EOS}\n<|assistant|>\n", f"hello{EOS}"),
    "chatml": (
        "<|im_start|>system\nbe "
        "kind<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
        "hello<|im_end|>",
    ),
    "llama3": (
        f"{EOS}<|start_header_id|>system<|end_header_id|>\n\nbe "
        "kind<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        "hello<|eot_id|>",
    ),
}
EXPECTED["qwen"] = EXPECTED["chatml"]
BOXED = "\n\nPlease reason step by step, and put your final answer within \\boxed{}<|im_end|>"
EXPECTED["qwen_instruct_user_boxed_math"] = (
    EXPECTED["chatml"][0].replace("hi<|im_end|>", f"hi{BOXED}"),
    EXPECTED["chatml"][1],
)
OLMO = EXPECTED["chatml"][0].replace(
    "be kind", "be kind You do not currently have access to any functions. <functions></functions>"
)
PLAIN_OLMOS = (
    "olmo",
    "olmo_old",
    "olmo_thinker_no_think_7b",
    "olmo_thinker_no_think_sft_tokenization",
)
EXPECTED |= dict.fromkeys(PLAIN_OLMOS, (OLMO, f"hello{EOS}"))
THINKERS = {
    "tulu_thinker": EXPECTED["tulu"][0] + "<think>",
    **dict.fromkeys(
        ("olmo_thinker", "olmo_thinker_remove_intermediate_thinking"), OLMO + "<think>"
    ),
}
R1 = (
    "tags, respectively, i.e., <think> reasoning process here </think> <answer> answer here "
    "</answer>.\n\n"
)
# Prompts of these have an end, after which only a policy can go on; no reply that somebody wrote
# has that beginning.
PROMPTS = {
    "tulu_thinker_r1_style": f"{R1}<|system|>\nbe kind\n<|user|>\nhi\n<|assistant|>\n<think>",
    "r1_simple_chat": f"{R1}System: be kind\n\n\nUser: hi\nAssistant:",
    "r1_simple_chat_postpend_think": f"{R1}System: be kind\n\n\nUser: hi\nAssistant: <think>",
    "r1_simple_chat_postpend_think_orz_style": "by the \\boxed{} tag. This is the problem: hi\nAssistant: <think>",
    "olmo_thinker_rlzero": 'be kind\n\n\nhi\n\nRemember to put your answer on its own line after "Answer:"',
    "olmo_thinker_code_rlzero": "hi\nRemember to put your solution inside the ```\npython\nCODE\n``` tags",
}


def test_every_built_in_template_is_here() -> None:
    assert {*EXPECTED, *THINKERS, *PROMPTS} == built_in_templates().keys()


@pytest.mark.parametrize("name", THINKERS)
def test_thinkers_ask_with_the_first_word_of_the_reply(tokenizer: Any, name: str) -> None:
    form = chat_format(tokenizer, name)
    messages = turns("be kind", "hi", roles="su")
    assert form.render(messages, said("<think>hm</think>hello")) == (
        THINKERS[name],
        (f"hm</think>hello{EOS}",),
    )
    document = encoded(form, [*messages, *said("<think>hm</think>hello")])
    assert marked(tokenizer, document) == f"{THINKERS[name]}[hm</think>hello{EOS}]"
    with pytest.raises(MalformedRow, match="does not write what it asks for the reply with"):
        form.render(messages, said("hello"))
    assert form.turn_end_token_ids() == (tokenizer.eos_token_id,)


@pytest.mark.parametrize("name", PROMPTS)
def test_templates_for_prompts_alone(tokenizer: Any, name: str) -> None:
    form = chat_format(tokenizer, name)
    messages = turns("be kind", "hi", roles="su")
    prompt, _ = form.render(messages, ())
    assert prompt.endswith(PROMPTS[name])
    assert form.turn_end_token_ids() == (tokenizer.eos_token_id,)


def test_olmo_says_who_it_is_where_there_is_no_system_turn(tokenizer: Any) -> None:
    prompt, _ = chat_format(tokenizer, "olmo").render(turns("hi"), ())
    assert prompt.startswith(
        "<|im_start|>system\nYou are OLMo, a helpful function-calling AI assistant built by Ai2."
    )
    assert prompt.endswith(
        "<functions></functions><|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("name", EXPECTED)
def test_built_in_templates_word_for_word(tokenizer: Any, name: str) -> None:
    messages = turns("be kind", "hi", "hello", roles="sua")
    form = chat_format(tokenizer, name)
    assert marked(tokenizer, encoded(form, messages)) == "{}[{}]".format(*EXPECTED[name])
    _, learned = marked(tokenizer, encoded(form, turns("one", "two", "three", "four"))).split("[")
    assert "four" in learned and not any(word in learned for word in ("one", "two", "three"))


def test_merges_over_the_boundary_do_not_change_the_prompt(tokenizer: Any) -> None:
    text_ids = tokenizer("<|assistant|>\n\n\nyes", add_special_tokens=False)["input_ids"]
    prompt_ids = tokenizer("<|assistant|>\n", add_special_tokens=False)["input_ids"]
    assert text_ids[: len(prompt_ids)] != prompt_ids, "this tokenizer should merge line breaks"
    form = chat_format(tokenizer, "tulu")
    one, other = (encoded(form, turns("q", reply)) for reply in ("\n\nyes", "no"))
    assert one.responses[0].start == other.responses[0].start
    assert one.token_ids[: one.responses[0].start] == other.token_ids[: other.responses[0].start]
    assert marked(tokenizer, one).endswith(f"<|assistant|>\n[\n\nyes{EOS}]")


TEXTS = st.text(st.characters(codec="utf-8"), max_size=30)
REPLIES = TEXTS.filter(lambda text: text.strip())


@given(
    name=st.sampled_from(sorted(EXPECTED)),
    contents=st.lists(TEXTS, max_size=4).filter(lambda texts: len(texts) % 2 == 1),
    replies=st.tuples(REPLIES, REPLIES),
)
def test_spans_of_any_text(
    tokenizer: Any, name: str, contents: list[str], replies: tuple[str, str]
) -> None:
    form = chat_format(tokenizer, name)
    prompt = turns(*contents)
    prompt_text, reply_texts = form.render(prompt, said(*replies))
    documents = [
        encoded(form, [*prompt, {"role": "assistant", "content": reply}]) for reply in replies
    ]
    starts = {document.responses[0].start for document in documents}
    assert len(starts) == 1, "one prompt, one boundary"
    assert starts.pop() > 0
    for document, reply, reply_text in zip(documents, replies, reply_texts, strict=True):
        assert len(document.responses[0]) > 0 and document.responses[0].stop == len(document)
        assert marked(tokenizer, document) == f"{prompt_text}[{reply_text}]"
        assert squeeze(reply) in squeeze(reply_text)
        # Nothing of the template's side of the boundary is learned.
        assert reply_text.startswith((reply, " " + reply, reply.strip()))


def test_tokenizer_that_composes_unicode() -> None:
    composing = make_tokenizer([], nfc=True)
    document = encoded(chat_format(composing, "tulu"), turns("q", "cafe\u0301"))
    assert marked(composing, document).endswith(f"[caf\u00e9{EOS}]")


# --- templates that do not fit
# --------------------------------------------------------------------------

TURNS = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
ASK = "{{ '<assistant>' if add_generation_prompt }}"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (
            TURNS + "{{ '<assistant><think>' if add_generation_prompt }}",
            "where the reply starts is not known",
        ),
        ("{{ messages | length }}" + TURNS + ASK, "where the reply starts is not known"),
        (
            "{% for m in messages %}<{{ m['role'] }}>{{ m['content'][:5] }}{% endfor %}" + ASK,
            "leaves out part",
        ),
        ("{{ raise_exception('no such turns') }}", "refuses the conversation: no such turns"),
        ("{{ messages[0]['name'] + 'x' }}" + TURNS + ASK, "refuses the conversation"),
        (
            "{% if not add_generation_prompt %}" + TURNS + "{% endif %}",
            "writes nothing before the reply",
        ),
    ],
)
def test_templates_that_hide_the_reply_are_a_reason(
    tokenizer: Any, template: str, reason: str
) -> None:
    with pytest.raises(MalformedRow, match=reason) as caught:
        encoded(own(tokenizer, template), turns("q", "a longer reply"))
    assert caught.value.kind == "template"


def test_tokenizer_that_loses_text_is_a_reason() -> None:
    lossy = Tokenizer(models.WordLevel({"<unk>": 0, "yes": 1, EOS: 2}, unk_token="<unk>"))
    lossy.pre_tokenizer = pre_tokenizers.Whitespace()
    form = own(PreTrainedTokenizerFast(tokenizer_object=lossy, eos_token=EOS), TURNS + ASK)
    assert len(encoded(form, turns("yes", "yes")).responses[0]) == 1
    with pytest.raises(MalformedRow, match="cannot write the reply 'maybe'") as caught:
        encoded(form, turns("yes", "maybe"))
    assert caught.value.kind == "tokenizer"


def test_day_does_not_matter_nor_does_white_space_after_the_end_of_a_turn(
    tokenizer: Any,
) -> None:
    dated = (
        "{% if date_string is not defined %}{{ strftime_now('%d %b %Y') }}{% else %}{{ "
        "date_string }}{% endif %}"
    )
    prompt, _ = own(tokenizer, dated + TURNS + ASK).render(turns("q"), said("yes"))
    assert prompt == "26 Jul 2024<user>q<assistant>"
    form = chat_format(tokenizer, "chatml")
    assert form.render(turns("q"), said("yes\n"))[1] == ("yes\n<|im_end|>",)
    assert form.ends_turn("yes<|im_end|>") and not form.ends_turn("yes")
    assert own(tokenizer, TURNS + ASK).render(turns("q"), said("yes\n"))[1] == ("yes\n",)


# --- choosing
# -------------------------------------------------------------------------------------------


def test_file_of_ones_own(tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text(TURNS + ASK + "{{ eos_token if not add_generation_prompt }}\n")
    form = chat_format(tokenizer, str(file))
    assert form.template.name == str(file)
    assert form.render(turns("q"), said("yes")) == ("<user>q<assistant>", (f"yes{EOS}",))
    file.write_text("{% for m in messages %}")
    with refused("bad_value", None, "mine.jinja", "1"):
        choose_chat_template(tokenizer, str(file))
    file.write_text("<|im_start|>{{ messages }}")
    with refused("conflict", "chat_template_name", "mine.jinja", "im_start"):
        choose_chat_template(make_tokenizer([]), str(file))
    file.write_bytes(b"\xff")
    with refused("unreadable_file", "chat_template_name", "mine.jinja", "8"):
        choose_chat_template(tokenizer, str(file))
    with refused("missing_file", "chat_template_name", "mind.jinja", "mine.jinja"):
        choose_chat_template(tokenizer, str(tmp_path / "mind.jinja"))


def test_bos_token_may_be_written_before_any_template() -> None:
    tokenizer = make_tokenizer(LLAMA3, chat_template=TURNS + ASK)
    for name, text in ((None, TURNS + ASK), ("tulu", read_template("tulu"))):
        template = choose_chat_template(tokenizer, name, add_bos=True)
        assert choose_chat_template(tokenizer, name).text == text
        rendered, _ = ChatFormat(tokenizer, template).render(turns("?"), ())
        assert rendered == tokenizer.bos_token + own(tokenizer, text).render(turns("?"), ())[0]
    with refused("conflict", "add_bos", "llama3"):
        choose_chat_template(tokenizer, "llama3", add_bos=True)
    for beginning in (
        "{%- set first = bos_token -%}{{- first -}}",
        "{%- for message in messages -%}{%- if loop.first -%}{{- bos_token -}}{%- endif -%}{%- endfor -%}",
        "{{- '' + bos_token -}}",
        str(tokenizer.bos_token),
    ):
        tokenizer.chat_template = beginning + TURNS + ASK
        with refused("conflict", "add_bos", "own"):
            choose_chat_template(tokenizer, None, add_bos=True)
    tokenizer.chat_template = "{%- if first_turn -%}{{- bos_token -}}{%- endif -%}" + TURNS + ASK
    choose_chat_template(tokenizer, None, add_bos=True)
    with refused("conflict", "add_bos", "own"):
        choose_chat_template(tokenizer, None, add_bos=True, variables=["first_turn=true"])
    tokenizer.bos_token = None
    with refused("conflict", "add_bos"):
        choose_chat_template(tokenizer, "tulu", add_bos=True)


def test_choices_that_are_refused(tokenizer: Any) -> None:
    with refused("bad_value", "chat_template_name", "'tulip'", "llama3", "simple_chat"):
        choose_chat_template(tokenizer, "tulip")
    with refused("bad_value", "chat_template_name", "llama3"):
        choose_chat_template(tokenizer, None)
    with refused("conflict", "chat_template_name", "im_start", "im_end"):
        choose_chat_template(make_tokenizer([]), "chatml")
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with refused("conflict", "chat_template_name", "simple_chat", "eos_token"):
        choose_chat_template(bare, "simple_chat")


def test_fingerprint_covers_vocabulary_and_template(tokenizer: Any) -> None:
    first = chat_format(tokenizer, "tulu").fingerprint
    tokenizer(["a", "b c d"], truncation=True, max_length=2)  # leaves state behind in the tokenizer
    assert chat_format(tokenizer, "tulu").fingerprint == first
    assert chat_format(tokenizer, "simple_chat").fingerprint != first
    assert chat_format(make_tokenizer(CHATML), "tulu").fingerprint != first


# --- loading
# --------------------------------------------------------------------------------------------


def test_tokenizers_are_loaded_or_refused(tokenizer: Any, tmp_path: Path) -> None:
    with refused("missing_file", "verifier", "/nope"):
        load_tokenizer(str(tmp_path / "nope"), flag="--verifier")
    with refused("bad_model", "tokenizer_name_or_path", "tokenizer.json"):
        load_tokenizer(str(tmp_path))
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert loaded("the reply")["input_ids"] == tokenizer("the reply")["input_ids"]
    assert chat_format(loaded, "tulu").fingerprint == chat_format(tokenizer, "tulu").fingerprint
    (tmp_path / "tokenizer_config.json").unlink()
    assert (
        load_tokenizer(str(tmp_path))("the reply")["input_ids"]
        == tokenizer("the reply")["input_ids"]
    )
    with refused("bad_model", "tokenizer_name_or_path", "file"):
        load_tokenizer(str(tmp_path / "tokenizer.json"))
    whole = (tmp_path / "tokenizer.json").read_bytes()
    (tmp_path / "tokenizer.json").write_bytes(whole[: len(whole) // 2])
    with refused("unreadable_file"):
        load_tokenizer(str(tmp_path))
    spaced = make_tokenizer([])
    spaced.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    spaced.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    with refused("bad_model", "tokenizer_name_or_path", "not keep"):
        load_tokenizer(str(tmp_path))


def test_code_beside_a_tokenizer_is_not_run(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config.update(tokenizer_class="Evil", auto_map={"AutoTokenizer": ["evil.Evil", "evil.Evil"]})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass Evil: pass\n"
    )
    loaded = load_tokenizer(str(tmp_path))
    assert loaded("the reply")["input_ids"] == tokenizer("the reply")["input_ids"]
    assert not (tmp_path / "ran").exists()


# --- the tokens at which a reply is over
# ----------------------------------------------------------------

HEAD = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
ASK_CHATML = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


@pytest.mark.parametrize(
    ("template", "eos", "expected"),
    [
        *((name, EOS, [EOS]) for name in ("tulu", "olmo", "simple_chat")),
        *((name, EOS, [EOS, "<|im_end|>"]) for name in ("chatml", "qwen")),
        ("llama3", EOS, [EOS, "<|eot_id|>"]),
        ("chatml", None, ["<|im_end|>"]),
        ("chatml", "<|im_end|>", ["<|im_end|>"]),
        # A line break after the turn is not its end; a template without an end leaves the
        # tokenizer's.
        (HEAD + "<|im_end|>\n{% endfor %}" + ASK_CHATML, EOS, [EOS, "<|im_end|>"]),
        (HEAD + "\n{% endfor %}" + ASK_CHATML, EOS, [EOS]),
    ],
)
def test_ends_of_turns_are_the_templates_and_the_tokenizers(
    template: str, eos: str, expected: list[str]
) -> None:
    tokenizer = make_tokenizer([*CHATML, *LLAMA3])
    tokenizer.eos_token = eos
    form = own(tokenizer, template) if "{" in template else chat_format(tokenizer, template)
    ids = form.turn_end_token_ids()
    assert tokenizer.convert_ids_to_tokens(list(ids)) == expected and list(ids) == sorted(ids)
