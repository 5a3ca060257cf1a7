// The last hours by the minute: how much, how fast, what failed, and how full the engines were.

import { poll, watch } from "./api.js";
import { el, setText, shown, silent } from "./dom.js";
import { requestsPage } from "./find.js";
import { duration, percent, whole, zoneOf } from "./format.js";
import { plot } from "./plot.js";

const EVERY_MS = 5000;
const HOURS = [["0.25", "15 minutes"], ["1", "1 hour"], ["3", "3 hours"], ["6", "6 hours"]];
const MINUTE_MS = 60e3;
const COLOURS = ["--gateway", "--engine", "--live", "--wait", "--bad"];
const LINES_MAX = 5;

// Title, lines, what the axis says, and the least height of the axis.
const GRAPHS = [
  ["Requests a second", [["all", "--gateway"], ["failed", "--bad"]], undefined, 0.1],
  ["First token", [["p50", "--gateway"], ["p99", "--engine"]], duration, 1],
  ["Time per token", [["p50", "--gateway"], ["p99", "--engine"]], duration, 1],
  ["Tokens a second", [["in", "--gateway"], ["out", "--engine"]], undefined, 1],
  ["Prompt tokens from the prefix cache", [["share", "--gateway"]], (value) => `${value} %`, 100],
];

// A quantile of counts in buckets, within one of which it is taken to be spread evenly.
export function quantile(counts, edges, share) {
  const total = counts.reduce((sum, one) => sum + one, 0);
  if (total === 0) return null;
  let left = share * total;
  for (let at = 0; at < counts.length; at += 1) {
    if (counts[at] > 0 && left <= counts[at]) {
      const from = at ? edges[at - 1] : 0;
      return from + (edges[at] - from) * (left / counts[at]);
    }
    left -= counts[at];
  }
  return edges.at(-1);
}

function sumOf(rows, buckets) {
  const sum = { requests: 0, failed: 0, prompt: 0, cached: 0, completion: 0, errors: new Map(), first: new Array(buckets).fill(0), gaps: new Array(buckets).fill(0) };
  for (const row of rows) {
    sum.requests += row.requests ?? 0;
    sum.prompt += row.prompt_tokens ?? 0;
    sum.cached += row.cached_tokens ?? 0;
    sum.completion += row.completion_tokens ?? 0;
    for (const [code, count] of Object.entries(row.errors ?? {})) {
      sum.failed += count;
      sum.errors.set(code, (sum.errors.get(code) ?? 0) + count);
    }
    for (const [at, count] of Object.entries(row.first_token ?? {})) sum.first[at] += count;
    for (const [at, count] of Object.entries(row.gaps ?? {})) sum.gaps[at] += count;
  }
  return sum;
}

export function overviewView(view, tell, _, query) {
  const choice = (id, label, options) => {
    const select = el("select", { id }, options.map(([value, text]) => el("option", { value, selected: value === query.get(id) }, text)));
    return [select, el("label", { for: id }, el("span", {}, label), select)];
  };
  const [hours, hoursField] = choice("hours", "In the last", HOURS);
  const [model, modelField] = choice("model", "Model", [["", "all"]]);
  const [replica, replicaField] = choice("replica", "Replica", [["", "all"]]);
  if (!query.get("hours")) hours.value = "1";
  const note = el("p", { class: "hint", id: "since" }, "Loading.");
  const totals = el("dl", { class: "facts" });
  const graphs = GRAPHS.map(([title, lines, text, least]) => cardOf(title, lines, text, least));
  const queue = cardOf("Waiting for a slot, by replica", COLOURS.map((one) => ["", one]), undefined, 4);
  const pages = cardOf("Pages of the KV cache in use, by replica", COLOURS.map((one) => ["", one]), (value) => `${value} %`, 100);
  const errors = el("tbody");
  const kinds = el("tbody");
  const table = (title, heads, body) => el("section", { class: "card" }, el("h2", {}, title),
    el("div", { class: "scroll flat", tabindex: "0", role: "region", "aria-label": title }, el("table", {}, el("caption", { class: "quiet" }, title),
      el("thead", {}, el("tr", {}, heads.map((text, at) => el("th", { scope: "col", class: at > 1 || heads.length === 2 && at ? "num" : "" }, text)))), body)));
  view.append(el("h1", {}, "Overview"), el("form", { class: "filters", "aria-label": "What is shown" }, hoursField, modelField, replicaField), note,
    totals, el("div", { class: "cards" }, [...graphs, queue, pages].map((one) => one.element)),
    el("div", { class: "cards tables" }, table("Errors", ["Code", "Requests"], errors),
      table("Models and replicas", ["Model", "Replica", "Requests", "Failed", "First token p50", "p99", "Per token p50", "p99", "Tokens in", "Tokens out", "From cache"], kinds)));
  for (const card of [...graphs, queue, pages]) card.draw();

  const ask = watch();
  let told = null;
  function show() {
    if (told === null) return;
    const now = Math.floor(Date.now() / MINUTE_MS) * MINUTE_MS;
    const count = Number(hours.value) * 60;
    const times = Array.from({ length: count }, (__, at) => now - (count - 1 - at) * MINUTE_MS);
    const isIn = (row) => Date.parse(row.at) >= times[0];
    offer(model, told.rows.map((row) => row.model));
    offer(replica, [...told.rows.map((row) => row.replica), ...told.loads.map((row) => row.replica)]);
    const rows = told.rows.filter((row) => isIn(row) && (!model.value || row.model === model.value) && (!replica.value || row.replica === replica.value));
    const loads = told.loads.filter((row) => isIn(row) && (!model.value || row.models.includes(model.value)) && (!replica.value || row.replica === replica.value));
    drawMinutes(graphs, times, Map.groupBy(rows, (row) => Date.parse(row.at)), told.edges_ms);
    drawLoads(queue, times, loads, (row) => row.waiting);
    drawLoads(pages, times, loads, (row) => row.pages_used_percent);
    const all = sumOf(rows, told.edges_ms.length);
    fillTotals(totals, all, told.edges_ms, count);
    const since = new Date(times[0]).toISOString();
    errors.replaceChildren(...[...all.errors].sort((a, b) => b[1] - a[1]).map(([code, number]) => el("tr", {},
      el("th", { scope: "row" }, el("a", { href: requestsPage({ error_code: code, since }) }, shown(code))), el("td", { class: "num" }, whole(number)))));
    if (all.errors.size === 0) errors.append(el("tr", {}, el("td", { colspan: 2 }, "None.")));
    const byKind = Map.groupBy(rows, (row) => JSON.stringify([row.model, row.replica]));
    kinds.replaceChildren(...[...byKind.values()].map((some) => kindRow(some, told.edges_ms)));
    setText(note, `By the minute, times in ${zoneOf()}. A graph begins when the gateway does, and a restart empties it${silent(told)}.`);
  }
  for (const control of [hours, model, replica]) {
    control.addEventListener("change", () => {
      const kept = new URLSearchParams(Object.entries({ hours: hours.value === "1" ? "" : hours.value, model: model.value, replica: replica.value }).filter(([, value]) => value));
      history.replaceState(null, "", kept.size ? `#/overview?${kept}` : "#/overview");
      show();
    });
  }
  // A link may name what the first answer has yet to offer.
  for (const select of [model, replica]) offer(select, [query.get(select.id) ?? ""].filter(Boolean), query.get(select.id) ?? "");
  let minute = 0;
  const stop = poll(async () => {
    const answer = await ask("/admin/v1/overview");
    const now = Math.floor(Date.now() / MINUTE_MS);
    if (answer === told && now === minute) return;
    [told, minute] = [answer, now];
    show();
  }, EVERY_MS, tell);
  return () => {
    stop();
    for (const card of [...graphs, queue, pages]) card.close();
  };
}

function offer(select, names, chosen = select.value) {
  const wanted = [...new Set([...names, ...(chosen ? [chosen] : [])])].sort();
  const here = [...select.options].slice(1).map((one) => one.value);
  if (wanted.join("\n") !== here.join("\n")) {
    select.replaceChildren(select.options[0], ...wanted.map((name) => el("option", { value: name }, shown(name, 60))));
  }
  select.value = chosen;
}

function cardOf(title, lines, text, least) {
  const box = el("div", { class: "plot", role: "img", "aria-label": title });
  const legend = el("p", { class: "legend" });
  const card = { box, legend, lines, element: el("section", { class: "card", "aria-label": title }, el("h2", {}, title), legend, box) };
  card.draw = () => {
    const drawn = plot(box, lines.map(([, colour]) => ({ colour })), [{ scale: "y", text }], least);
    card.set = drawn.set;
    card.close = drawn.close;
  };
  name(card, lines.map(([one]) => one));
  return card;
}

function name(card, names) {
  const parts = names.map((one, at) => (one ? el("span", { class: `key ${card.lines[at][1].slice(2)}` }, shown(one, 60)) : null));
  card.legend.replaceChildren(...parts.filter(Boolean));
}

function drawMinutes(graphs, times, byMinute, edges) {
  const columns = GRAPHS.map(([, lines]) => lines.map(() => []));
  for (const at of times) {
    const sum = sumOf(byMinute.get(at) ?? [], edges.length);
    const values = [
      [sum.requests / 60, sum.failed / 60],
      [quantile(sum.first, edges, 0.5), quantile(sum.first, edges, 0.99)],
      [quantile(sum.gaps, edges, 0.5), quantile(sum.gaps, edges, 0.99)],
      [sum.prompt / 60, sum.completion / 60],
      [sum.prompt ? (sum.cached / sum.prompt) * 100 : null],
    ];
    values.forEach((some, graph) => some.forEach((value, line) => columns[graph][line].push(value)));
  }
  const seconds = times.map((at) => at / 1e3);
  graphs.forEach((card, at) => card.set([seconds, ...columns[at]]));
}

// A line for each replica, the fullest first. Several gateways have read the same engine: any of them will do.
function drawLoads(card, times, loads, value) {
  const byReplica = Map.groupBy(loads, (row) => row.replica);
  const most = (rows) => rows.reduce((sum, row) => Math.max(sum, value(row) ?? 0), 0);
  const first = [...byReplica].sort((a, b) => most(b[1]) - most(a[1])).slice(0, LINES_MAX);
  name(card, [...first.map(([id]) => id), ...new Array(LINES_MAX - first.length).fill("")]);
  const columns = first.map(([, rows]) => {
    const byTime = new Map(rows.map((row) => [Date.parse(row.at), value(row)]));
    return times.map((at) => byTime.get(at) ?? null);
  });
  while (columns.length < LINES_MAX) columns.push(times.map(() => null));
  card.set([times.map((at) => at / 1e3), ...columns]);
}

function fillTotals(box, all, edges, minutes) {
  const at = (counts, share) => duration(quantile(counts, edges, share)) || "-";
  const pairs = [
    ["Requests", whole(all.requests)], ["A second", (all.requests / minutes / 60).toPrecision(2)],
    ["Failed", all.requests ? `${whole(all.failed)} (${((all.failed / all.requests) * 100).toFixed(1)} %)` : "0"],
    ["First token p50", at(all.first, 0.5)], ["First token p99", at(all.first, 0.99)],
    ["Per token p50", at(all.gaps, 0.5)], ["Per token p99", at(all.gaps, 0.99)],
    ["Tokens in", whole(all.prompt)], ["Tokens out", whole(all.completion)], ["From the prefix cache", percent(all.cached, all.prompt) || "-"],
  ];
  box.replaceChildren(...pairs.map(([title, text]) => el("div", {}, el("dt", {}, title), el("dd", { "data-total": title }, text))));
}

function kindRow(rows, edges) {
  const sum = sumOf(rows, edges.length);
  const at = (counts, share) => duration(quantile(counts, edges, share)) || "-";
  const [{ model, replica }] = rows;
  const numbers = [
    whole(sum.requests), whole(sum.failed), at(sum.first, 0.5), at(sum.first, 0.99), at(sum.gaps, 0.5), at(sum.gaps, 0.99),
    whole(sum.prompt), whole(sum.completion), percent(sum.cached, sum.prompt) || "-",
  ];
  return el("tr", {}, el("th", { scope: "row" }, shown(model, 60)), el("td", {}, shown(replica, 60)), numbers.map((text) => el("td", { class: "num" }, text)));
}
