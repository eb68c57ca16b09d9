// The page of a prejit server. It has no dependencies and loads nothing but the endpoints of this server.
// Text of models and users enters the document as text only, never as HTML.

const $ = (id) => document.getElementById(id);

/** Return a new element with these properties and children; a child that is a string becomes text. */
function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

const FIGURES_EVERY_MS = 1000;
const PROGRAMS_EVERY_MS = 10000;
const SPARK_POINTS = 60;

const page = { models: [], model: null, key: "", conversation: [], stream: null, last: null, rates: [], listed: 0 };

// ---------------------------------------------------------------- requests

class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function request(path, body, signal) {
  const headers = { Accept: "application/json" };
  if (page.key) headers.Authorization = `Bearer ${page.key}`;
  const options = { headers, signal };
  if (body !== undefined) {
    headers["Content-Type"] = "application/json";
    options.method = "POST";
    options.body = JSON.stringify(body);
  }
  const response = await fetch(path, options);
  if (response.ok) return response;
  throw new Refused(response.status, messageOf(await response.text()) || `status ${response.status}`);
}

function messageOf(text) {
  try {
    const error = JSON.parse(text).error;
    return typeof error === "string" ? error : error.message;
  } catch {
    return text.slice(0, 500);
  }
}

const get = async (path) => (await request(path)).json();

/** Yield the objects of a stream of server-sent events, until `[DONE]`. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += value;
      const lines = rest.split(/\r?\n/);
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new Refused(500, messageOf(data));
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // closes the connection, so that the server frees the slot
  }
}

function complain(error) {
  if (error.name === "AbortError") return;
  if (error.status === 401) $("key-form").hidden = false;
  $("error").textContent = error.message;
  $("error").hidden = false;
}

function calm() {
  $("error").hidden = true;
}

// ---------------------------------------------------------------- chat and completion

function generationOptions() {
  const options = { stream: true, stream_options: { include_usage: true }, model: page.model.name };
  for (const [name, id] of [["max_tokens", "max-tokens"], ["temperature", "temperature"], ["seed", "seed"]]) {
    if ($(id).value !== "") options[name] = Number($(id).value);
  }
  return options;
}

/** Send a request and call `write` with each piece of text. Return how it ended, in words. */
async function generate(path, body, textOf, write) {
  const started = performance.now();
  let first = null, pieces = 0, reason = "stopped", usage = null;
  page.stream = new AbortController();
  try {
    for await (const event of events(await request(path, body, page.stream.signal))) {
      usage = event.usage ?? usage;
      const choice = event.choices?.[0];
      if (!choice) continue;
      const text = textOf(choice);
      if (text) {
        first ??= performance.now();
        pieces += 1;
        write(text);
      }
      reason = choice.finish_reason ?? reason;
    }
  } catch (error) {
    if (error.name !== "AbortError") throw error;
  } finally {
    page.stream = null;
  }
  return summary(reason, usage?.completion_tokens ?? pieces, usage, started, first);
}

function summary(reason, tokens, usage, started, first) {
  const parts = [reason, `${tokens} ${tokens === 1 ? "token" : "tokens"}`];
  if (first !== null) {
    const seconds = (performance.now() - first) / 1000;
    parts.push(`first after ${duration((first - started) / 1000)}`);
    if (tokens > 1 && seconds > 0) parts.push(`${Math.round((tokens - 1) / seconds)} tokens/s`);
  }
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  if (cached) parts.push(`${cached} of ${usage.prompt_tokens} prompt tokens cached`);
  return parts.join(" · ");
}

function busy(name, running) {
  $(`${name}-stop`).hidden = !running;
  $(`${name}-send`).disabled = running;
}

async function sendChat(event) {
  event.preventDefault();
  const text = $("chat-input").value.trim();
  if (!text || page.stream) return;
  calm();
  $("chat-input").value = "";
  addMessage("user", text);
  page.conversation.push({ role: "user", content: text });
  const system = $("system").value.trim();
  const messages = system ? [{ role: "system", content: system }, ...page.conversation] : [...page.conversation];
  const answer = addMessage("assistant", "");
  answer.text.classList.add("live");
  busy("chat", true);
  try {
    const said = await generate("v1/chat/completions", { ...generationOptions(), messages },
      (choice) => choice.delta?.content, (piece) => append(answer.text, piece));
    answer.note.textContent = said;
    page.conversation.push({ role: "assistant", content: answer.text.textContent });
  } catch (error) {
    page.conversation.pop(); // the question stays on the page, and may be sent again
    if (!answer.text.textContent) answer.item.remove();
    complain(error);
  } finally {
    answer.text.classList.remove("live");
    busy("chat", false);
    $("chat-input").focus();
  }
}

function addMessage(role, content) {
  const text = element("p", { className: "said" }, content);
  const note = element("p", { className: "soft" });
  const item = element("li", { className: role }, text, note);
  $("messages").append(item);
  return { item, text, note };
}

/** Add text, and keep the end in view if the reader is there. */
function append(element, piece) {
  const low = window.innerHeight + window.scrollY >= document.body.scrollHeight - 60;
  element.append(piece);
  if (low) window.scrollTo(0, document.body.scrollHeight);
}

async function sendPrompt(event) {
  event.preventDefault();
  if (page.stream) return;
  calm();
  const prompt = $("prompt").value;
  const made = element("span", { className: "live" });
  $("completion").replaceChildren(element("span", { className: "given" }, prompt), made);
  $("completion-stats").textContent = "";
  $("completion-card").hidden = false;
  busy("complete", true);
  try {
    $("completion-stats").textContent = await generate("v1/completions", { ...generationOptions(), prompt },
      (choice) => choice.text, (piece) => append(made, piece));
  } catch (error) {
    complain(error);
  } finally {
    made.classList.remove("live");
    busy("complete", false);
  }
}

// ---------------------------------------------------------------- embeddings

async function embed(event) {
  event.preventDefault();
  calm();
  const sentences = $("sentences").value.split("\n").map((line) => line.trim()).filter(Boolean);
  if (!sentences.length) return;
  const started = performance.now();
  try {
    const answer = await (await request("v1/embeddings", { model: page.model.name, input: sentences })).json();
    const vectors = answer.data.map((one) => one.embedding);
    drawSimilarity(sentences, vectors);
    $("embedding-stats").textContent = [`${vectors.length} × ${vectors[0].length} numbers`,
      `${answer.usage?.prompt_tokens ?? "?"} tokens`, duration((performance.now() - started) / 1000)].join(" · ");
    $("embedding-card").hidden = false;
  } catch (error) {
    complain(error);
  }
}

function cosine(a, b) {
  let dot = 0, aa = 0, bb = 0;
  a.forEach((x, i) => { dot += x * b[i]; aa += x * x; bb += b[i] * b[i]; });
  return dot / Math.sqrt(aa * bb || 1);
}

function drawSimilarity(sentences, vectors) {
  const rows = sentences.map((sentence, i) => {
    const head = element("th", { scope: "row", title: sentence }, `${i + 1}. ${sentence}`);
    return element("tr", {}, head, ...vectors.map((other) => {
      const value = cosine(vectors[i], other);
      const cell = element("td", {}, value.toFixed(2));
      cell.style.backgroundColor = `color-mix(in srgb, var(--accent) ${Math.round(Math.max(0, value) * 45)}%, transparent)`;
      return cell;
    }));
  });
  const heads = sentences.map((_, i) => element("th", { scope: "col" }, String(i + 1)));
  const top = element("tr", {}, element("td"), ...heads);
  $("similarity").replaceChildren(top, ...rows);
}

// ---------------------------------------------------------------- functions

async function describeFunction() {
  calm();
  $("result-card").hidden = true;
  $("inputs").replaceChildren();
  if (!$("function").value) return;
  try {
    const described = await get(functionPath());
    const fixed = Object.entries(page.model.static[$("function").value]).map(([name, values]) => {
      const choice = element("select", {}, ...values.map((value) => new Option(value, JSON.stringify(value))));
      choice.dataset.name = name;
      return element("label", {}, `${name} `, choice);
    });
    $("inputs").replaceChildren(...fixed, ...described.inputs.map((input, i) => {
      const shape = input.shape.map((size) => (size < 1 ? 1 : size));
      const value = JSON.stringify(filled(shape, input.datatype === "BOOL" ? true : 0)); // a mask is true
      const area = element("textarea", { id: `input-${i}`, className: "mono", value });
      area.rows = 3;
      Object.assign(area.dataset, { name: input.name, datatype: input.datatype });
      const extents = input.shape.map((s) => (s < 1 ? "any" : s)).join(", ");
      return element("label", {}, `${input.name} · ${input.datatype} [${extents}]`, area);
    }));
  } catch (error) {
    complain(error);
  }
}

/** A program is the model BUNDLE.PROGRAM of the Open Inference Protocol. */
const functionPath = () => `v2/models/${encodeURIComponent(`${page.model.name}.${$("function").value}`)}`;

const filled = (shape, value) =>
  shape.length ? Array.from({ length: shape[0] }, () => filled(shape.slice(1), value)) : value;

/** Return the shape of a nested list; throws where its rows have different lengths. */
function shapeOf(value, name) {
  if (!Array.isArray(value)) return [];
  const inner = value.map((each) => shapeOf(each, name));
  if (inner.some((each) => String(each) !== String(inner[0]))) throw new Error(`${name}: rows have different lengths`);
  return [value.length, ...(inner[0] ?? [])];
}

async function call(event) {
  event.preventDefault();
  calm();
  const started = performance.now();
  try {
    const inputs = [...$("inputs").querySelectorAll("textarea")].map((area) => {
      const { name, datatype } = area.dataset;
      let value;
      try {
        value = JSON.parse(area.value);
      } catch (error) {
        throw new Error(`${name}: expected numbers as JSON: ${error.message}`);
      }
      return { name, datatype, shape: shapeOf(value, name), data: [value].flat(Infinity) };
    });
    const choices = [...$("inputs").querySelectorAll("select")];
    const parameters = Object.fromEntries(choices.map((each) => [each.dataset.name, JSON.parse(each.value)]));
    const answer = await (await request(`${functionPath()}/infer`, { inputs, parameters })).json();
    $("results").replaceChildren(...answer.outputs.flatMap((output) => [
      element("p", { className: "soft" }, `${output.name} · ${output.datatype} [${output.shape.join(", ")}]`),
      element("pre", {}, nested(output.data, output.shape)),
    ]));
    $("call-stats").textContent = duration((performance.now() - started) / 1000);
    $("result-card").hidden = false;
  } catch (error) {
    complain(error);
  }
}

/** Return flat values as nested rows of text; long ones end with an ellipsis. */
function nested(data, shape) {
  const flat = data.flat(Infinity);
  const shown = flat.slice(0, 4096).map((x) => (Number.isInteger(x) || typeof x !== "number" ? x : Number(x.toPrecision(7))));
  const more = flat.length > shown.length ? `\n… ${flat.length - shown.length} more` : "";
  const width = shape.length ? shape[shape.length - 1] || 1 : 1;
  const lines = [];
  for (let at = 0; at < shown.length; at += width) lines.push(shown.slice(at, at + width).join("  "));
  return lines.join("\n") + more;
}

// ---------------------------------------------------------------- live figures

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.01) return `${(seconds * 1000).toFixed(1)} ms`;
  return seconds < 1 ? `${Math.round(seconds * 1000)} ms` : `${seconds.toFixed(2)} s`;
}

function bytes(count) {
  if (!count) return "0 B";
  const power = Math.min(4, Math.floor(Math.log2(count) / 10));
  const value = count / 1024 ** power;
  return `${value.toFixed(value < 10 && power ? 1 : 0)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

const percent = (share) => `${Math.round(share * 100)} %`;

async function refreshFigures() {
  try {
    const { state, models } = await get("page/figures");
    showState(state);
    if (models[page.model.name]) showFigures(models[page.model.name]);
  } catch {
    showState("not reachable");
    page.last = null;
  }
}

function showState(state) {
  $("state").textContent = state;
  $("state").className = `badge ${state === "ready" ? "good" : "bad"}`;
}

/** Show the figures that make sense: an encoder or a function has no tokens and no KV cache. */
function showFigures(now) {
  const hasText = now.slots !== null;
  for (const one of document.querySelectorAll(".of-text")) one.hidden = !hasText;
  for (const one of document.querySelectorAll(".of-calls")) one.hidden = hasText;
  const at = performance.now();
  const done = hasText ? now.generation_tokens : now.finished;
  if (page.last && done >= page.last.done) {
    page.rates.push(((done - page.last.done) * 1000) / (at - page.last.at));
    page.rates.splice(0, page.rates.length - SPARK_POINTS);
  }
  page.last = { done, at };
  const texts = {
    running: now.running, waiting: now.waiting, slots: hasText ? `of ${now.slots}` : "", queue: `of ${now.queue_size}`,
    "rate-label": hasText ? "Tokens a second" : "Requests a second",
    "whole-p50": duration(now.whole_p50), "whole-p95": duration(now.whole_p95), "queue-p95": duration(now.queue_p95),
    rate: page.rates.length ? Math.round(page.rates.at(-1)) : "–",
    "first-p50": duration(now.first_token_p50), "first-p95": duration(now.first_token_p95),
    "inter-p50": duration(now.inter_token_p50), "inter-p95": duration(now.inter_token_p95),
    kv: percent(now.kv_cache_usage), cache: `of ${bytes(now.cache_bytes)}`, finished: now.finished,
    failed: now.failed ? `${now.failed} failed` : "",
    cached: now.prompt_tokens ? percent(now.cached_prompt_tokens / now.prompt_tokens) : "–",
    memory: bytes(now.device_memory_bytes ?? now.host_memory_bytes), waited: now.waited_for_compile,
  };
  for (const [id, text] of Object.entries(texts)) $(id).textContent = text;
  $("kv-meter").value = now.kv_cache_usage;
  showCalls(now.calls);
  const top = Math.max(1, ...page.rates);
  const x = (i) => 120 - (page.rates.length - 1 - i) * (120 / (SPARK_POINTS - 1));
  const line = page.rates.map((rate, i) => `${x(i).toFixed(1)},${(27 - (rate / top) * 26).toFixed(1)}`);
  const [area, curve] = $("spark").children;
  curve.setAttribute("points", line.join(" "));
  area.setAttribute("points", line.length ? [`${x(0).toFixed(1)},27`, ...line, "120,27"].join(" ") : "");
}

function showCalls(calls) {
  $("calls-card").hidden = !calls.length;
  $("calls").replaceChildren(...calls.map((one) => {
    const figures = [one.finished, one.failed, duration(one.whole_p50), duration(one.whole_p95), duration(one.queue_p95),
      one.rows_per_run?.toFixed(1) ?? "–", one.padding === null ? "–" : percent(one.padding)];
    const cells = figures.map((text) => element("td", { className: "num", textContent: text }));
    return element("tr", {}, element("td", {}, one.program), ...cells);
  }));
}

// ---------------------------------------------------------------- the bundle

async function refreshModels() {
  try {
    const { state, models } = await get("page/models");
    showState(state);
    page.models = models;
    page.listed = performance.now();
  } catch {
    showState("not reachable");
    return;
  }
  if (!page.models.length) return;
  const name = page.model?.name ?? page.models[0].name;
  const found = page.models.find((one) => one.name === name) ?? page.models[0];
  const isNew = page.model?.digest !== found.digest;
  page.model = found;
  if (isNew) $("model").replaceChildren(...page.models.map((one) => new Option(one.name, one.name, false, one === found)));
  $("model-label").hidden = page.models.length < 2;
  showBundle(found);
  if (isNew) showTabs(found);
}

function showBundle(model) {
  document.title = `${model.name} · prejit`;
  const loaded = model.programs.reduce((sums, one) => sums.set(one.source, (sums.get(one.source) ?? 0) + 1), new Map());
  const texts = {
    "bundle-name": model.bundle, target: model.target, matched: model.matched ? "matches" : "compiled here",
    context: model.max_tokens ? `${model.max_tokens} tokens` : "–", "load-seconds": duration(model.load_seconds),
    versions: Object.entries(model.versions).map((one) => one.join(" ")).join(", "),
    "program-sums": [...loaded].map(([source, count]) => `${count} ${source}`).join(", ") || "none",
    digest: model.digest.slice(0, 19) + "…",
  };
  for (const [id, text] of Object.entries(texts)) $(id).textContent = text;
  $("digest").title = model.digest;
  $("matched").className = `badge ${model.matched ? "good" : "bad"}`;
  $("programs").replaceChildren(...model.programs.map((one) => element("tr", {}, element("td", {}, one.program),
    element("td", {}, one.source), element("td", { className: "num" }, one.seconds.toFixed(3)))));
}

function showTabs(model) {
  const can = { chat: model.chat, complete: model.complete, embed: model.embed, call: model.calls.length > 0 };
  for (const [name, shown] of Object.entries(can)) $(`tab-${name}`).hidden = !shown;
  $("function").replaceChildren(...model.calls.map((name) => new Option(name, name)));
  if (can.call) describeFunction();
  page.rates = [];
  page.last = null;
  newChat();
  const first = Object.keys(can).find((name) => can[name]);
  $("nothing").hidden = Boolean(first);
  select(first);
}

function select(name) {
  for (const tab of $("tabs").children) {
    const chosen = tab.id === `tab-${name}`;
    tab.setAttribute("aria-selected", chosen);
    tab.tabIndex = chosen ? 0 : -1;
    $(tab.id.slice(4)).hidden = !chosen;
  }
  $("options").hidden = name !== "chat" && name !== "complete";
  $("system-label").hidden = name !== "chat";
  calm();
}

function turnTabs(event) {
  const tabs = [...$("tabs").children].filter((tab) => !tab.hidden);
  const step = { ArrowRight: 1, ArrowLeft: -1, Home: -tabs.length, End: tabs.length }[event.key];
  if (!step) return;
  event.preventDefault();
  const at = tabs.indexOf(document.activeElement);
  const wanted = Math.abs(step) > 1 ? (step > 0 ? tabs.length - 1 : 0) : (at + step + tabs.length) % tabs.length;
  select(tabs[wanted].id.slice(4));
  tabs[wanted].focus();
}

function newChat() {
  page.stream?.abort();
  page.conversation = [];
  $("messages").replaceChildren();
}

// ---------------------------------------------------------------- wiring

for (const tab of $("tabs").children) tab.addEventListener("click", () => select(tab.id.slice(4)));
$("tabs").addEventListener("keydown", turnTabs);
$("model").addEventListener("change", () => {
  page.model = page.models.find((one) => one.name === $("model").value);
  showBundle(page.model);
  showTabs(page.model);
  refreshFigures();
});
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  page.key = $("key").value.trim();
  $("key-form").hidden = true;
  calm();
  if (page.model?.calls.length) describeFunction();
});
$("chat-form").addEventListener("submit", sendChat);
$("chat-input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) sendChat(event);
});
$("complete-form").addEventListener("submit", sendPrompt);
$("embed-form").addEventListener("submit", embed);
$("call-form").addEventListener("submit", call);
$("function").addEventListener("change", describeFunction);
$("clear").addEventListener("click", newChat);
for (const name of ["chat", "complete"]) $(`${name}-stop`).addEventListener("click", () => page.stream?.abort());
document.addEventListener("keydown", (event) => event.key === "Escape" && page.stream?.abort());

async function refresh() {
  if (!document.hidden) {
    const isOld = performance.now() - page.listed > PROGRAMS_EVERY_MS;
    if (!page.model || isOld) await refreshModels();
    if (page.model) await refreshFigures();
  }
  setTimeout(refresh, FIGURES_EVERY_MS);
}

refresh();
