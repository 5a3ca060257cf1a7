// One request, by its id: several may have the same, since callers choose the ids.

import { get, poll } from "./api.js";
import { copy, download, el, say, shown, silent } from "./dom.js";
import { jsonOf } from "./export.js";
import { whenOf } from "./format.js";
import { lastList } from "./requests.js";
import { waterfall } from "./waterfall.js";

const EVERY_MS = 1000;

function servedBy({ gateway, worker }) {
  const named = [gateway ? `gateway ${gateway}` : null, worker === undefined ? null : `worker ${worker}`].filter(Boolean);
  return named.length ? el("p", { class: "quiet" }, `Served by ${shown(named.join(", "))}`) : null;
}

export function requestView(view, tell, id) {
  const place = el("div", {}, el("p", { class: "hint" }, "Loading."));
  let records = [];
  const buttons = el("div", { class: "buttons", hidden: true },
    el("button", { type: "button", $click: () => copy(`${records.map((one) => one.text).join("\n\n")}\n`).then(() => say("Copied."), tell) }, "Copy as trace"),
    el("button", { type: "button", $click: () => copy(location.href).then(() => say("Copied."), tell) }, "Copy link"),
    el("button", { type: "button", $click: () => download(`${id.replace(/[^\w.-]/g, "_")}.json`, "application/json", jsonOf(records)) }, "JSON"));
  view.append(
    el("p", { class: "crumbs" }, el("a", { href: lastList() }, "Requests")),
    el("div", { class: "above" }, el("h1", { class: "id" }, shown(id)), buttons), place);
  let stop = () => {};
  let isOver = false;
  async function refresh() {
    const answer = await get(`/admin/v1/requests/${encodeURIComponent(id)}`);
    const { data } = answer;
    records = data;
    buttons.hidden = data.length === 0;
    const isOpen = place.querySelector("details")?.open ?? false;
    place.replaceChildren(...data.map((record, at) => el("section", { class: "card", "aria-label": `Request ${at + 1} of ${data.length}` },
      data.length > 1 ? el("h2", {}, `${at + 1} of ${data.length}, began ${whenOf(record.summary.began_at)}`)
        : el("h2", { class: "quiet" }, "What became of it"),
      servedBy(record),
      waterfall(record))));
    const missing = silent(answer);
    if (missing) place.prepend(el("p", { class: "hint" }, `There may be more${missing}.`));
    const details = place.querySelector("details");
    if (details) details.open = isOpen;
    if (!data.some((record) => record.summary.is_live)) {
      isOver = true;
      stop();
      say("The request is complete.");
    }
  }
  stop = poll(refresh, EVERY_MS, (error) => {
    tell(error);
    if (error?.status === 404) { stop(); place.replaceChildren(); }
  });
  if (isOver) stop();
  return () => stop();
}
