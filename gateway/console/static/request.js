// One request, by its id: several may have the same, since callers choose the ids.

import { get, poll } from "./api.js";
import { el, say, shown, silent } from "./dom.js";
import { timeOf } from "./format.js";
import { waterfall } from "./waterfall.js";

const EVERY_MS = 1000;

function servedBy({ gateway, worker }) {
  const named = [gateway ? `gateway ${gateway}` : null, worker === undefined ? null : `worker ${worker}`].filter(Boolean);
  return named.length ? el("p", { class: "quiet" }, `Served by ${shown(named.join(", "))}`) : null;
}

export function requestView(view, tell, id) {
  const place = el("div", {}, el("p", { class: "hint" }, "Loading."));
  view.append(
    el("p", { class: "crumbs" }, el("a", { href: "#/requests" }, "Requests")),
    el("h1", { class: "id" }, shown(id)), place);
  let stop = () => {};
  let isOver = false;
  async function refresh() {
    const answer = await get(`/admin/v1/requests/${encodeURIComponent(id)}`);
    const { data } = answer;
    const isOpen = place.querySelector("details")?.open ?? false;
    place.replaceChildren(...data.map((record, at) => el("section", { class: "card", "aria-label": `Request ${at + 1} of ${data.length}` },
      data.length > 1 ? el("h2", {}, `${at + 1} of ${data.length}, began ${timeOf(record.summary.began_at)}`) : null,
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
