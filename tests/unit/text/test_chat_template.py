"""Chat templates: what they may use, what they may not, and whose fault it is."""

import time
from datetime import datetime
from typing import Any

import pytest

from diptych.errors import ConfigurationError, InvalidRequestError
from diptych.text.chat_template import ChatTemplate, Message, ToolCall
from router.frontend.validation import MAX_UNIX_S

_SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
_CHAT = [Message("system", "Be brief."), Message("user", "<Hi> & 'ho' ✓")]


def render(source: str, messages: list[Message] | None = None) -> str:
    noon = int(datetime(2024, 7, 26, 12, 0).timestamp())
    template = ChatTemplate(source, _SPECIAL)
    return template.render(_CHAT if messages is None else messages, now_unix_s=noon)


def test_messages_and_special_tokens() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}{{ m.role }}={{ m['content'] }}{{ eos_token }}"
        "{% endfor %}{% if add_generation_prompt %}assistant={% endif %}"
    )
    assert render(source) == "<s>system=Be brief.</s>user=<Hi> & 'ho' ✓</s>assistant="


def test_block_tags_leave_no_lines() -> None:
    source = (
        "{% for m in messages %}\n    {% if true %}\n{{ m.role }}\n    {% endif %}\n{% endfor %}"
    )
    assert render(source) == "system\nuser\n"


def test_loop_controls() -> None:
    source = "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}x{% endfor %}"
    assert render(source) == "x"


def test_to_json_is_plain_json() -> None:
    assert render("{{ messages[1] | tojson }}") == '{"role": "user", "content": "<Hi> & \'ho\' ✓"}'
    assert render("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, indent=1) }}") == (
        '{\n "a": 2,\n "b": 1\n}'
    )


def test_the_date_is_the_requests_or_the_clocks() -> None:
    source = "{% macro date() %}{{ strftime_now('%d %b %Y') }}{% endmacro %}{{ date() }}"
    assert render(source) == "26 Jul 2024"
    clocks = ChatTemplate("{{ strftime_now('%s') }}", _SPECIAL, clock=lambda: 12345.6)
    assert clocks.render(_CHAT) == "12345"


@pytest.mark.parametrize("zone", ["Pacific/Kiritimati", "UTC", "Pacific/Niue"])
def test_each_moment_that_is_let_in_has_a_date(zone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        template = ChatTemplate("{{ strftime_now('%Y') }}", _SPECIAL)
        years = [template.render(_CHAT, now_unix_s=each) for each in (1, MAX_UNIX_S)]
    finally:
        monkeypatch.undo()
        time.tzset()
    assert years[0] in ("1969", "1970")
    assert years[1] == "9999"


def test_what_is_not_given_is_none() -> None:
    source = "{% if tools is none and documents is none and not undefined_thing %}ok{% endif %}"
    assert render(source) == "ok"


@pytest.mark.parametrize(
    "name", ["messages", "tools", "range", "namespace", "raise_exception", "bos_token", "unk_token"]
)
def test_arguments_replace_nothing_that_templates_have(name: str) -> None:
    template = ChatTemplate("{{ messages[0].role }}", {"eos_token": "</s>"})
    with pytest.raises(InvalidRequestError, match="cannot be set") as caught:
        template.render(_CHAT, {name: "mine"})
    assert caught.value.field == f"chat.template_arguments.{name}"


def test_generation_blocks_are_their_content() -> None:
    assert render("a{% generation %}{{ messages[0].role }}{% endgeneration %}b") == "asystemb"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "Roles must alternate"),
        ("{{ messages[7].content.strip() }}", "7"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ messages[0].__class__.__mro__ }}", "unsafe"),
        ("{% set _ = messages.append(1) %}", "append"),
    ],
)
def test_a_refusal_is_the_requests_fault(source: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        render(source)
    assert caught.value.field == "chat.messages"


def test_a_broken_template_is_the_models_fault() -> None:
    with pytest.raises(ConfigurationError, match="chat template"):
        ChatTemplate("{% if %}", _SPECIAL)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{% for a in b %}" * 22 + "{% endfor %}" * 22, "too many statically nested blocks"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "recursion"),
        ("{{ " + "9" * 5000 + " }}", "digits"),
    ],
)
def test_a_template_that_python_cannot_compile_is_the_models_fault(
    source: str, reason: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"chat template: .*{reason}"):
        ChatTemplate(source, _SPECIAL)


CALLS = (ToolCall("c1", "f", {"city": "Zürich"}),)
WITH_CALLS = [Message("user", "a"), Message("assistant", "", CALLS), Message("tool", "b")]
_EACH_CALL = "{% for call in m.tool_calls or [] %}{{ ARGUMENTS }}{% endfor %}"
_AS_TEXT = _EACH_CALL.replace("ARGUMENTS", "'<' + call.function.arguments + '>'")
_AS_JSON = _EACH_CALL.replace("ARGUMENTS", "call.function.arguments | tojson")


def of_messages(body: str) -> str:
    return f"{{% for m in messages %}}[{body}]{{% endfor %}}"


@pytest.mark.parametrize(
    "asks", ["m['content'] is none", 'm["content"] is none', "m.content is none"]
)
@pytest.mark.parametrize(
    ("calls", "shown"), [(_AS_TEXT, '<{"city": "Zürich"}>'), (_AS_JSON, '{"city": "Zürich"}')]
)
def test_calls_are_shown_where_that_asks_for_no_content(asks: str, calls: str, shown: str) -> None:
    """As DeepSeek's templates do, which also join arguments to texts."""
    source = of_messages(f"{{% if {asks} %}}{calls}{{% else %}}{{{{ m.content }}}}{{% endif %}}")
    assert render(source, WITH_CALLS) == f"[a][{shown}][b]"
    said = [WITH_CALLS[0], Message("assistant", "c", CALLS)]
    assert render(source, said) == "[a][c]", "there it shows none"
    assert render(source, [Message("user", "")]) == "[]", "no calls, so it is a text"


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("{{ m.reasoning_content }}", "So."),
        ("{{ m.get('reasoning') or m.get('reasoning_content') }}", "So."),
        ("{% set reasoning_content = m.reasoning %}{{ reasoning_content }}", "So."),
        ("{% if 'thinking' in m %}{{ m.thinking }}{% endif %}", "So."),
        ("{% if enable_thinking is defined %}{{ m['reasoning_content'] }}{% endif %}", ""),
    ],
)
def test_thoughts_have_the_name_by_which_the_template_reads_them(source: str, shown: str) -> None:
    turns = [Message("assistant", "", (ToolCall("1", "f", {}),), reasoning="So.")]
    assert render(f"{{% for m in messages %}}{source}{{% endfor %}}", turns) == shown


def test_calls_beside_a_content_are_not_refused_for_their_thoughts() -> None:
    """As gpt-oss's template would do."""
    source = (
        "{% for m in messages %}{% if m.content and m.thinking %}{{ raise_exception('both') }}"
        "{% endif %}{{ m.content or m.thinking }}{% endfor %}"
    )
    calls = (ToolCall("1", "f", {}),)
    turns = [Message("assistant", text, calls, reasoning="So.") for text in ("Well:", "")]
    assert render(source, turns) == "Well:So."


def test_elsewhere_no_content_is_an_empty_text() -> None:
    source = of_messages("{{ m.content + '.' }}" + _AS_JSON)
    assert render(source, WITH_CALLS) == '[a.][.{"city": "Zürich"}][b.]'
    asking = of_messages("{% if m.content is not none %}{% endif %}{{ m.content + '.' }}")
    assert render(asking, WITH_CALLS) == "[a.][.][b.]", "it joins what it may be without"


def test_of_what_is_refused_in_each_way_the_first_reason_is_told() -> None:
    source = of_messages("{% if m.content is none %}{% endif %}{{ 1 + m.role }}")
    with pytest.raises(InvalidRequestError, match="unsupported operand"):
        render(source, WITH_CALLS)
    told: list[str] = []
    template = ChatTemplate(of_messages(_AS_TEXT + "{{ raise_exception('no') }}"), _SPECIAL)

    def hide(value: Any, *, is_role: bool = False) -> Any:
        told.append(str(value))
        return value

    with pytest.raises(InvalidRequestError, match="refuses them: no"):
        template.render([Message("user", "a")], hide=hide)
    assert told == ["user", "a"], "what a template refuses is refused once"
