// Numbers and times as people read them.

export function duration(ms) {
  if (ms === null || ms === undefined) return "";
  if (ms < 9.95) return `${Number(ms.toPrecision(2))} ms`;
  if (ms < 999.5) return `${ms.toFixed(0)} ms`;
  if (ms < 59950) return `${(ms / 1e3).toFixed(1).replace(/\.0$/, "")} s`;
  const seconds = Math.round(ms / 1e3);
  return `${Math.floor(seconds / 60)} min ${seconds % 60} s`;
}

export const exact = (ms) => (ms === null || ms === undefined ? "" : ms.toFixed(3));

// A time as people read it; `exact` goes beside it, into a title.
export const exactTitle = (ms) => (ms === null || ms === undefined ? "" : `${exact(ms)} ms`);

const WHOLE = new Intl.NumberFormat("en");
export const whole = (number) => (number === null || number === undefined ? "" : WHOLE.format(number));

const TIME = new Intl.DateTimeFormat("en-GB", { timeStyle: "medium" });
export const timeOf = (text) => TIME.format(new Date(text));

const two = (number) => String(number).padStart(2, "0");
export function dayOf(text) {
  const at = new Date(text);
  return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
}

// The zone of the times that are shown: the browser's, as it is at a moment.
export function zoneOf(text = Date.now()) {
  const minutes = -new Date(text).getTimezoneOffset();
  if (minutes === 0) return "UTC";
  const [hours, rest] = [Math.floor(Math.abs(minutes) / 60), Math.abs(minutes) % 60];
  return `UTC${minutes < 0 ? "-" : "+"}${two(hours)}:${two(rest)}`;
}

// A moment to the millisecond, with its zone.
export function whenOf(text) {
  const at = new Date(text);
  return `${dayOf(at)} ${timeOf(at)}.${String(at.getMilliseconds()).padStart(3, "0")} ${zoneOf(at)}`;
}

// A moment in UTC to the millisecond, as logs have it.
export const utcOf = (text) => new Date(text).toISOString();

export const percent = (part, of) => (part === null || part === undefined || !of ? "" : `${Math.round((part / of) * 100)} %`);

export const plural = (number, one, more) => `${whole(number)} ${number === 1 ? one : more}`;
