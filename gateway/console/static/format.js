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

const WHOLE = new Intl.NumberFormat("en");
export const whole = (number) => (number === null || number === undefined ? "" : WHOLE.format(number));

const TIME = new Intl.DateTimeFormat("en-GB", { timeStyle: "medium" });
export const timeOf = (text) => TIME.format(new Date(text));

export const percent = (part, of) => (part === null || part === undefined || !of ? "" : `${Math.round((part / of) * 100)} %`);

export const plural = (number, one, more) => `${whole(number)} ${number === 1 ? one : more}`;
