// The fields of limits: an empty one is no limit.

import { el } from "./dom.js";

export const LIMITS = [
  ["requests_per_min", "Requests/min"], ["tokens_per_min", "Tokens/min"], ["concurrent", "At once"],
  ["tokens_per_day", "Tokens/day"], ["tokens_per_month", "Tokens/month"], ["token_budget", "Tokens in all"],
];

export const limitFields = (limits) => LIMITS.map(([name, title]) => el("label", {}, el("span", {}, title),
  el("input", { name, inputmode: "numeric", pattern: "\\d{1,15}", size: 9, value: limits[name] ?? "", placeholder: "none", title: "A whole number; empty is no limit.", autocomplete: "off" })));

export const limitsOf = (labels) => Object.fromEntries(labels.map((label) => {
  const { name, value } = label.querySelector("input");
  return [name, value.trim() ? Number(value) : null];
}));

export const told = (limits) =>
  LIMITS.filter(([name]) => limits[name] !== null && limits[name] !== undefined).map(([name, title]) => `${title} ${limits[name].toLocaleString("en")}`).join(", ") || "none";
