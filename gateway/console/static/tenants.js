// Tenants: what they used this month, and how their limits stand.

import { ask, poll, watch } from "./api.js";
import { el, setText, shown } from "./dom.js";
import { duration, whole } from "./format.js";
import { limitFields, limitsOf } from "./limits.js";

const EVERY_MS = 3000;
const PAGES_MAX = 5;

export function tenantsView(view, tell) {
  const body = el("tbody");
  const note = el("p", { class: "hint" }, "Loading.");
  const head = ["Tenant", "Tier", "Live", "Requests/min", "Tokens/min", "Tokens today", "Tokens this month", "Requests used", "Tokens used"];
  view.append(el("h1", {}, "Tenants"),
    el("p", { class: "hint" }, "Bars show what is used of a limit at the moment. Used is this month's, in UTC."),
    el("div", { class: "scroll flat", tabindex: "0", role: "region", "aria-label": "Tenants" },
      el("table", { class: "tenants" }, el("caption", { class: "quiet" }, "Tenants, their limits and their usage"),
        el("thead", {}, el("tr", {}, head.map((text, at) => el("th", { scope: "col", class: at > 1 ? "num" : "" }, text)))), body)),
    note, creation(tell));
  const asked = watch();
  async function refresh() {
    const [limits, usage] = await Promise.all([allLimits(asked), asked("/admin/v1/usage").catch(() => null)]);
    const used = new Map((usage?.rows ?? []).map((row) => [row.tenant, row]));
    body.replaceChildren(...limits.rows.map((one) => rowOf(one, used.get(one.tenant))));
    setText(note, limits.isCut ? "There are more tenants than are shown." : limits.rows.length ? "" : "There is no tenant.");
  }
  return poll(refresh, EVERY_MS, tell);
}

export const tenantPage = (id) => `#/tenant/${encodeURIComponent(id)}`;

function creation(tell) {
  const id = el("input", { id: "new-tenant", required: true, maxlength: 64, pattern: "[A-Za-z0-9._\\-]+", autocomplete: "off" });
  const fields = limitFields({});
  const make = async (event) => {
    event.preventDefault();
    try {
      await ask("PUT", `/admin/v1/tenants/${encodeURIComponent(id.value)}`, { limits: limitsOf(fields) }, { "if-none-match": "*" });
      tell(null);
      location.hash = tenantPage(id.value);
    } catch (error) {
      tell(error);
    }
  };
  return el("details", { class: "making" }, el("summary", {}, "New tenant"),
    el("form", { class: "filters card", $submit: make }, el("label", { for: "new-tenant" }, el("span", {}, "Name"), id), fields, el("button", { class: "primary" }, "Create")));
}

// Several workers tell of the same tenant, each its own live requests.
async function allLimits(asked) {
  const merged = new Map();
  let after = "";
  for (let page = 0; page < PAGES_MAX; page += 1) {
    const told = await asked(`/admin/v1/limits?limit=200&after=${encodeURIComponent(after)}`);
    for (const one of told.data) {
      const before = merged.get(one.tenant);
      if (before) before.live += one.live;
      else merged.set(one.tenant, { ...one });
      if (one.tenant > after) after = one.tenant;
    }
    if (!told.has_more) return { rows: [...merged.values()], isCut: false };
  }
  return { rows: [...merged.values()], isCut: true };
}

function rowOf(one, used) {
  const { requests, tokens, day, month } = one.windows;
  const most = one.limits.concurrent;
  return el("tr", { "data-tenant": one.tenant },
    el("th", { scope: "row" }, el("a", { href: tenantPage(one.tenant) }, shown(one.tenant))), el("td", {}, shown(one.service_tier)),
    el("td", { class: "num" }, most === null ? whole(one.live) : meter(one.live, most, "")),
    ...[requests, tokens, day, month].map((window) => el("td", { class: "num" },
      window ? meter(window.limit - window.remaining, window.limit, `free again in ${duration(window.reset_ms)}`) : "-")),
    el("td", { class: "num" }, whole(used?.requests ?? 0)), el("td", { class: "num" }, whole(used?.total_tokens ?? 0)));
}

export function meter(value, most, title) {
  const text = `${whole(value)} of ${whole(most)}`;
  const bar = el("meter", { min: 0, max: Math.max(1, most), low: most * 0.8, high: most * 0.95, optimum: 0, value, "aria-label": text });
  return el("span", { class: "used", title }, el("span", {}, text), bar);
}
