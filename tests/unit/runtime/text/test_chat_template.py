"""Chat templates: transformers' text and tokens, out of a sandbox that a template cannot leave or exhaust."""

import json
import re
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.extent import examples

from prejit.runtime import load
from prejit.runtime.base.typed_json import to_json
from prejit.runtime.errors import RejectError, UsageError
from prejit.runtime.format.checks.seldom_parts import Chat, check_chat
from prejit.runtime.format.names import CHAT_MEDIA_TYPE, TOKENIZER_MEDIA_TYPE
from prejit.runtime.text.chat_template import ChatTemplates
from prejit.runtime.text.sandbox import MAX_CHARACTERS, check_template

DEMO = Path(__file__).resolve().parents[4] / "manifests" / "demo-model" / "tokenizer.json"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}

# Written for these tests, in the manner of what models publish.
LLAMA_3 = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = '26 Jul 2024' %}
{%- endif %}
{% for message in messages %}
    {% if message['role'] not in ['user', 'assistant', 'system'] %}
        {{ raise_exception('no role ' ~ message['role']) }}
    {% endif %}
    {%- set header = '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' %}
    {% if message.content is string %}
        {{ header + message.content | trim + '<|eot_id|>' }}
    {%- else %}
        {{- header }}
        {%- for part in message.content if part.type == 'text' %}
            {{- part.text + (', ' if not loop.last else '') }}
        {%- endfor %}
        {{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' + date_string }}
{%- endif %}
"""
PHI_3 = """\
{% for message in messages %}{{ '<|' + message.role + '|>' + '\\n' }}\
{{ message.content + '<|end|>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""
QWEN = """\
{%- macro call(function) -%}
    {{ '\\n<tool_call>\\n{"name": "' ~ function.name }}
    {{- '", "arguments": ' ~ function.arguments | tojson ~ '}' }}
    {{- '\\n</tool_call>' }}
{%- endmacro -%}
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}
        {{- tool | tojson(indent=2) }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = message.content if message.content is defined else '' %}
    {%- if message.role == 'assistant' and message.reasoning_content %}
        {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content.split('</think>')[-1].lstrip('\\n') }}
    {%- for made in message.tool_calls or [] %}
        {{- call(made.function) }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
    {%- if message.role == 'stop' %}{%- break %}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
{%- for document in documents or [] %}{{ document.title ~ ': ' ~ document.text }}{% endfor %}
"""
TEMPLATES = {"llama 3": LLAMA_3, "phi 3": PHI_3, "qwen": QWEN}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'It\'s <b>weather</b> & "more" in München',
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
TEXT = st.text(
    st.sampled_from("ab é\n<>|{}%\t'\"&😀") | st.characters(codec="utf-8"), max_size=20
) | st.sampled_from(["<|im_end|>", "{{ 7 * 7 }}", "{% raw %}", "</think>\nx", "[INST]", ""])


@st.composite
def conversations(draw):
    """Mostly as models expect them; sometimes roles in any order, parts, None, reasoning, calls."""
    messages = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(TEXT)})
    for turn in range(draw(st.integers(1, 4))):
        role = draw(st.sampled_from(["user", "assistant"] * 4 + ["tool", "system"]))
        usual = "assistant" if turn % 2 else "user"
        role = draw(st.sampled_from([usual, usual, usual, role]))
        message = {"role": role, "content": draw(TEXT)}
        if message["role"] == "assistant" and draw(st.booleans()):
            key = draw(st.sampled_from(["reasoning_content", "thinking", "reasoning"]))
            message[key] = draw(TEXT | st.none())
            made = {"name": "weather", "arguments": {"city": draw(TEXT), "days": 3}}
            message["tool_calls"] = draw(st.sampled_from([None, [{"function": made}]]))
        if draw(st.integers(0, 9)) == 0:
            parts = [{"type": "text", "text": draw(TEXT)}, {"type": "image"}]
            message["content"] = draw(st.sampled_from([None, parts]))
        messages.append(message)
    return messages


@cache
def reference(**special):
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_file=str(DEMO), **(special or SPECIAL))


def templates(source, **others):
    chat = Chat({"default": source, **others}, SPECIAL)
    return ChatTemplates(check_chat(to_json(chat), "chat.json"), "chat.json")


@cache
def known(name):
    return templates(TEMPLATES[name])


def render(source, messages=None, **options):
    given = {"add_generation_prompt": False, "variables": {}, **options}
    return templates(source).render(messages or [{"role": "user", "content": "hi"}], **given)


@settings(deadline=None, max_examples=examples(200, 600))
@given(
    name=st.sampled_from(list(TEMPLATES)),
    messages=conversations(),
    add_generation_prompt=st.booleans(),
    tools=st.sampled_from([None, [TOOL], []]),
    variables=st.sampled_from(
        [{}, {"enable_thinking": False}, {"date_string": "1 May"}, {"bos_token": "<B>"}]
    ),
)
def test_the_text_is_that_of_transformers(name, messages, add_generation_prompt, tools, variables):
    options = {"add_generation_prompt": add_generation_prompt, "tools": tools}
    before = json.dumps(messages)
    try:
        expected = reference().apply_chat_template(
            messages, chat_template=TEMPLATES[name], tokenize=False, **options, **variables
        )
    except Exception as error:
        with pytest.raises(UsageError, match=re.escape(str(error))):
            known(name).render(messages, **options, variables=variables)
    else:
        assert known(name).render(messages, **options, variables=variables) == expected
    assert json.dumps(messages) == before, "the caller's messages were changed"


@settings(deadline=None)
@given(
    name=st.sampled_from(list(TEMPLATES)),
    content=TEXT.filter(lambda text: text.strip()),
    parts=st.booleans(),
)
def test_a_message_is_continued_as_by_transformers(name, content, parts):
    said = [{"type": "text", "text": content}] if parts and name == "llama 3" else content
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": said}]

    def render():
        options = {"add_generation_prompt": False, "continue_final_message": True}
        return known(name).render(messages, **options, variables={})

    try:
        expected = reference().apply_chat_template(
            messages, chat_template=TEMPLATES[name], tokenize=False, continue_final_message=True
        )
    except ValueError:
        with pytest.raises(UsageError, match="continue_final_message"):
            render()
    else:
        assert render() == expected


def test_dates_documents_and_json_are_those_of_transformers():
    source = (
        "{{ strftime_now('%Y-%m-%d') }} {{ {'b': \"<'é>\", 'a': [1, none]} | tojson(sort_keys=true) }}"
        "{{ tools }} {{ documents | tojson(indent=1) }} {{ dict(a=1) }} {{ dict.fromkeys('ab') }}"
        "{% for x in [3, 1] | sort %}{{ loop.length }}{{ loop.last }}{{ loop.nextitem }}{% endfor %}"
        "{% for a in none_such %}-{% else %}empty{% endfor %}{{ 'a%sb' % 1 }} {{ 2 ** 9 }} {{ 'ab' * 3 }}"
        "{% set ns = namespace(self=1, x='') %}{% for m in messages recursive %}{{ m.role }}"
        "{{ loop(m.sub or []) }}{% endfor %}{{ ns.self }} {{ '%d %s'|format(3, 'x') }} {{ 1 ~ none ~ 2.5 }}"
        "{% macro m(x) %}[{{ x }}{{ caller() }}]{% endmacro %}{% call m(1) %}in{% endcall %}"
        "{% set block %}a{{ 1 }}b{% endset %}{{ block|upper }} {{ messages | map(attribute='role') | join }}"
        "{{ '{:>5}|{}'.format('x', 3) }} {{ [1, 2] + [3] }} {{ (1, 2) * 2 }} {{ undefined_thing }}"
        "{%- generation -%} {{ messages[0].content | trim }} {%- endgeneration -%}{% set ns.x = ns.x + 'y' %}"
        "{% for i in range(4) %}{% if i == 1 %}{% continue %}{% endif %}{{ ns.x }}{{ i }}{% endfor %}"
        "{{ tools is not none }} {{ tools | tojson }} {{ messages | tojson }}"
    )
    messages = [
        {"role": "user", "content": "x", "sub": [{"role": "inner"}]},
        {"role": "assistant", "reasoning": "r", "content": "y"},
    ]
    options = {"documents": [{"title": "a", "text": "b"}], "tools": [TOOL]}
    expected = reference().apply_chat_template(
        messages, chat_template=source, tokenize=False, **options
    )
    assert render(source, messages, **options) == expected


def test_tools_choose_the_template_and_what_cannot_be_rendered_is_told():
    made = templates("plain", tool_use="with tools", rag="cites")
    given = {"add_generation_prompt": False, "variables": {}}
    messages = [{"role": "user", "content": ""}]
    assert made.render(messages, **given) == "plain"
    assert made.render(messages, **given, tools=[]) == "with tools"
    assert made.render(messages, **given, tools=[TOOL], template="rag") == "cites"
    with pytest.raises(UsageError, match="one of default, rag, tool_use, found 'other'"):
        made.render(messages, **given, template="other")
    number = [{"role": "assistant", "content": 3}]
    tool = [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]
    last = {"continue_final_message": True}
    for source, said, options, message in (
        (LLAMA_3, None, {**last, "add_generation_prompt": True}, "found both"),
        ("nothing", None, last, "expected the last message unchanged"),
        (LLAMA_3, number, last, "expected text as the content of the last message"),
        (LLAMA_3, tool, {}, "chat template 'default': no role tool"),
    ):
        with pytest.raises(UsageError, match=message):
            render(source, said, **options)


@pytest.mark.parametrize(
    "source",
    [
        *("{{ ''['__class__'] }}", "{{ ''|attr('__class__') }}"),
        *("{{ ('' | attr('__class__')).__mro__ }}", "{{ dict.__class__.__mro__ }}"),
        *("{{ [''] | map(attribute='__class__') | first }}", "{{ raise_exception.__globals__ }}"),
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{{ '{x.__class__.__mro__}'.format_map({'x': 1}) }}",
        *("{{ strftime_now.__globals__ }}", "{{ self.__init__.__globals__ }}"),
        *("{{ cycler.__init__.__globals__ }}", "{{ namespace.__init__.__globals__ }}"),
        "{{ namespace.mro() }}{{ namespace._check_name('x').x }}",
        "{% set ns = namespace(_x=1) %}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        *("{{ messages.append(1) }}", "{{ messages[0].update(a=1) }}"),
        *("{% include 'x' %}", "{% import 'os' as os %}"),
    ],
)
def test_a_template_does_not_get_out_of_the_sandbox(source):
    try:
        text = render(source)
    except UsageError as error:
        assert re.search("unsafe|immutable|no attribute|underscore|loader", str(error))  # noqa: PT017
    else:
        assert not text, "what is refused is undefined, which prints as nothing"


ENDLESS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "recursive loop": "{% for a in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "macro that calls itself": "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "printed": "{% for a in range(99999) %}" + "x" * 900 + "{% endfor %}",
    "times": "{{ 'x' * 10 ** 11 }}",
    "list times": "{{ ([0] * 10 ** 11) | length }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "plus": "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "tilde": "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "squares": "{% set n = namespace(x=9) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "set block": "{% set n = namespace(x='ab') %}{% for i in range(99) %}"
    "{% set y %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = y %}{% endfor %}",
    "set block of text": "{% set y %}{% for i in range(99999) %}"
    + "x" * 900
    + "{% endfor %}{% endset %}",
    "center": "{{ 'x' | center(10 ** 11) }}",
    "mapped center": "{{ ['x'] | map('center', 10 ** 11) | list }}",
    "zfill": "{{ '1'.zfill(99999999999) }}",
    "format": "{{ '{:>99999999999}'.format('x') }}",
    "percent": "{{ '%99999999999d' % 1 }}",
    "percent by a value": "{{ '%*d' % (99999999999, 1) }}",
    "format filter": "{{ '%99999999999d' | format(1) }}",
    "indent": "{{ messages | tojson(indent=99999999999) }}",
    "indent filter": "{{ 'x\\nx' | indent(99999999999) }}",
    "batch": "{{ [1] | batch(99999999999, 'x') | list }}",
    "slice": "{{ [1] | slice(99999999999) | list | length }}",
    "random texts": "{{ lipsum(n=9999999) }}",
}


@pytest.mark.parametrize("what", ENDLESS)
def test_a_template_takes_no_server_down(what):
    started = time.perf_counter()
    with pytest.raises(UsageError, match="chat template 'default'"):
        render(ENDLESS[what])
    assert time.perf_counter() - started < 20


WIDE = {
    "format filter": "{{ '%99999999s' | format('x') }}",
    "mapped format filter": "{{ ['%99999999s'] | map('format', 'x') | list }}",
    "percent by name": "{{ '%(a)99999999s' % {'a': 'x'} }}",
    "width by a value": "{{ '{:{}}'.format('x', '99999999') }}",
    "width by two values": "{{ '{0[}]:{1}{2}}'.format({'}': 'x'}, '9999', '9999') }}",
    "bytes": "{{ ('x'.encode() * 99999999) | length }}",
    "bytes of a number": "{{ (1).to_bytes(99999999, 'big') | length }}",
    "date": "{{ strftime_now('%099999999d' ~ 'x' * 999999) }}",
}


@pytest.mark.parametrize("what", WIDE)
def test_what_is_too_wide_is_refused_before_it_is_made(what):
    tracemalloc.start()
    try:
        with pytest.raises(UsageError, match="chat template 'default'"):
            render(WIDE[what])
        assert tracemalloc.get_traced_memory()[1] < 50e6
    finally:
        tracemalloc.stop()


def test_formats_of_usual_widths_are_those_of_python():
    source = (
        "{{ '%-4s|%5.1f' | format('x', 2) }}{{ '{{{:>4}}}'.format('y') }}{{ '%(a)5s' % {'a': 1} }}"
    )
    assert render(source) == "x   |  2.0{   y}    1"


def test_what_is_long_or_shared_is_not_taken_for_endless():
    turns = [{"role": ("user", "assistant")[i % 2], "content": "x" * 4000} for i in range(1000)]
    for name in TEMPLATES:
        text = known(name).render(turns, add_generation_prompt=True, variables={})
        assert 4_000_000 < len(text) < MAX_CHARACTERS
    # Times and ids are larger than any width may be.
    data = {"id": 1790000000000, "at": "2026-11-20 12345678%"}
    source = "{{ id }} {{ id | string }} {{ id ~ at }} {{ [id] | tojson }} {{ at + ' 12345678: %s' % id }}"
    assert render(source, variables=data).startswith("1790000000000 1790000000000 1790000000000")
    made = templates("{% for i in range(60000) %}{% for j in 'ab' %}{% endfor %}{% endfor %}ok")

    work = partial(made.render, add_generation_prompt=False, variables={})
    with ThreadPoolExecutor(8) as pool:  # together more than one of them may
        assert {*pool.map(work, [[{"role": "user", "content": ""}]] * 16)} == {"ok"}


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "messages: expected at least one, found none"),
        ("hello", "messages: expected a list of objects, found str"),
        (["hello"], r"messages\[0\]: expected an object, found str"),
        (
            [{"content": [{"image": object()}]}],
            r"\[0\]\.content\[0\]\.image: .* JSON value, found object",
        ),
    ],
)
def test_messages_of_another_shape_are_a_usage_error(messages, says):
    with pytest.raises(UsageError, match=says):
        templates(LLAMA_3).render(messages, add_generation_prompt=True, variables={})


@pytest.mark.parametrize(
    "source", ["a\nb {% if %}", "a\n{{ 'x }}", "x\n{% endfor %}", "\n{{ x | no_such_filter }}"]
)
def test_a_template_that_does_not_parse_says_its_line(source):
    with pytest.raises(ValueError, match=r"^line 2: "):
        check_template(source)
    with pytest.raises(RejectError, match=r"chat\.json: chat template 'default': line 2: "):
        render(source)
    for wrong in (
        *("{{ " + "(" * 50_000, "{% if x %}" * 5_000 + "{% endif %}" * 5_000),
        "{{ {[]: 1} }}",
    ):
        with pytest.raises(ValueError, match="line 1"):  # and no crash of the parser
            check_template(wrong)


def test_a_bundle_gives_the_tokens_of_transformers_or_says_what_it_lacks(recipe, tmp_path):
    from prejit.compiler.pipeline.pack.bundle_files import layer

    # Transformers would add a token that the vocabulary lacks.
    special = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    chat = to_json(Chat({"default": PHI_3, "tool_use": QWEN}, special))
    chat, tokenizer = (
        layer(CHAT_MEDIA_TYPE, chat, "chat.json"),
        layer(TOKENIZER_MEDIA_TYPE, DEMO.read_bytes(), "tokenizer.json"),
    )
    loaded = load(recipe.layered(lambda own: (*own, chat, tokenizer)).write(tmp_path / "chat"))
    assert loaded.has_chat_template
    messages = [{"role": "user", "content": "def f(x):"}]
    open_ended = [*messages, {"role": "assistant", "content": "Sure, "}]
    for source, said, options in (
        (PHI_3, messages, {}),
        (PHI_3, messages, {"add_generation_prompt": False}),
        (PHI_3, open_ended, {"continue_final_message": True}),
        (QWEN, messages, {"tools": [TOOL], "enable_thinking": False}),
    ):
        theirs = {"add_generation_prompt": "continue_final_message" not in options, **options}
        expected = reference(**special).apply_chat_template(
            said, chat_template=source, return_dict=False, **theirs
        )
        assert loaded.apply_chat_template(said, **options) == expected
    text = loaded.render_chat_template(messages)
    assert text == "<|user|>\ndef f(x):<|end|>\n<|assistant|>\n"
    plain = load(recipe.write(tmp_path / "plain"))
    assert not plain.has_chat_template
    with pytest.raises(UsageError, match="this bundle has no chat template"):
        plain.apply_chat_template(messages)
    bare = load(recipe.layered(lambda own: (*own, chat)).write(tmp_path / "bare"))
    assert bare.render_chat_template(messages).startswith("<|user|>")
    with pytest.raises(UsageError, match="no tokenizer"):
        bare.apply_chat_template(messages)
