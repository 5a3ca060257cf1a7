// Live and recent requests: a table of which only the rows in sight are in the page. What is asked for and how
// it is sorted stand in the address, so that a list can be pasted into a ticket and is there again at a reload.

import { get, poll, watch } from "./api.js";
import { download, el, say, setText, shown, silent } from "./dom.js";
import { csvOf, jsonOf } from "./export.js";
import { requestPage, requestsPage } from "./find.js";
import { dayOf, duration, exactTitle, percent, plural, timeOf, utcOf, whole, zoneOf } from "./format.js";

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

// Title, text, class, title of the cell, name of the sort.
const COLUMNS = [
  ["Date", (one) => dayOf(one.began_at), "day wide"],
  ["Began", (one) => timeOf(one.began_at), "num time", (one) => utcOf(one.began_at), "began"],
  ["Request", (one) => shown(one.request_id), "id"],
  ["State", (one) => (one.is_live ? `live: ${one.stage}` : `${one.status ?? ""} ${shown(one.end_reason)}`), "state"],
  ["Took", (one) => duration(one.total_ms), "num time", (one) => exactTitle(one.total_ms), "took"],
  ["Error", (one) => shown(one.error_code), "error"],
  ["First byte", (one) => duration(one.first_byte_ms), "num time", (one) => exactTitle(one.first_byte_ms), "first_byte"],
  ["Tenant", (one) => shown(one.tenant), "who"],
  ["Key", (one) => shown(one.key_id), "who"],
  ["Model", (one) => shown(one.model), "place"],
  ["Prompt", (one) => whole(one.prompt_tokens ?? 0), "num few"],
  ["Cached", (one) => percent(one.cached_tokens, one.prompt_tokens), "num few"],
  ["Answer", (one) => whole(one.completion_tokens), "num few"],
  ["Replica", (one) => shown(one.replica), "place"],
  ["Gateway", (one) => shown(one.gateway ?? "this one"), "place gateway"],
];
const LINK = COLUMNS.findIndex(([title]) => title === "Request");
const SORTS = { took: (one) => one.total_ms, first_byte: (one) => one.first_byte_ms ?? -1 };
const SORTED = /^(began|took|first_byte)(\.asc)?$/;
const LAST = [["", "any time"], ["5", "5 minutes"], ["15", "15 minutes"], ["60", "1 hour"], ["360", "6 hours"], ["1440", "24 hours"]];

let fragment = "#/requests"; // of the list that was shown last
export const lastList = () => fragment;

export function requestsView(view, tell, id, query) {
  if (id) {
    get(`/admin/v1/requests?${new URLSearchParams({ session: id, limit: 1 })}`).then(
      ({ data }) => location.replace(data.length ? requestsPage({ session: id }) : requestPage(id)), tell);
    return undefined;
  }
  let rows = [];
  let asked = 0;
  const form = filters(query);
  const problem = el("p", { class: "problem", id: "filter-problem", role: "alert", hidden: true });
  const count = el("p", { class: "count", id: "count" }, "");
  let sort = SORTED.exec(query.get("sort") ?? "") ? query.get("sort") : "began";
  const body = el("tbody");
  const before = el("tr", { "aria-hidden": "true" }, el("td", { class: "pad" }));
  const after = el("tr", { "aria-hidden": "true" }, el("td", { class: "pad" }));
  const table = el("table", { class: "requests", "aria-describedby": "count" },
    el("caption", { class: "quiet" }, "Requests: the live ones, then the completed ones"),
    el("thead", {}, el("tr", {}, COLUMNS.map(([title, , kind, , name]) => el("th", { scope: "col", class: kind, "data-sort": name },
      name ? el("button", { type: "button", class: "sort", $click: () => sortBy(name) }, title) : title)))),
    body);
  const box = el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Requests" }, table);
  const empty = el("p", { class: "hint empty", hidden: true }, "No request matches.");
  const isOpen = query.size > 0 || matchMedia("(min-width: 40rem)").matches;
  const file = (ending) => `requests-${utcOf(Date.now()).slice(0, 19).replaceAll(":", "")}.${ending}`;
  const buttons = el("div", { class: "buttons" },
    el("button", { type: "button", $click: () => download(file("csv"), "text/csv", csvOf(rows)) }, "CSV"),
    el("button", { type: "button", $click: () => download(file("json"), "application/json", jsonOf(rows)) }, "JSON"));
  view.append(el("h1", {}, "Requests"), el("details", { class: "filtering", open: isOpen }, el("summary", {}, "Filters"), form), problem,
    el("div", { class: "above" }, count, buttons), box, empty);

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

  // What is asked for, or null where a filter is wrong, which is then said.
  function queryOf() {
    const told = new URLSearchParams();
    const wrong = [];
    for (const [name, value] of query) {
      const control = form.elements.namedItem(name);
      if (name === "sort" && !SORTED.test(value)) wrong.push("Sort: it must be began, took or first_byte.");
      if (name !== "sort" && !control) wrong.push(`There is no filter ${shown(name, 40)}.`);
      if (control && value && !control.value) wrong.push(`${labelOf(control)}: ${control.dataset.told}`);
    }
    for (const control of form.elements) {
      const value = control.value.trim();
      const isSound = control.checkValidity();
      control.setAttribute("aria-invalid", String(!isSound));
      if (!isSound) wrong.push(`${labelOf(control)}: ${control.dataset.told ?? control.validationMessage}`);
      else if (control.name && value) told.set(control.name, control.type === "datetime-local" ? utcOf(value) : value);
    }
    if (told.get("since") > (told.get("until") ?? "9")) wrong.push("From: it must be before To.");
    problem.hidden = wrong.length === 0;
    setText(problem, wrong.length ? `${wrong.join(" ")} The list stands still until that is mended.` : "");
    table.classList.toggle("stale", wrong.length > 0);
    return wrong.length ? null : told;
  }

  function keep(told) {
    const shownQuery = new URLSearchParams(told);
    if (sort !== "began") shownQuery.set("sort", sort);
    fragment = shownQuery.size ? `#/requests?${shownQuery}` : "#/requests";
    if (location.hash !== fragment) history.replaceState(null, "", fragment);
  }

  function sortBy(name) {
    const other = name === "began" ? "began.asc" : `${name}.asc`;
    sort = sort === name ? other : name;
    show();
    const told = queryOf();
    if (told) keep(told);
  }

  // What lives changes all the time, and is asked for by itself: what is completed mostly is as it was.
  const none = { data: [] };
  const [askLive, askDone] = [watch(), watch()];
  let parts = [none, none];
  let page = none;
  function show() {
    const [, by, isUp] = SORTED.exec(sort);
    rows = [...page.data];
    if (SORTS[by]) rows.sort((a, b) => SORTS[by](b) - SORTS[by](a));
    if (isUp) rows.reverse();
    for (const head of table.querySelectorAll("th[data-sort]")) {
      if (head.dataset.sort === by) head.setAttribute("aria-sort", isUp ? "ascending" : "descending");
      else head.removeAttribute("aria-sort");
    }
    table.setAttribute("aria-rowcount", String(rows.length + 1));
    const live = rows.reduce((sum, one) => sum + one.is_live, 0);
    const more = page.before ? ", and older ones that are not here" : "";
    const text = `${plural(live, "live request", "live requests")}, ${whole(rows.length - live)} completed${more}`;
    table.classList.toggle("alone", !rows.some((one) => one.gateway));
    setText(count, `${text}; times in ${zoneOf()}${silent(page)}`);
    empty.hidden = rows.length > 0;
    draw();
  }

  async function refresh() {
    const told = queryOf();
    if (!told) return;
    keep(told);
    const number = (asked += 1);
    told.set("limit", String(ROWS_MAX));
    const live = told.get("state") === "done" ? none : await askLive(part(told, "live"));
    const done = told.get("state") === "live" ? none : await askDone(part(told, "done"));
    if (number !== asked || (live === parts[0] && done === parts[1])) return; // a later question was asked, or nothing is new
    parts = [live, done];
    page = together(live, done);
    show();
  }
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("change", (event) => {
    if (event.target.id === "last") setLast(form, event.target);
    else if (event.target.type === "datetime-local") form.querySelector("#last").value = "";
    for (const name of [...query.keys()]) query.delete(name);
    refresh().then(() => { tell(null); say(count.textContent); }, tell);
  });
  return poll(refresh, EVERY_MS, tell);
}

function part(told, state) {
  const query = new URLSearchParams(told);
  query.set("state", state);
  return `/admin/v1/requests?${query}`;
}

// A request that ended between the two questions is in both.
function together(live, done) {
  const name = (one) => `${one.request_id} ${one.trace_id} ${one.method}`;
  const ended = new Set(done.data.slice(0, live.data.length + 100).map(name));
  const data = [...live.data.filter((one) => !ended.has(name(one))), ...done.data].slice(0, ROWS_MAX);
  return { ...done, data, silent_gateways: done.silent_gateways ?? live.silent_gateways, silent_workers: done.silent_workers ?? live.silent_workers };
}

const labelOf = (control) => control.labels[0].firstChild.textContent;

function rowOf() {
  const cells = COLUMNS.map(([, , kind], at) => {
    const inner = at === LINK ? el("a", { href: "#" }) : document.createTextNode("");
    return { cell: el("td", { class: kind }, inner), inner };
  });
  return { row: el("tr", {}, cells.map((one) => one.cell)), cells };
}

function fill(slot, one, at) {
  slot.row.setAttribute("aria-rowindex", String(at + 2));
  const isBad = !one.is_live && (one.status ?? 0) >= 400;
  slot.row.className = one.is_live ? "live" : isBad ? "bad" : "";
  COLUMNS.forEach(([, text, , title], column) => {
    const { cell, inner } = slot.cells[column];
    const value = text(one);
    if (inner.textContent !== value) inner.textContent = value;
    const more = title ? title(one) : value;
    if (cell.title !== more) cell.title = more;
  });
  const href = requestPage(one.request_id);
  const link = slot.cells[LINK].inner;
  if (link.getAttribute("href") !== href) link.setAttribute("href", href);
}

// A moment of the address as the field has it, in the browser's zone.
function localOf(text) {
  const at = new Date(text ?? "");
  return Number.isNaN(at.getTime()) ? text ?? "" : `${dayOf(at)}T${timeOf(at)}`;
}

function setLast(form, control) {
  const { since, until } = form.elements;
  since.value = control.value ? localOf(Date.now() - Number(control.value) * 60e3) : "";
  until.value = "";
}

function filters(query) {
  const field = (label, control) => el("label", {}, el("span", {}, label), control);
  const given = (name) => query.get(name) ?? "";
  const choice = (name, options) => {
    const known = options.some(([value]) => value === given(name));
    return el("select", { name, "data-told": "it must be one of the list." }, options.map(([value, text]) => el("option", { value, selected: known && value === given(name) }, text)));
  };
  const text = (name, width, told, more = {}) =>
    el("input", { name, maxlength: 512, size: width, value: given(name), autocomplete: "off", spellcheck: "false", "data-told": told, ...more });
  const moment = (name) => el("input", {
    name, type: "datetime-local", step: 1, value: localOf(given(name)), "data-told": "it must be a date and a time." });
  return el("form", { class: "filters", "aria-label": "Filter the requests" },
    field("State", choice("state", [["", "live and completed"], ["live", "live"], ["done", "completed"]])),
    field("Tenant", text("tenant", 11)),
    field("Model", text("model", 11)),
    field("Session", text("session", 11)),
    field("Trace", text("trace_id", 9)),
    field("Status", text("status", 5, "it must be one such as 429, or a class such as 5xx.", { pattern: "[1-5](xx|\\d\\d)", placeholder: "5xx" })),
    field("Error", text("error_code", 11)),
    field("End reason", choice("end_reason", [["", "any"], ...END_REASONS.map((one) => [one, one.replaceAll("_", " ")])])),
    field("At least, ms", text("min_ms", 6, "it must be a whole number of milliseconds.", { inputmode: "numeric", pattern: "\\d{1,12}" })),
    field("In the last", el("select", { id: "last" }, LAST.map(([value, name]) => el("option", { value }, name)))),
    field(`From, ${zoneOf()}`, moment("since")),
    field("To", moment("until")));
}
