// The page's frame: log-in, the views by the address's fragment, and what goes wrong.

import { ask, get } from "./api.js";
import { el, setText, shown } from "./dom.js";
import { chatView } from "./chat.js";
import { enginesView } from "./engines.js";
import { find } from "./find.js";
import { overviewView } from "./overview.js";
import { requestView } from "./request.js";
import { requestsView } from "./requests.js";
import { tenantView } from "./tenant.js";
import { tenantsView } from "./tenants.js";

const SESSION = "/admin/v1/console/session";
const view = document.getElementById("view");
const notice = document.getElementById("notice");
const VIEWS = new Map(Object.entries({
  overview: ["Overview", overviewView],
  requests: ["Requests", requestsView],
  request: ["Request", requestView],
  engines: ["Engines", enginesView],
  tenants: ["Tenants", tenantsView],
  tenant: ["Tenant", tenantView],
  chat: ["Chat", chatView],
}));
let leave = () => {};
let isIn = false;

function tell(error) {
  if (error?.status === 401 && isIn) return end("The session has ended. Log in again.");
  notice.hidden = error === null;
  setText(notice, error === null ? "" : shown(error.message));
}

function show(isLoggedIn, operator = "") {
  isIn = isLoggedIn;
  for (const id of ["nav", "find", "who"]) document.getElementById(id).hidden = !isLoggedIn;
  setText(document.getElementById("operator"), shown(operator));
}

function route() {
  if (!isIn) return;
  const [, path, query] = /^#?\/?([^?]*)\??(.*)$/s.exec(location.hash);
  const [name, ...rest] = path.split("/");
  const [title, open] = VIEWS.get(name) ?? VIEWS.get("overview");
  leave();
  tell(null);
  document.title = `${title} - Penstock console`;
  for (const link of document.querySelectorAll("#nav a")) {
    const isHere = link.textContent === title || link.textContent === `${title}s`;
    if (isHere) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  view.replaceChildren();
  let argument = "";
  try {
    if (VIEWS.has(name)) argument = decodeURIComponent(rest.join("/"));
  } catch {
    // An address that cannot be read names nothing.
  }
  leave = open(view, tell, argument, new URLSearchParams(query)) ?? (() => {});
  view.focus({ preventScroll: true });
}

// What the views have kept is one operator's, and the next may log in at this page: it is loaded anew.
function end(why) {
  leave();
  show(false);
  view.replaceChildren();
  history.replaceState(why, "", location.pathname);
  location.reload();
}

function logIn(why = "") {
  leave();
  leave = () => {};
  show(false);
  tell(null);
  document.title = "Log in - Penstock console";
  const key = el("input", {
    id: "key", type: "password", autocomplete: "current-password", required: true, maxlength: 256,
    "aria-describedby": "login-problem",
  });
  const problem = el("p", { id: "login-problem", class: "problem", role: "alert" }, why);
  const button = el("button", { class: "primary" }, "Log in");
  async function send(event) {
    event.preventDefault();
    button.disabled = true;
    try {
      await ask("POST", SESSION, { key: key.value });
      key.value = "";
      await start();
    } catch (error) {
      setText(problem, shown(error.message));
      key.select();
    }
    button.disabled = false;
  }
  view.replaceChildren(
    el("form", { class: "login card", $submit: send },
      el("h1", {}, "Log in"),
      el("p", { class: "hint" }, "With an operator's key of this gateway. It is sent once; a session stands for it."),
      el("label", { for: "key" }, "Admin key"), key, problem, button));
  key.focus();
}

async function start() {
  try {
    const { operator } = await get("/admin/v1/console/operator");
    show(true, operator);
    route();
  } catch (error) {
    logIn(error.status === 401 ? history.state ?? "" : error.message);
    history.replaceState(null, "");
  }
}

document.getElementById("logout").addEventListener("click", async () => {
  try {
    await ask("DELETE", SESSION);
  } finally {
    end("You are logged out.");
  }
});
const sought = document.getElementById("find-text");
document.getElementById("find").addEventListener("submit", async (event) => {
  event.preventDefault();
  try {
    const fragment = await find(sought.value.trim());
    sought.value = "";
    sought.blur();
    if (location.hash === fragment) route();
    else location.hash = fragment;
  } catch (error) {
    tell(error);
  }
});
document.addEventListener("keydown", (event) => {
  if (!isIn || event.key.toLowerCase() !== "k" || !(event.ctrlKey || event.metaKey)) return;
  event.preventDefault();
  sought.select();
});
window.addEventListener("hashchange", route);
start();
