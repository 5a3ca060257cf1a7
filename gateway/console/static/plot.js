// A graph over time, in the page's colours, light and dark, as wide as its box.

import uPlot from "./vendor/uPlot.esm.js";
import { timeOf } from "./format.js";

const HEIGHT = 150;
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const dark = matchMedia("(prefers-color-scheme: dark)");

// A value between two that are none would have no line: it has a point.
function alone(drawn, series) {
  const values = drawn.data[series];
  const isNone = (at) => values[at] === null || values[at] === undefined;
  return values.map((_, at) => at).filter((at) => !isNone(at) && isNone(at - 1) && isNone(at + 1));
}

// `lines` have { name, colour, dash, scale }, `axes` { scale, side, text } besides that of time. Returns { set, close }.
export function plot(box, lines, axes, least = 1) {
  const axis = (more) => ({ stroke: () => colour("--soft"), grid: { stroke: () => colour("--line"), width: 1 }, font: "11px system-ui", ...more });
  const range = (_, __, most) => [0, Math.max(least, (most ?? 0) * 1.1)];
  const scales = Object.fromEntries(axes.map(({ scale }) => [scale, { range }]));
  const drawn = new uPlot({
    width: Math.max(200, box.clientWidth), height: HEIGHT, legend: { show: false }, cursor: { show: false },
    scales: { x: { time: true }, ...scales },
    axes: [
      axis({ space: 80, values: (_, seconds) => seconds.map((one) => timeOf(one * 1e3).slice(0, 5)) }),
      ...axes.map(({ scale, side = 3, text }) => axis({ scale, side, size: 56, grid: { show: side === 3, stroke: () => colour("--line") }, values: text && ((_, values) => values.map(text)) })),
    ],
    series: [{}, ...lines.map((one) => ({
      scale: one.scale ?? axes[0].scale, stroke: () => colour(one.colour), width: 2, dash: one.dash, points: { show: true, size: 5, filter: alone }, spanGaps: false }))],
  }, [[], ...lines.map(() => [])], box);
  const resize = new ResizeObserver(() => { if (box.clientWidth > 0) drawn.setSize({ width: box.clientWidth, height: HEIGHT }); });
  resize.observe(box);
  const redraw = () => drawn.redraw();
  dark.addEventListener("change", redraw);
  return {
    set: (data) => drawn.setData(data),
    close() {
      resize.disconnect();
      dark.removeEventListener("change", redraw);
      drawn.destroy();
    },
  };
}
