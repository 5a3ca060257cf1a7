// A chat with a model, with a key that is pasted, with the waterfall of its last answer beside it.

import { ask, get } from "./api.js";
import { el, say, setText, shown } from "./dom.js";
import { waterfall } from "./waterfall.js";

const CHATS = "/admin/v1/console/chats";
const EVERY_MS = 150;
const RECORD_TRIES = 40;
const conversation = []; // for as long as the page is open

const pause = (ms) => new Promise((go) => setTimeout(go, ms));

export function chatView(view, tell) {
  const key = el("input", { id: "chat-key", type: "password", required: true, maxlength: 256, autocomplete: "off" });
  const models = el("datalist", { id: "models" });
  const model = el("input", { id: "chat-model", list: "models", required: true, maxlength: 512, autocomplete: "off" });
  const most = el("input", { id: "chat-max", inputmode: "numeric", pattern: "\\d{1,6}", value: "256", size: 6 });
  const words = el("textarea", { id: "chat-words", rows: 3, required: true, maxlength: 30000 });
  const send = el("button", { class: "primary" }, "Send");
  const stop = el("button", { type: "button", hidden: true }, "Stop");
  const fresh = el("button", { type: "button" }, "New chat");
  const log = el("div", { class: "messages", role: "log", "aria-label": "Conversation", tabindex: "0" });
  const side = el("section", { class: "card side", "aria-label": "The answer's waterfall" }, el("h2", {}, "Waterfall"),
    el("p", { class: "hint" }, "It is shown once an answer is there."));
  const field = (label, control) => el("label", { for: control.id }, el("span", {}, label), control);
  const form = el("form", { class: "ask" },
    el("div", { class: "filters" }, field("A caller's key", key), field("Model", model), models, field("Tokens at most", most)),
    field("Message", words), el("div", { class: "buttons" }, send, stop, fresh));
  view.append(el("h1", {}, "Chat"),
    el("p", { class: "hint" }, "A request like any other, with a caller's key: its quotas hold, and it is charged to it."),
    el("div", { class: "split" }, el("div", {}, log, form), side));

  let current = null;
  let isLeft = false;
  for (const message of conversation) log.append(bubble(message.role, message.content).element);

  async function choices() {
    const replicas = await get("/admin/v1/replicas?limit=200");
    const names = [...new Set(replicas.data.flatMap((one) => one.models))].sort();
    models.replaceChildren(...names.map((name) => el("option", { value: name })));
    if (!model.value && names.length) model.value = names[0];
  }
  choices().catch(tell);

  function busy(isBusy) {
    send.disabled = isBusy;
    stop.hidden = !isBusy;
  }

  async function run() {
    const mine = { role: "user", content: words.value };
    const body = { key: key.value, model: model.value, messages: [...conversation, mine].slice(-200) };
    if (most.value) body.max_tokens = Number(most.value);
    const { id } = await ask("POST", CHATS, body);
    current = id;
    words.value = "";
    log.append(bubble("user", mine.content).element);
    const answer = bubble("assistant", "");
    log.append(answer.element);
    let text = "";
    const ticks = [];
    let told;
    do {
      await pause(EVERY_MS);
      told = await get(`${CHATS}/${id}?text=${[...text].length}&ticks=${ticks.length}`);
      text += told.text;
      ticks.push(...told.ticks_ms);
      setText(answer.words, text);
      log.scrollTop = log.scrollHeight;
    } while (!told.is_over && !isLeft);
    if (told.problem) answer.element.append(el("p", { class: "problem" }, shown(told.problem)));
    if (!told.problem) conversation.push(mine, { role: "assistant", content: text });
    answer.element.dataset.request = id;
    say(told.problem ?? "The answer is complete.");
    if (!isLeft) await record(id, ticks);
  }

  // The record is written when the request has ended, a moment after its last byte.
  async function record(id, ticks) {
    for (let tries = 0; tries < RECORD_TRIES && !isLeft; tries += 1) {
      const found = await get(`/admin/v1/requests/${id}`).catch(() => null);
      const one = found?.data[0];
      if (one && !one.summary.is_live) {
        side.replaceChildren(el("h2", {}, "Waterfall"),
          el("p", {}, el("a", { class: "id", href: `#/request/${id}` }, id)), waterfall(one, ticks));
        return;
      }
      await pause(EVERY_MS);
    }
  }

  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    busy(true);
    tell(null);
    try {
      await run();
    } catch (error) {
      tell(error);
    }
    current = null;
    busy(false);
  });
  words.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !send.disabled) form.requestSubmit();
  });
  stop.addEventListener("click", () => { if (current) ask("DELETE", `${CHATS}/${current}`).catch(tell); });
  fresh.addEventListener("click", () => {
    conversation.length = 0;
    log.replaceChildren();
    words.focus();
  });
  return () => {
    isLeft = true;
    if (current) ask("DELETE", `${CHATS}/${current}`).catch(() => {});
  };
}

function bubble(role, text) {
  const words = el("div", { class: "words" }, text);
  return { element: el("div", { class: `message ${role}` }, el("p", { class: "role" }, role === "user" ? "You" : "Model"), words), words };
}
