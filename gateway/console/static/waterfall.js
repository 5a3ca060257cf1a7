// One request's record as a waterfall: both services' stages on the axis that the gateway worked out, and the
// causes in its words. Nothing is computed here but where a bar stands. A tick is the time of one moment at which
// events were passed on, and their number by then: the record has a few, the console's own chats one for each piece.

import { el, shown, svg } from "./dom.js";
import { requestsPage } from "./find.js";
import { duration, exact, exactTitle, percent, plural, utcOf, whenOf, whole } from "./format.js";

const TICKS_MAX = 600;

export function waterfall(record, pieces = []) {
  const { summary, axis, line } = record;
  const isOwn = pieces.length > 0;
  const ticks = isOwn ? pieces.map((ms, at) => [ms, at + 1]) : record.ticks ?? [];
  const causes = record.causes ?? [];
  const ends = axis.bars.map((bar) => (bar.from_ms ?? 0) + bar.takes_ms);
  const wholeMs = Math.max(summary.total_ms ?? 0, ...ends, 0.001);
  const parts = [facts(summary, line, record.meaning)];
  if (causes.length > 0) {
    parts.push(el("section", { class: "why" }, el("h3", {}, "Why"),
      el("ul", { class: "causes" }, causes.map((text) => el("li", {}, shown(text))))));
  }
  parts.push(el("div", { class: "scroll flat", tabindex: "0", role: "region", "aria-label": "Stages" },
    stages(axis, wholeMs, summary, ticks, isOwn)));
  if (axis.error_ms !== undefined && axis.error_ms !== null) {
    parts.push(el("p", { class: "hint" }, `The engine's times are placed within ${exact(axis.error_ms)} ms.`));
  }
  if (ticks.length > 1) parts.push(gaps(ticks, isOwn));
  if (line) parts.push(all(line));
  return el("div", { class: "waterfall" }, parts);
}

function stages(axis, wholeMs, summary, ticks, isOwn) {
  const rows = axis.bars.map((bar) => {
    const isLast = bar.service === "gateway" && bar.stage === summary.stage && !summary.is_live;
    return el("tr", { "data-service": bar.service, "data-stage": bar.stage, class: serviceClass(bar.service) },
      el("td", {}, shown(bar.service)),
      el("th", { scope: "row" }, shown(bar.stage), isLast ? el("span", { class: "tag" }, "ended here") : null),
      number(bar.from_ms, "from"), number(bar.takes_ms, "takes"),
      el("td", { class: "lane" }, picture(bar, wholeMs)));
  });
  if (ticks.length > 0) {
    rows.push(el("tr", { class: "tokens" },
      el("td", {}, "answer"), el("th", { scope: "row" }, isOwn ? "tokens" : "events"), number(ticks[0][0], "from"),
      number(ticks.at(-1)[0] - ticks[0][0], "takes"), el("td", { class: "lane" }, tickPicture(ticks, wholeMs))));
  }
  return el("table", { class: "stages" },
    el("caption", { class: "quiet" }, "The stages of the request in both services, on one time axis"),
    el("thead", {}, el("tr", {},
      el("th", { scope: "col" }, "Service"), el("th", { scope: "col" }, "Stage"),
      el("th", { scope: "col", class: "num" }, "From"), el("th", { scope: "col", class: "num" }, "Takes"),
      el("th", { scope: "col", class: "lane" }, el("span", { class: "ends" }, el("span", {}, "0"), el("span", {}, duration(wholeMs)))))),
    el("tbody", {}, rows));
}

const number = (ms, kind) => el("td", { class: `num ${kind}`, title: exactTitle(ms) }, ms === 0 ? "0" : duration(ms));

const serviceClass = (service) => (["gateway", "client"].includes(service) ? service : "engine");

function lane(...children) {
  return svg("svg", { viewBox: "0 0 1000 16", preserveAspectRatio: "none", "aria-hidden": "true", focusable: "false" }, children);
}

function picture(bar, wholeMs) {
  if (bar.from_ms === null || bar.from_ms === undefined) return el("span", { class: "hint" }, "between others");
  const x = Math.min(998, (bar.from_ms / wholeMs) * 1000);
  const width = Math.max(2, Math.min(1000 - x, (bar.takes_ms / wholeMs) * 1000));
  return lane(svg("rect", { x, y: 2, width, height: 12, class: `stage-${/^[a-z]+$/.test(bar.stage) ? bar.stage : "other"}` }));
}

function tickPicture(ticks, wholeMs) {
  const step = Math.ceil(ticks.length / TICKS_MAX);
  const some = ticks.filter((_, at) => at % step === 0);
  const path = some.map(([ms]) => `M${((ms / wholeMs) * 1000).toFixed(1)} 2v12`).join("");
  return lane(svg("path", { d: path, class: "ticks", "vector-effect": "non-scaling-stroke" }));
}

// A gap may be for several events: those of one read, or, of a long answer, all between two ticks.
function gaps(ticks, isOwn) {
  const longest = ticks.slice(1).map(([ms, events], at) => [ms - ticks[at][0], ticks[at][1] + 1, events])
    .sort((a, b) => b[0] - a[0]).slice(0, 3);
  const [one, more] = isOwn ? ["piece", "pieces"] : ["event", "events"];
  const said = longest.map(([ms, from, to]) =>
    `${duration(ms)} ${from === to ? `before ${one} ${whole(to)}` : `for ${more} ${whole(from)} to ${whole(to)}`}`).join(", ");
  const count = isOwn ? `${plural(ticks.length, one, more)} of text` : `${plural(ticks.at(-1)[1], one, more)} up to the last mark`;
  return el("p", { class: "hint" }, `${count}; the longest gaps: ${said}.`);
}

function facts(one, line, meaning) {
  const time = (ms, none) => (ms === undefined || ms === null ? none : el("span", { title: exactTitle(ms) }, duration(ms)));
  const link = (filters, text) => (text ? el("a", { href: requestsPage(filters) }, shown(text)) : "none");
  const ended = Date.parse(one.began_at) + one.total_ms;
  const state = one.is_live ? `live, in ${one.stage}` : `${one.status} ${one.end_reason ?? ""} in ${one.stage}`;
  const pairs = [
    ["State", meaning ? `${state}: ${meaning}` : state, "state"],
    ["Began", el("time", { datetime: utcOf(one.began_at), title: utcOf(one.began_at) }, whenOf(one.began_at)), "began"],
    ["Ended", one.is_live ? "not yet" : el("time", { datetime: utcOf(ended), title: utcOf(ended) }, whenOf(ended)), "ended"],
    ["Took", time(one.total_ms), "total"],
    ["First byte", time(one.first_byte_ms, "none"), "first-byte"],
    ["Tenant", link({ tenant: one.tenant }, one.tenant), "tenant"],
    ["Key", one.key_id && one.tenant ? el("a", { href: `#/tenant/${encodeURIComponent(one.tenant)}` }, shown(one.key_id)) : one.key_id ?? "none", "key"],
    ["Model", one.model ?? "none", "model"],
    ["Session", link({ session: one.session }, one.session), "session"],
    ["Trace", link({ trace_id: one.trace_id }, one.trace_id), "trace"],
    ["Asked", `${one.method} ${one.endpoint}${one.stream ? ", as a stream" : ""}`, "asked"],
    ["Engines asked", `${one.attempts ?? 0}${one.replica ? `, last ${one.replica}` : ""}`, "attempts"],
  ];
  if (one.service_tier) pairs.push(["Service tier", one.service_tier, "tier"]);
  if (line?.failed_attempts) pairs.push(["Failed before", line.failed_attempts.map((failed) => `${failed.replica}=${failed.code}`).join(", "), "failed"]);
  if (line?.route) pairs.push(["Chosen by", line.route, "route"]);
  if (one.error_code) pairs.push(["Error", [one.error_code, line?.error_detail].filter(Boolean).join(": "), "error"]);
  if (line?.quota_meter) pairs.push(["Refused by", `the ${line.quota_scope}'s quota of ${line.quota_meter}`, "quota"]);
  const cached = line?.cached_tokens ? ` (${whole(line.cached_tokens)} cached, ${percent(line.cached_tokens, one.prompt_tokens)})` : "";
  pairs.push(["Prompt", `${plural(one.prompt_tokens ?? 0, "token", "tokens")}${cached}`, "prompt"]);
  if (one.completion_tokens !== undefined && one.completion_tokens !== null) {
    const reasoning = line?.reasoning_tokens ? ` (${whole(line.reasoning_tokens)} of reasoning)` : "";
    const calls = line?.calls ? `, ${plural(line.calls, "call", "calls")}` : "";
    pairs.push(["Answer", plural(one.completion_tokens, "token", "tokens") + reasoning + calls, "answer"]);
  }
  if (line?.drafted_tokens) {
    const right = percent(line.accepted_tokens ?? 0, line.drafted_tokens);
    pairs.push(["Drafts", `${plural(line.accepted_tokens ?? 0, "step", "steps")} saved (${right} of ${whole(line.drafted_tokens)} right)`, "drafts"]);
  }
  if (line?.rejected_prediction_tokens !== undefined && line?.rejected_prediction_tokens !== null) {
    pairs.push(["Prediction", `${whole(line.accepted_prediction_tokens ?? 0)} right, ${whole(line.rejected_prediction_tokens)} wrong`, "prediction"]);
  }
  if (line) pairs.push(["Charged", `${whole(line.settled_tokens)} of ${whole(line.reserved_tokens)} reserved`, "charged"]);
  if (line?.engine_preemptions) {
    const kept = line.engine_swaps ? `, ${line.engine_swaps} of them with its pages in host memory` : "";
    pairs.push(["Preempted", plural(line.engine_preemptions, "time", "times") + kept, "preempted"]);
  }
  return el("dl", { class: "facts" }, pairs.map(([name, text, key]) =>
    el("div", {}, el("dt", {}, name), el("dd", { "data-fact": key }, text instanceof Node ? text : shown(text)))));
}

function all(line) {
  const rows = Object.entries(line).filter(([, value]) => typeof value !== "object").map(([name, value]) =>
    el("tr", {}, el("th", { scope: "row" }, shown(name)), el("td", { "data-field": name }, shown(value))));
  return el("details", {}, el("summary", {}, "The completed line"),
    el("table", { class: "line" }, el("caption", { class: "quiet" }, "Fields of the completed line"), el("tbody", {}, rows)));
}
