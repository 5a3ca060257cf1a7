// From an id to the page that shows it: a request's, a trace's or a session's.

import { get, Refused } from "./api.js";

const TRACEPARENT = /^[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}$/;

const found = async (name, value) =>
  (await get(`/admin/v1/requests?${new URLSearchParams({ [name]: value, limit: 2 })}`)).data;

export const requestPage = (id) => `#/request/${encodeURIComponent(id)}`;

export const requestsPage = (filters) => `#/requests?${new URLSearchParams(filters)}`;

// The address's fragment for what was found. Throws where there is nothing.
export async function find(text) {
  const trace = TRACEPARENT.exec(text)?.[1] ?? text.toLowerCase();
  const [byId, byTrace, bySession] = await Promise.all([
    found("id", text), found("trace_id", trace), found("session", text)]);
  if (byId.length) return requestPage(text);
  if (byTrace.length === 1) return requestPage(byTrace[0].request_id);
  if (byTrace.length) return requestsPage({ trace_id: trace });
  if (bySession.length) return requestsPage({ session: text });
  throw new Refused(404, `No live request and none that is kept has the id, the trace or the session ${text}. `
    + "Older ones are in the logs: penstock trace ID --logs FILE.");
}
