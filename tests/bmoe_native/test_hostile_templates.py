"""Chat templates made to crash, to hang, or to make control tokens out of a user's text: each is a sentence."""

from pathlib import Path

import pytest

from bmoe_native import Engine, TemplateError
from tests import tiny

USER = [("user", "hello")]
# Some act in any rendering; the others only once they see a message that llama.cpp's own probing does not send.
HOSTILE = {
    "recursive macro": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "recursive default": "{% macro f(a=f()) %}{{ a }}{% endmacro %}{{ f() }}",
    "two macros": "{% macro f() %}{{ g() }}{% endmacro %}{% macro g() %}{{ f() }}{% endmacro %}{{ f() }}",
    "parentheses": "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
    "lists": "{{ " + "[" * 20_000 + "]" * 20_000 + " }}",
    "chain": "{{ 'a'" + " + 'a'" * 50_000 + " }}",
    "not": "{{ " + "not " * 50_000 + "1 }}",
    "filters": "{{ 'a'" + "|trim" * 50_000 + " }}",
    "members": "{{ a" + ".a" * 50_000 + " }}",
    "ifs": "{% if 1 %}" * 20_000 + "{% endif %}" * 20_000,
    "elifs": "{% if 0 %}" + "{% elif 0 %}" * 20_000 + "{% endif %}",
    "sets": "{% set a %}" * 20_000 + "{% endset %}" * 20_000,
    "huge": "a" * (1 << 20) + "{{ messages[0].content }}",
    "a list in itself": "{% set l = [] %}{{ l.append(l) }}{{ l }}",
    "a namespace in itself": "{% set n = namespace() %}{% set n.a = n %}{{ n }}{{ n|tojson }}",
    "a list in itself as text": "{% set l = [] %}{% set _ = l.append([1, l]) %}{{ l|tojson }}",
    "only with tools": "{% set n = namespace() %}{% if tools %}{% set n.a = [n] %}{{ n|tojson }}{% endif %}x{{ 1|x }}",
    "division by nothing": "{{ 1 is divisibleby(0) }}",
    "division by the unknown": "{{ 1 is divisibleby(messages|length - 1) }}",
    "division by name": "{{ [1]|select('divisibleby', 0)|list }}",
    "endless": "{% for i in range(1000000000) %}{% endfor %}",
    "nested loops": "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
    "repetition": "{{ 'x' * 10000000000 }}",
    "doubling": "{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}{{ n.s }}",
    "replace": "{{ ('a' * 9999)|replace('a', 'b' * 9999)|replace('b', 'c' * 9999) }}",
    "unclosed": "{{",
    "division": "{{ 1 // 0 }}",
}
ONLY_HERE = "{{% if messages[0].content == 'hello' %}}{}{{% endif %}}{{{{ messages[0].content }}}}"


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_template_given_is_refused(tmp_path: Path, kind: str) -> None:
    with (
        pytest.raises(TemplateError, match="chat template") as raised,
        Engine.open(tiny.write(tmp_path / "m.gguf"), chat_template=HOSTILE[kind]) as engine,
    ):
        engine.render(USER)
    assert "std::" not in str(raised.value) and len(str(raised.value)) < 400


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_template_of_the_file_leaves_raw_prompts(tmp_path: Path, kind: str) -> None:
    with Engine.open(tiny.write(tmp_path / "m.gguf", template=HOSTILE[kind])) as engine:
        with pytest.raises(TemplateError):
            engine.render(USER)
        engine.prefill(engine.text_tokens("hello", add_bos=False))
        assert engine.logits().any()


@pytest.mark.parametrize("kind", ["recursive macro", "two macros", "endless", "nested loops", "doubling"])
def test_what_only_a_message_sets_off_is_refused_then(tmp_path: Path, kind: str) -> None:
    with Engine.open(tiny.write(tmp_path / "m.gguf", template=ONLY_HERE.format(HOSTILE[kind]))) as engine:
        assert str(engine.render([("user", "other")])) == "other"
        with pytest.raises(TemplateError, match="cannot render"):
            engine.render(USER)
        assert str(engine.render([("user", "other")])) == "other"


@pytest.mark.parametrize(
    ("template", "content"),
    [
        ("{{ messages[0].content.split('X')|join('') }}", "<|imX_end|>"),
        ("{{ messages[0].content }}{{ messages[0].content.split('X')|join('') }}", "<|imX_end|>"),
        ("{{ messages[0].content|replace('X', '') }}", "<|imX_end|>"),
        ("{{ messages[0].content|replace('im_E', 'im_e') }}", "<|im_End|>"),
        ("<|{{ messages[0].content.split('X')|join('') }}|>", "im_eXnd"),
        (
            "{% if not messages[0].content %}<|im_end|>{% endif %}{{ messages[0].content.split('X')|join }}",
            "<|imX_end|>",
        ),
    ],
)
def test_no_filter_makes_a_control_token_of_a_message(tmp_path: Path, template: str, content: str) -> None:
    path = tiny.write(tmp_path / "m.gguf", template="{{ '<|im_start|>' }}" + template)
    with Engine.open(path) as engine:
        control = [token for token in range(engine.info.n_vocab) if engine.token_attr(token) & 2]
        engine.render([("user", "")])
        for text in ("hello", content, "hello"):
            try:
                tokens = engine.chat_tokens([("user", text)])
            except TemplateError as error:
                assert text == content and "control" in str(error)
                continue
            assert [token for token in tokens if token in control] == [engine.chat_tokens(USER)[0]]
