"""The page of a server in a real browser: chat, complete, embed, call, figures, keyboard, narrow windows."""

import json
import time

import httpx
import numpy as np
import pytest
from tests.unit.server.running import running
from tests.webdriver import Browser, missing

from prejit.compiler import Program, build
from prejit.runtime import load
from prejit.runtime.generation.continuous_batch import Batch
from prejit.server.engine.engine import Engine
from prejit.server.gate.api_keys import Keys
from prejit.server.gate.server_settings import Settings
from prejit.server.served.served import Models, Served

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


def powers(x, power, way):
    return x**power if way == "up" else -(x**power)


@pytest.fixture(scope="module")
def bundles(lettered_dir, encoder_dir, recipe, build_cache, tmp_path_factory):
    """The served bundles by name: decoder, sentences, example, powers."""
    directory = tmp_path_factory.mktemp("page-functions")
    static = {"power": (1, 2), "way": ("up", "down")}
    powered = Program("powered", fn=powers, args=["float32[2]"], static=static)
    made = build([powered], directory, name="powers", cache=build_cache, quiet=True)
    paths = (lettered_dir, encoder_dir, recipe.write(directory / "example"), made.path)
    return {one.name: one for one in map(load, paths)}


@pytest.fixture(scope="module")
def models(bundles):
    served = Models(*(Served(name, one, Engine(one), 1) for name, one in bundles.items()))
    yield served
    served.close()


@pytest.fixture(scope="module")
def server(models):
    with running(models, Settings()) as found:
        yield f"127.0.0.1:{found.port}"


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def page(shared, server):
    """The page, just opened. It must not have complained, or sent a request elsewhere, at the end."""
    shared.size(1200, 900)
    shared.scheme("light")
    shared.console(), shared.hosts()
    shared.open(f"http://{server}/")
    shared.wait(lambda: shared.visible("#chat"), "the page")
    yield shared
    assert shared.console() == []
    assert shared.hosts() == {server}


def said(page, selector):
    """The text of the last such element, with its spaces."""
    script = "return [...document.querySelectorAll(arguments[0])].at(-1)?.textContent ?? ''"
    return page.run(script, selector)


def greedy(page, tokens):
    page.click("#options summary")
    page.type("#temperature", "0")
    page.type("#max-tokens", str(tokens))


def slow(monkeypatch, seconds):
    step = Batch.step

    def wait(self, *arguments, **options):
        time.sleep(seconds)
        return step(self, *arguments, **options)

    monkeypatch.setattr(Batch, "step", wait)


ANSWER = "#messages li.assistant .said"
NOTE = "#messages li.assistant .soft"


def test_a_chat_and_a_completion_are_what_the_bundle_says(page, bundles):
    greedy(page, 30)
    bundle, messages = bundles["decoder"], []
    for text in ("ab é <b>12</b>", "abc"):
        messages.append({"role": "user", "content": text})
        page.type("#chat-input", text)
        page.press("Enter")
        shown = f"return messages.children.length === {len(messages) + 1}"
        page.wait(lambda shown=shown: page.run(shown) and said(page, NOTE), "the answer")
        ids = bundle.apply_chat_template(messages)
        answer = bundle.generate(ids, temperature=0, max_new_tokens=30).text
        assert said(page, ANSWER) == answer
        messages.append({"role": "assistant", "content": answer})
    assert said(page, "#messages li.user .said") == "abc"
    assert page.run("return document.querySelectorAll('#messages b').length") == 0
    assert "token" in said(page, NOTE)
    page.click("#clear")
    assert page.run("return messages.children.length") == 0
    page.click("#tab-complete")
    page.type("#prompt", '{"name": ')
    page.click("#complete-send")
    page.wait(lambda: page.text("#completion-stats"), "the completion")
    answer = bundle.generate('{"name": ', temperature=0, max_new_tokens=30).text
    assert said(page, "#completion") == '{"name": ' + answer


def test_text_comes_while_it_is_made_and_stop_ends_it(page, models, monkeypatch):
    slow(monkeypatch, 0.3)  # 15 s, however slow the browser is
    engine = models.get("decoder").engine
    before = engine.metrics().finished["cancelled"]
    greedy(page, 400)
    page.type("#chat-input", "ab")
    page.click("#chat-send")
    first = page.wait(lambda: said(page, ANSWER), "the first piece")
    page.wait(lambda: len(said(page, ANSWER)) > len(first), "more text")
    page.wait(lambda: page.text("#running") == "1", "the figure of running requests")
    page.click("#chat-stop")
    page.wait(lambda: said(page, NOTE).startswith("stopped"), "the end of the answer")
    page.wait(lambda: engine.metrics().running == 0, "the slot")
    assert engine.metrics().finished["cancelled"] == before + 1
    kept = said(page, ANSWER)
    time.sleep(0.2)
    assert said(page, ANSWER) == kept
    page.click("#clear")  # the first answer may be longer than a prompt can be
    page.type("#chat-input", "abc")  # Escape stops, too
    page.press("Enter")
    # A request that is stopped before it is sent would not be counted.
    page.wait(lambda: engine.metrics().running == 1, "the second request")
    page.press("Escape")
    page.wait(lambda: engine.metrics().finished["cancelled"] == before + 2, "the second end")


def test_an_error_is_shown_and_the_page_goes_on(page, shared):
    greedy(page, 5)
    page.run("document.getElementById('chat-input').value = 'ab '.repeat(600)")
    page.click("#chat-send")
    page.wait(lambda: page.visible("#error"), "the error")
    assert "512" in page.text("#error")
    assert [message for message in shared.console() if "400" not in message] == []
    page.type("#chat-input", "ab")
    page.click("#chat-send")
    page.wait(lambda: said(page, NOTE), "the answer")
    assert not page.visible("#error")


def test_a_function_is_called_with_what_the_form_has(page, bundles, shared):
    page.choose("#model", "example")
    page.wait(lambda: page.visible("#call"), "the form")
    page.choose("#function", "score")
    page.wait(lambda: page.visible("#input-0"), "the input")
    assert json.loads(page.run("return document.getElementById('input-0').value")) == [[0] * 16]
    given = [[1.5] * 16, [0.25, *[0] * 15]]
    page.type("#input-0", json.dumps(given))
    page.click("#call-form button")
    page.wait(lambda: page.visible("#results pre"), "the result")
    expected = bundles["example"].call("score", x=np.array(given, np.float32))
    shown = [list(map(float, line.split())) for line in said(page, "#results pre").splitlines()]
    assert np.allclose(shown, expected, rtol=1e-5)
    assert "[2, 4]" in page.text("#results")
    page.type("#input-0", "[[1], [1, 2]]")
    page.click("#call-form button")
    page.wait(lambda: page.visible("#error"), "the error of the form")
    assert page.text("#error") == "x: rows have different lengths"
    page.type("#input-0", "[[1, 2]]")
    page.click("#call-form button")
    page.wait(lambda: "16" in page.text("#error"), "the error of the server")
    assert [message for message in shared.console() if "400" not in message] == []


@pytest.mark.thorough
def test_static_arguments_are_chosen_among_those_of_the_bundle(page):
    page.choose("#model", "powers")
    page.wait(lambda: page.visible("#input-0"), "the form")
    selects = "[...document.querySelectorAll('#inputs select')]"
    offered = f"return {selects}.map(each => each.innerText.split('\\n'))"
    assert page.run(offered) == [["1", "2"], ["up", "down"]]
    page.type("#input-0", "[3, 4]")
    for chosen, result in (({}, "3  4"), ({"power": "'2'", "way": "'\"down\"'"}, "-9  -16")):
        for name, value in chosen.items():
            page.click(f'#inputs select[data-name="{name}"] option[value={value}]')
        page.click("#call-form button")
        page.wait(lambda result=result: said(page, "#results pre") == result, "the result")


def test_the_bundle_its_programs_and_the_figures_of_its_engine_are_shown(page, bundles, models):
    bundle = bundles["decoder"]
    page.wait(lambda: page.text("#bundle-name") == "decoder", "the bundle")
    assert page.run("return digest.title") == bundle.digest
    shown = {each: page.text(f"#{each}") for each in ("matched", "context", "state")}
    assert shown == {"matched": "matches", "context": "512 tokens", "state": "ready"}
    for name, version in bundle.config.versions.items():
        assert f"{name} {version}" in page.text("#versions")
    page.click("aside details summary")
    names = page.run("return [...programs.rows].map(row => row.cells[0].textContent)")
    assert names == [each.program for each in bundle.report()]
    greedy(page, 5)
    page.type("#chat-input", "ab")
    page.press("Enter")
    page.wait(lambda: said(page, NOTE), "the answer")
    metrics = models.get("decoder").engine.metrics()
    done = sum(metrics.finished[reason] for reason in ("stop", "length", "context", "mask"))
    page.wait(lambda: page.text("#finished") == str(done), "the number of requests")
    assert page.text("#slots") == f"of {metrics.slots}"
    assert page.text("#first-p50").endswith("s")
    assert page.text("#waited") == str(sum(each.waited_for_compile for each in metrics.requests))


def test_sentences_become_a_table_and_an_encoder_has_own_figures(page, bundles, models, server):
    page.size(920, 900)
    page.choose("#model", "sentences")
    page.wait(lambda: page.visible("#embed"), "the form")
    assert not page.visible("#tab-chat")
    page.type("#sentences", "a b c\nx y\n\na b")
    page.click("#embed button")
    page.wait(lambda: page.visible("#similarity"), "the table")
    vectors = bundles["sentences"].encode(["a b c", "x y", "a b"])
    assert np.abs(np.array(page.run(CELLS), float) - vectors @ vectors.T).max() <= 0.0051
    assert page.text("#embedding-stats").startswith("3 \u00d7 12 numbers")
    done = str(models.get("sentences").engine.metrics().finished["done"])
    page.wait(lambda: page.text("#finished") == done, "the number of requests")
    assert page.text("#rate-label") == "Requests a second"
    assert page.text("#whole-p50").endswith("s")
    cells = [page.text(f"#calls tr td:nth-child({place})") for place in (1, 2)]
    assert cells == ["encode", done]
    wide = "calls.closest('.wide')"
    assert page.run(f"return {wide}.scrollWidth <= {wide}.clientWidth")
    card = httpx.get(f"http://{server}/v1/models/sentences", timeout=60).json()
    assert page.text("#context") == f"{card['max_model_len']} tokens"
    for text in ("#kv", "#first-p50", "#inter-p95", "#cached"):
        assert not page.visible(text)
    page.choose("#model", "decoder")
    page.wait(lambda: page.visible("#kv"), "the figures of a decoder")
    assert not page.visible("#whole-p50")
    assert not page.visible("#calls-card")


def test_the_keyboard_is_enough(page):
    def focus():
        return page.run("const e = document.activeElement; return e.id || e.localName")

    page.run("document.getElementById('tab-chat').focus()")
    page.press("ArrowRight")
    assert (page.visible("#complete"), page.visible("#chat")) == (True, False)
    # Around the end, past the tabs that this bundle has not.
    for key, expected in (("", "tab-complete"), ("ArrowRight", "tab-chat"), ("Tab", "summary")):
        if key:
            page.press(key)
        assert focus() == expected
    page.press("Tab")
    assert focus() == "chat-input"
    outlined = "return getComputedStyle(document.activeElement).outlineStyle"
    assert page.run(outlined) == "solid"


def test_a_page_is_readable_in_a_narrow_window_and_both_schemes(page):
    page.size(400, 800)
    page.type("#chat-input", "x" * 300)
    page.press("Enter")
    page.wait(lambda: said(page, ANSWER), "the answer")
    page.click("aside details summary")
    assert page.run("return document.documentElement.scrollWidth") <= 400
    assert page.run(SMALL) == []
    for scheme in ("light", "dark"):
        page.scheme(scheme)
        for selector in ("body", ".soft", "#tab-chat", "#chat-send", "#error", "dt", "label"):
            assert page.run(CONTRAST, selector) >= 4.5, (scheme, selector)


CELLS = "return [...similarity.rows].slice(1).map((row) => [...row.cells].slice(1).map((c) => c.innerText))"
SMALL = """
return [...document.querySelectorAll('button, select, summary')]
  .filter((each) => each.checkVisibility() && each.getBoundingClientRect().height < 20)
  .map((each) => each.outerHTML);
"""
CONTRAST = """
const element = document.querySelector(arguments[0]);
const parse = (text) => text.match(/[\\d.]+/g).map(Number);
const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
  .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
  .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
let ground = element;
while (ground && parse(getComputedStyle(ground).backgroundColor)[3] === 0) ground = ground.parentElement;
const a = light(parse(getComputedStyle(element).color));
const b = light(parse(getComputedStyle(ground ?? document.body).backgroundColor));
return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
"""
"""The ratio of WCAG 2 between the colour of a text and its ground."""


def test_a_server_with_keys_gets_one(shared, models, tmp_path):
    (tmp_path / "keys.txt").write_text("ann: opensesame\n")
    with running(models, Settings(keys=Keys(tmp_path / "keys.txt"))) as found:
        shared.open(found.url)
        shared.wait(lambda: shared.visible("#chat"), "the page")
        shared.type("#chat-input", "ab")
        shared.press("Enter")
        shared.wait(lambda: shared.visible("#key"), "the form for a key")
        shared.type("#key", "opensesame")
        shared.click("#key-form button")
        shared.type("#chat-input", "ab")
        shared.press("Enter")
        shared.wait(lambda: said(shared, NOTE), "the answer")
        shared.open("about:blank")
    assert [message for message in shared.console() if "401" not in message] == []


@pytest.mark.thorough
def test_a_page_that_is_open_before_the_bundles_are_loaded_finds_them(shared, bundles, models):
    later = Models()
    with running(later, Settings()) as found:
        shared.open(found.url)
        shared.wait(lambda: shared.text("#state") == "loading", "the state")
        later.add(*models)
        later.change("loading", "ready")
        shared.wait(lambda: shared.visible("#chat"), "the form")
        assert shared.text("#state") == "ready"
        shared.open("about:blank")
    assert shared.console() == []
