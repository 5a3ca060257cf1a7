// One tenant: its limits and its keys, and how they are changed. A change names what was read, so that it is made
// only if nobody came first.

import { answered, ask, poll, watch } from "./api.js";
import { copy, el, say, setText, shown } from "./dom.js";
import { requestsPage } from "./find.js";
import { dayOf, timeOf, whenOf } from "./format.js";
import { limitFields, limitsOf, told } from "./limits.js";

const EVERY_MS = 5000;
const PAGES_MAX = 5;
const SURE_MS = 5000;
const momentOf = (text) => (text ? el("time", { datetime: text, title: whenOf(text) }, `${dayOf(text)} ${timeOf(text).slice(0, 5)}`) : "");

// A button that asks back once before it does what cannot be undone.
function careful(text, sure, work) {
  let timer = 0;
  const button = el("button", { type: "button" }, text);
  const calm = () => { timer = 0; setText(button, text); button.classList.remove("sure"); };
  button.addEventListener("click", () => {
    if (timer === 0) {
      timer = setTimeout(calm, SURE_MS);
      setText(button, sure);
      button.classList.add("sure");
      return;
    }
    clearTimeout(timer);
    calm();
    work();
  });
  return button;
}

export function tenantView(view, tell, id) {
  const path = `/admin/v1/tenants/${encodeURIComponent(id)}`;
  const limits = el("div");
  const once = el("section", { class: "card once", hidden: true, role: "status" });
  const body = el("tbody");
  const note = el("p", { class: "hint" }, "Loading.");
  const heads = ["Key", "State", "", "Last used", "Limits", "Labels", "Created", "Expires"];
  const remove = careful("Delete this tenant", "Delete it for good?", () => change(async () => {
    const { etag } = await answered("GET", path);
    await ask("DELETE", path, undefined, { "if-match": etag });
    location.hash = "#/tenants";
  }));
  view.append(el("p", { class: "crumbs" }, el("a", { href: "#/tenants" }, "Tenants")),
    el("div", { class: "above" }, el("h1", {}, shown(id)),
      el("p", {}, el("a", { href: requestsPage({ tenant: id }) }, "Its requests"))),
    once, el("h2", {}, "Limits"), limits, el("h2", {}, "Keys"),
    el("div", { class: "scroll flat", tabindex: "0", role: "region", "aria-label": "Keys" },
      el("table", { class: "keys" }, el("caption", { class: "quiet" }, "The tenant's keys"),
        el("thead", {}, el("tr", {}, heads.map((text) => (text ? el("th", { scope: "col" }, text) : el("td", {}, ""))))), body)),
    note, creation(), el("div", { class: "buttons" }, remove));

  async function change(work) {
    try {
      await work();
      tell(null);
      await refresh(true);
    } catch (error) {
      tell(error);
    }
  }

  function creation() {
    const labels = el("input", { id: "key-labels", maxlength: 512, size: 24, autocomplete: "off" });
    const days = el("input", { id: "key-days", inputmode: "numeric", pattern: "[1-9]\\d{0,4}", size: 6, placeholder: "never", autocomplete: "off" });
    const fields = limitFields({});
    const make = (event) => {
      event.preventDefault();
      change(async () => {
        const asked = { tenant: id, limits: limitsOf(fields) };
        asked.labels = labels.value.split(",").map((one) => one.trim()).filter(Boolean);
        if (days.value) asked.expires = new Date(Date.now() + Number(days.value) * 86400e3).toISOString();
        show(await ask("POST", "/admin/v1/keys", asked));
        event.target.reset();
        event.target.parentElement.open = false;
      });
    };
    return el("details", { class: "making" }, el("summary", {}, "New key"), el("form", { class: "filters card", $submit: make },
      el("label", { for: "key-labels" }, el("span", {}, "Labels, with commas between"), labels),
      el("label", { for: "key-days" }, el("span", {}, "Expires in days"), days), fields, el("button", { class: "primary" }, "Create")));
  }

  function show(minted) {
    const secret = el("code", { id: "minted" }, minted.key);
    once.replaceChildren(el("h2", {}, `Key ${minted.id}`), el("p", {}, "It is shown this once, and kept nowhere."), el("p", {}, secret),
      el("div", { class: "buttons" }, el("button", { type: "button", class: "primary", $click: () => copy(minted.key).then(() => say("Copied."), tell) }, "Copy"),
        el("button", { type: "button", $click: () => { once.hidden = true; once.replaceChildren(); } }, "I have it")));
    once.hidden = false;
    once.scrollIntoView({ block: "nearest" });
  }

  const versioned = (method, key, fields) => change(async () => {
    const at = `/admin/v1/keys/${encodeURIComponent(key)}`;
    const { etag } = await answered("GET", at);
    await ask(method, at, fields, { "if-match": etag });
  });
  const patch = (key, fields) => versioned("PATCH", key, fields);

  // An editor is made of what was read with the version that its change names.
  async function edit(at, row, save) {
    const { told: entry, etag } = await answered("GET", at);
    const fields = limitFields(entry.limits);
    const close = () => { form.remove(); editing = false; };
    const form = el("form", { class: "filters card editor", "aria-label": "Limits", $submit: (event) => {
      event.preventDefault();
      change(async () => { await save(entry, limitsOf(fields), etag); close(); });
    } }, fields, el("button", { class: "primary" }, "Save"), el("button", { type: "button", $click: close }, "Cancel"));
    editing = true;
    row.append(form);
    form.querySelector("input").focus();
  }

  function rowOf(key, used, isFixed, since) {
    const isOver = key.expires && Date.parse(key.expires) < Date.now();
    const at = `/admin/v1/keys/${encodeURIComponent(key.id)}`;
    const last = el("td", {});
    last.append(used ? momentOf(used) : `not since ${dayOf(since)} ${timeOf(since).slice(0, 5)}`);
    const cell = el("td", { class: "limits" }, shown(told(key.limits)));
    const actions = isFixed ? "in the file" : [
      el("button", { type: "button", $click: () => edit(at, cell, (_, limits, etag) => ask("PATCH", at, { limits }, { "if-match": etag })).catch(tell) }, "Limit"),
      ...(key.disabled ? [el("button", { type: "button", $click: () => patch(key.id, { disabled: false }) }, "Let it work"),
        careful("Delete", "Delete it?", () => versioned("DELETE", key.id))] : [careful("Revoke", "Revoke it?", () => patch(key.id, { disabled: true }))])];
    return el("tr", { "data-key": key.id, class: key.disabled || isOver ? "over" : "" },
      el("th", { scope: "row", class: "id" }, shown(key.id)), el("td", { class: "state" }, key.disabled ? "revoked" : isOver ? "expired" : "works"),
      el("td", {}, el("div", { class: "actions" }, actions)), last, cell, el("td", { class: "labels" }, shown(key.labels.join(", "))),
      el("td", {}, momentOf(key.created)), el("td", {}, key.expires ? momentOf(key.expires) : "never"));
  }

  const asked = watch();
  let editing = false;
  let last = "";
  async function refresh(isForced = false) {
    const [tenant, keys, uses] = await Promise.all([asked(path), allKeys(asked, id), asked(`/admin/v1/key_uses?tenant=${encodeURIComponent(id)}`)]);
    const now = JSON.stringify([tenant, keys, uses.data]);
    if (!isForced && (editing || now === last || view.querySelector(".sure"))) return;
    last = now;
    const line = el("div", { class: "line-of" }, el("p", { id: "tenant-limits" }, shown(told(tenant.limits))));
    line.append(el("button", { type: "button", $click: () => edit(path, line, (entry, changed, etag) => ask("PUT", path, { ...entry, limits: changed }, { "if-match": etag })).catch(tell) }, "Change"));
    limits.replaceChildren(line);
    body.replaceChildren(...keys.data.map((key) => rowOf(key, uses.data[key.id], keys.fixed.includes(key.id), uses.since)));
    const rest = keys.next ? "There are more keys than are shown. " : keys.data.length ? "" : "It has no key. ";
    setText(note, `${rest}Last uses are kept in memory, since ${whenOf(uses.since)}.`);
  }
  const stop = poll(() => refresh(), EVERY_MS, tell);
  return stop;
}

async function allKeys(asked, tenant) {
  const all = { data: [], fixed: [], next: "" };
  for (let page = 0; page < PAGES_MAX && all.next !== null; page += 1) {
    const query = new URLSearchParams({ tenant, limit: 200, after: all.next });
    const answer = await asked(`/admin/v1/keys?${query}`);
    all.data.push(...answer.data);
    all.fixed.push(...answer.fixed);
    all.next = answer.next;
  }
  return all;
}
