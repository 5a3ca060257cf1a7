// A list of requests as a file, with every field that the gateway told.

const FIELDS = [
  "request_id", "trace_id", "began_at", "total_ms", "first_byte_ms", "is_live", "stage", "status", "end_reason",
  "error_code", "tenant", "key_id", "model", "session", "method", "endpoint", "stream", "attempts", "replica",
  "prompt_tokens", "cached_tokens", "completion_tokens", "events", "gateway", "worker",
];

// What callers chose begins no formula in a spreadsheet: such text has an apostrophe in front.
function cell(value) {
  if (value === null || value === undefined) return "";
  const text = typeof value === "string" ? value.replace(/^[=+\-@\t\r]/, "'$&") : String(value);
  return /[",\r\n]/.test(text) ? `"${text.replaceAll("\"", "\"\"")}"` : text;
}

export const csvOf = (rows) =>
  [FIELDS, ...rows.map((row) => FIELDS.map((name) => row[name]))].map((row) => `${row.map(cell).join(",")}\r\n`).join("");

export const jsonOf = (rows) => `${JSON.stringify(rows, null, 1)}\n`;
