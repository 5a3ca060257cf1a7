// The operators' API, asked with the session's cookie, and polling that costs nobody much.

const TIMEOUT_MS = 15000;
const WATCHED_MAX = 16;

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export async function ask(method, path, body, headers = {}) {
  return (await answered(method, path, body, headers)).told;
}

// The answer with its version, for a change that counts only if nobody came first.
export async function answered(method, path, body, headers = {}) {
  const options = { method, headers, cache: "no-store", credentials: "same-origin", redirect: "error" };
  options.signal = AbortSignal.timeout(TIMEOUT_MS);
  if (body !== undefined) {
    options.headers = { ...headers, "content-type": "application/json" };
    options.body = JSON.stringify(body);
  }
  let answer;
  try {
    answer = await fetch(path, options);
  } catch {
    throw new Refused(0, "The gateway does not answer.");
  }
  const etag = answer.headers.get("etag");
  if (answer.status === 304) return { isSame: true };
  let told = null;
  try {
    told = await answer.json();
  } catch {
    // An answer that is no JSON says no more than its status.
  }
  if (!answer.ok) throw new Refused(answer.status, told?.error?.message ?? `It answered ${answer.status}.`);
  return { told, etag };
}

// Asks for the same things again and again. As long as one is the same, so is the object that is returned, which is
// not to be changed, and nothing is sent.
export function watch() {
  const known = new Map();
  return async (path) => {
    const last = known.get(path);
    const answer = await answered("GET", path, undefined, last?.etag ? { "if-none-match": last.etag } : {});
    if (answer.isSame) return last.told;
    if (known.size >= WATCHED_MAX) known.clear();
    known.set(path, answer);
    return answer.told;
  };
}

export const get = (path) => ask("GET", path);

// Calls `work` every `everyMs`, one call at a time. What `failed` is told it takes back when a call succeeds again, and
// nothing that others told. It rests while the page is hidden, and for five times as
// long as a call took, so that a gateway that is busy is asked less. Returns a function that ends it.
export function poll(work, everyMs, failed) {
  let timer = 0;
  let over = false;
  let failures = 0;
  async function round() {
    timer = 0;
    if (over || document.hidden) return;
    const began = performance.now();
    try {
      await work();
      if (failures > 0 && !over) failed(null);
      failures = 0;
    } catch (error) {
      failures += 1;
      if (!over) failed(error);
    }
    if (over || document.hidden) return;
    const took = performance.now() - began;
    clearTimeout(timer);
    timer = setTimeout(round, Math.max(everyMs, 5 * took) * Math.min(16, 2 ** failures));
  }
  function wake() {
    if (!document.hidden && timer === 0) timer = setTimeout(round, 0);
  }
  document.addEventListener("visibilitychange", wake);
  timer = setTimeout(round, 0);
  return () => {
    over = true;
    clearTimeout(timer);
    document.removeEventListener("visibilitychange", wake);
  };
}
