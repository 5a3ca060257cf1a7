// Live and recent requests: a table of which only the rows in sight are in the page.

import { get, poll } from "./api.js";
import { el, say, setText, shown, silent } from "./dom.js";
import { duration, percent, plural, timeOf, whole } from "./format.js";

const EVERY_MS = 1000;
const ROWS_MAX = 1000;
const ROW_PX = 34;
const SPARE_ROWS = 6;
const END_REASONS = [
  "ok", "refused", "client_cancel", "aborted", "key_revoked", "slow_client", "queue_timeout",
  "request_timeout", "drain", "internal_error", "engine_failed", "grammar_failed", "connect_timeout",
  "first_token_timeout", "inter_token_timeout", "total_timeout", "upstream_unreachable",
  "upstream_failed",
];

const COLUMNS = [
  ["Began", (one) => timeOf(one.began_at), "num"],
  ["Took", (one) => duration(one.total_ms), "num"],
  ["State", (one) => (one.is_live ? one.stage : `${one.status ?? ""} ${shown(one.end_reason)}`), "state"],
  ["Tenant", (one) => shown(one.tenant), ""],
  ["Model", (one) => shown(one.model), ""],
  ["Prompt", (one) => whole(one.prompt_tokens ?? 0), "num wide"],
  ["Cached", (one) => percent(one.cached_tokens, one.prompt_tokens), "num wide"],
  ["Events", (one) => whole(one.events ?? 0), "num wide"],
  ["Replica", (one) => shown(one.replica), "wide"],
  ["Gateway", (one) => shown(one.gateway ?? "this one"), "wide"],
  ["Request", (one) => shown(one.request_id), "id"],
];

let kept = {}; // the filters, for when the view is opened again

export function requestsView(view, tell, session) {
  if (session) kept = { session };
  let rows = [];
  let asked = 0;
  const form = filters(() => refresh());
  const count = el("p", { class: "count", id: "count" }, "");
  const body = el("tbody");
  const before = el("tr", { "aria-hidden": "true" }, el("td", { class: "pad" }));
  const after = el("tr", { "aria-hidden": "true" }, el("td", { class: "pad" }));
  const table = el("table", { class: "requests", "aria-describedby": "count" },
    el("caption", { class: "quiet" }, "Requests, the newest first: the live ones, then the completed ones"),
    el("thead", {}, el("tr", {}, COLUMNS.map(([title, , kind]) => el("th", { scope: "col", class: kind }, title)))),
    body);
  const box = el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Requests" }, table);
  const empty = el("p", { class: "hint empty", hidden: true }, "No request matches.");
  view.append(el("h1", {}, "Requests"), form, count, box, empty);

  const pool = [];
  function draw() {
    const first = Math.max(0, Math.floor(box.scrollTop / ROW_PX) - SPARE_ROWS);
    const room = Math.ceil((box.clientHeight || 600) / ROW_PX) + 2 * SPARE_ROWS;
    const last = Math.min(rows.length, first + room);
    while (pool.length < last - first) pool.push(rowOf());
    for (let at = first; at < last; at += 1) fill(pool[at - first], rows[at], at);
    before.firstChild.style.height = `${first * ROW_PX}px`;
    after.firstChild.style.height = `${(rows.length - last) * ROW_PX}px`;
    const wanted = [before, ...pool.slice(0, last - first).map((one) => one.row), after];
    if (body.childElementCount !== wanted.length) body.replaceChildren(...wanted);
  }
  let isDrawing = false;
  box.addEventListener("scroll", () => {
    if (isDrawing) return;
    isDrawing = true;
    requestAnimationFrame(() => { isDrawing = false; draw(); });
  });
  body.addEventListener("click", (event) => {
    const link = event.target.closest("tr")?.querySelector("a");
    if (link && event.target.tagName !== "A" && String(getSelection()) === "") link.click();
  });

  async function refresh() {
    const number = (asked += 1);
    const page = await get(`/admin/v1/requests?${queryOf(form)}`);
    if (number !== asked) return; // a later question was asked
    rows = page.data;
    table.setAttribute("aria-rowcount", String(rows.length + 1));
    const live = rows.reduce((sum, one) => sum + one.is_live, 0);
    const more = page.before ? ", and older ones" : "";
    const text = `${plural(live, "live request", "live requests")}, ${whole(rows.length - live)} completed${more}`;
    setText(count, text + silent(page));
    empty.hidden = rows.length > 0;
    draw();
  }
  form.addEventListener("change", () => {
    kept = Object.fromEntries(new FormData(form));
    refresh().then(() => { tell(null); say(count.textContent); }, tell);
  });
  return poll(refresh, EVERY_MS, tell);
}

function rowOf() {
  const cells = COLUMNS.map(([, , kind], at) => {
    const inner = at === COLUMNS.length - 1 ? el("a", { href: "#" }) : document.createTextNode("");
    return { cell: el("td", { class: kind }, inner), inner };
  });
  return { row: el("tr", {}, cells.map((one) => one.cell)), cells };
}

function fill(slot, one, at) {
  slot.row.setAttribute("aria-rowindex", String(at + 2));
  const isBad = !one.is_live && (one.status ?? 0) >= 400;
  slot.row.className = one.is_live ? "live" : isBad ? "bad" : "";
  COLUMNS.forEach(([, text], column) => {
    const { cell, inner } = slot.cells[column];
    const value = text(one);
    if (inner.textContent !== value) {
      inner.textContent = value;
      cell.title = column > 2 ? value : "";
    }
  });
  const href = `#/request/${encodeURIComponent(one.request_id)}`;
  const link = slot.cells[COLUMNS.length - 1].inner;
  if (link.getAttribute("href") !== href) link.setAttribute("href", href);
}

function filters(changed) {
  const field = (label, control) => el("label", {}, el("span", {}, label), control);
  const choice = (name, options) => el("select", { name },
    options.map(([value, text]) => el("option", { value, selected: (kept[name] ?? "") === value }, text)));
  const state = choice("state", [["", "live and completed"], ["live", "live"], ["done", "completed"]]);
  const reason = choice("end_reason", [["", "any"], ...END_REASONS.map((one) => [one, one.replaceAll("_", " ")])]);
  const text = (name, width, more = {}) => el("input", { name, maxlength: 512, size: width, value: kept[name] ?? "", autocomplete: "off", ...more });
  const form = el("form", { class: "filters", role: "search", "aria-label": "Filter the requests" },
    field("State", state),
    field("Tenant", text("tenant", 12)),
    field("Model", text("model", 14)),
    field("Session", text("session", 16)),
    field("Status", text("status", 6, { pattern: "[1-5](xx|\\d\\d)", placeholder: "5xx" })),
    field("End reason", reason),
    field("At least, ms", text("min_ms", 7, { inputmode: "numeric", pattern: "\\d{0,12}" })));
  form.addEventListener("submit", (event) => { event.preventDefault(); changed(); });
  return form;
}

function queryOf(form) {
  const query = new URLSearchParams({ limit: String(ROWS_MAX) });
  for (const control of form.elements) {
    if (control.name && control.value.trim() && control.checkValidity()) query.set(control.name, control.value.trim());
  }
  return query;
}
