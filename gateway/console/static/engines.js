// The engines' own figures, live: what waits, what runs, the pages, the steps, the tokens.

import { poll, watch } from "./api.js";
import { el, setText, shown } from "./dom.js";
import { whole } from "./format.js";
import { plot } from "./plot.js";

const EVERY_MS = 1000;
const POINTS_MAX = 300;
const CLASSES = ["priority", "default", "flex"];

export function enginesView(view, tell) {
  const cards = new Map();
  const list = el("div", { class: "cards" });
  const empty = el("p", { class: "hint" }, "Loading.");
  view.append(el("h1", {}, "Engines"), empty, list);

  const ask = watch();

  async function refresh() {
    const { data, has_more } = await ask("/admin/v1/engines");
    for (const one of data) {
      let card = cards.get(one.id);
      if (card === undefined) {
        card = cardOf(one.id);
        cards.set(one.id, card);
        list.append(card.element);
        card.draw();
      }
      update(card, one);
    }
    for (const [id, card] of cards) {
      if (!data.some((one) => one.id === id)) { card.plot.close(); card.element.remove(); cards.delete(id); }
    }
    setText(empty, data.length === 0 ? "No engine is known." : has_more ? "There are more engines than are asked." : "");
  }
  const stop = poll(refresh, EVERY_MS, tell);
  return () => {
    stop();
    for (const card of cards.values()) card.plot.close();
  };
}

function cardOf(id) {
  const names = ["Running", "Waiting", "Stalled", "Step, ms", "Tokens/s", "Prompt tokens/s", "Cache hits, %", "Preemptions"];
  const facts = Object.fromEntries(names.map((name) => [name, el("dd", {}, "-")]));
  const state = el("p", { class: "hint" });
  const pages = el("div", { class: "pages", role: "img" });
  const parts = ["owned", "cached", "free"].map((name) => el("span", { class: name }));
  pages.append(...parts);
  const queue = el("tbody");
  const pagesText = el("p", { class: "hint" });
  const box = el("div", { class: "plot", role: "img", "aria-label": `Tokens per second and running sequences of ${shown(id)}` });
  const element = el("section", { class: "card", "aria-label": `Engine ${shown(id)}` },
    el("h2", {}, shown(id)), state,
    el("dl", { class: "facts" }, names.map((name) => el("div", {}, el("dt", {}, name), facts[name]))),
    el("h3", {}, "Pages of the KV cache"), pages, pagesText,
    el("h3", {}, "Queue by class"),
    el("table", { class: "queue" }, el("caption", { class: "quiet" }, "Sequences that wait for a slot, by service class"),
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Class"), el("th", { scope: "col", class: "num" }, "Waiting"))), queue),
    el("h3", {}, el("span", { class: "swatch" }), "Tokens/s", el("span", { class: "swatch running" }), "Running"), box);
  const card = { element, facts, state, parts, pages, pagesText, queue, box, points: [[], [], []], plot: null };
  card.draw = () => {
    card.plot = plot(box, [{ colour: "--engine" }, { colour: "--gateway", scale: "n", dash: [4, 4] }], [{ scale: "y" }, { scale: "n", side: 1 }], 4);
  };
  return card;
}

function update(card, one) {
  const told = one.figures ?? {};
  setText(card.state, [one.models.map((name) => shown(name)).join(", "), one.phase, one.health, `${whole(one.requests)} requests of this gateway`, one.problem].filter(Boolean).join(" - "));
  const waiting = told.waiting ?? {};
  const sum = Object.values(waiting).reduce((a, b) => a + b, 0);
  const values = {
    "Running": whole(told.running), "Waiting": one.figures ? whole(sum) : "", "Stalled": whole(told.stalled),
    "Step, ms": told.step_ms === undefined ? "idle" : told.step_ms.toFixed(2),
    "Tokens/s": told.generated_per_s === undefined ? "" : told.generated_per_s.toFixed(1),
    "Prompt tokens/s": told.prompt_per_s === undefined ? "" : told.prompt_per_s.toFixed(1),
    "Cache hits, %": told.cache_hit_percent === undefined ? "" : told.cache_hit_percent.toFixed(1),
    "Preemptions": whole(told.preemptions),
  };
  for (const [name, text] of Object.entries(values)) setText(card.facts[name], text || "-");
  const { owned = 0, cached = 0, free = 0 } = told.pages ?? {};
  const all = owned + cached + free;
  [owned, cached, free].forEach((count, at) => { card.parts[at].style.flexGrow = String(all ? count : at === 2 ? 1 : 0); });
  const text = `${whole(owned)} owned, ${whole(cached)} cached, ${whole(free)} free`;
  setText(card.pagesText, all ? text : "Not told.");
  card.pages.setAttribute("aria-label", text);
  card.queue.replaceChildren(...CLASSES.map((name) => el("tr", {}, el("th", { scope: "row" }, name), el("td", { class: "num" }, whole(waiting[name] ?? 0)))));
  const [times, tokens, running] = card.points;
  times.push(Date.now() / 1e3);
  tokens.push(told.generated_per_s ?? null);
  running.push(told.running ?? null);
  if (times.length > POINTS_MAX) for (const values_ of card.points) values_.shift();
  card.plot.set(card.points);
}
