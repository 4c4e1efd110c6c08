"use strict";
(() => {
const data = JSON.parse(document.getElementById("data").textContent);
document.documentElement.classList.add("scripted");
const $ = (at) => document.querySelector(at), $$ = (at) => [...document.querySelectorAll(at)];

// --- numbers as the rest of the report writes them
const size = (b) => {
  for (const [f, u] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]])
    if (Math.abs(b) >= f) return (b / f).toFixed(b / f < 10 ? 2 : 1) + " " + u;
  return b + " B";
};
const time = (us) => us >= 1e6 ? (us / 1e6).toFixed(2) + " s" : us >= 1e3 ? (us / 1e3).toFixed(2) + " ms" : us.toFixed(1) + " us";

// Index of the last value that is not above x; -1: there is none.
const last = (values, x) => {
  let low = 0, high = values.length;
  while (low < high) { const mid = (low + high) >> 1; if (values[mid] <= x) low = mid + 1; else high = mid; }
  return low - 1;
};

// --- charts: each is a group of svgs over one stretch of time, with a cursor, a readout and a zoom
function chart(id, endUs, tell) {
  const root = $("#" + id + " .chart");
  if (!root) return null;
  const svgs = [...root.querySelectorAll("svg")], cursor = root.querySelector(".cursor"), readout = $("#" + id + " .readout");
  const axis = $("#" + id + " .axis");
  let from = 0, to = endUs, at = 0;
  const show = () => {
    svgs.forEach((svg) => svg.setAttribute("viewBox", `${from / endUs * 1000} 0 ${(to - from) / endUs * 1000} 100`));
    [...axis.children].forEach((tick, i, all) => { tick.textContent = data.clock(from + (to - from) * i / (all.length - 1)); });
    place();
  };
  const place = () => {
    const box = svgs[0].getBoundingClientRect(), outer = root.getBoundingClientRect(), x = (at - from) / (to - from);
    cursor.style.left = box.left - outer.left + x * box.width + "px";
    if (x < 0 || x > 1) cursor.style.display = "none";
  };
  const point = (us) => {
    at = Math.min(Math.max(us, from), to);
    cursor.style.display = "block";
    place();
    readout.textContent = tell(at);
  };
  const byPointer = (event) => {
    const box = svgs[0].getBoundingClientRect();
    point(from + (to - from) * (event.clientX - box.left) / box.width);
  };
  const zoom = (factor, shift) => {
    const width = Math.min(endUs, Math.max((to - from) * factor, endUs / 5000));
    const middle = factor < 1 && at > from && at < to ? at : (from + to) / 2;
    from = Math.min(Math.max(middle - width / 2 + shift * width, 0), endUs - width);
    to = from + width;
    show();
  };
  root.addEventListener("pointermove", byPointer);
  root.addEventListener("pointerdown", byPointer);
  root.addEventListener("keydown", (event) => {
    const step = (to - from) / 200;
    if (event.key === "ArrowLeft") point(at - step);
    else if (event.key === "ArrowRight") point(at + step);
    else if (event.key === "+") zoom(0.5, 0);
    else if (event.key === "-") zoom(2, 0);
    else return;
    event.preventDefault();
  });
  const does = { in: () => zoom(0.5, 0), out: () => zoom(2, 0), left: () => zoom(1, -0.5), right: () => zoom(1, 0.5), all: () => zoom(1e9, 0) };
  $$("#" + id + " [data-zoom]").forEach((button) => button.addEventListener("click", does[button.dataset.zoom]));
  window.addEventListener("resize", place);
  show();
  return { point, view: () => [from, to] };
}
data.clock = time;

const within = (bars, us) => {
  const i = last(bars.from, us);
  return i >= 0 && us < bars.to[i] ? i : -1;
};
const named = (bars, i) => bars.tensor[i] < 0 ? "" : " of " + (names.get(bars.tensor[i]) || "tensor " + bars.tensor[i]);
const names = new Map(data.tensors ? data.tensors.rows.map((row) => [row[0], row[1]]) : []);
if (data.step) {
  const step = data.step;
  const memory = (curve, us) => us > curve.end_us ? null : curve.bytes[Math.max(0, last(curve.at_us, us))];
  chart("step", step.end_us, (us) => {
    const planned = memory(step.planned, us), plain = memory(step.unswapped, us);
    const parts = [time(us)];
    parts.push("memory by the plan " + (planned === null ? "over" : size(planned)));
    parts.push("without swapping " + (plain === null ? "over" : size(plain)));
    const does = within(step.compute, us);
    parts.push("compute: " + (does < 0 ? "idle" : step.compute.kind[does] === "stall"
      ? "stalled " + time(step.compute.to[does] - step.compute.from[does]) + " for the copy" + named(step.compute, does) : step.compute.kind[does]));
    for (const [way, bars] of [["to the host", step.out], ["back", step.back]]) {
      const i = within(bars, us);
      if (i >= 0) parts.push(way + ": " + size(bars.bytes[i]) + named(bars, i));
    }
    return parts.join(" \u00b7 ");
  });
}
if (data.steps) {
  const rows = data.steps, told = $("#steps .readout"), root = $("#steps .chart");
  let at = rows.length - 1;
  const tell = () => {
    const row = rows[at];
    told.textContent = [`step ${row.index}: ${row.kind.replace("_", " ")}${row.warm_up ? ", warm-up" : ""}`, `peak ${row.peak_hbm_bytes === row.peak_hbm_at_most_bytes ? "" : "at least "}${size(row.peak_hbm_bytes)} of ${size(row.hbm_budget_bytes)}`,
      row.step_us === null ? "not timed" : "took " + time(row.step_us),
      row.stall_us === null ? "stall not measured" : "stalled " + time(row.stall_us)].join(" \u00b7 ");
  };
  const byPointer = (event) => {
    const box = root.querySelector("svg").getBoundingClientRect();
    at = Math.min(rows.length - 1, Math.max(0, Math.floor((event.clientX - box.left) / box.width * rows.length)));
    tell();
  };
  root.addEventListener("pointermove", byPointer);
  root.addEventListener("pointerdown", byPointer);
  root.addEventListener("keydown", (event) => {
    const to = at + ({ ArrowLeft: -1, ArrowRight: 1 }[event.key] || 0);
    if (to === at || to < 0 || to >= rows.length) return;
    at = to; tell(); event.preventDefault();
  });
}

// --- tensors
if (data.tensors) {
  const { columns, rows } = data.tensors, table = $("#tensors table"), body = table.tBodies[0], count = $("#tensors .count");
  const more = $("#tensors .more"), search = $("#tensors input"), kinds = $$("#tensors [data-kind]");
  const at = Object.fromEntries(columns.map((name, i) => [name, i]));
  let sort = "bytes", down = true, shown = 100, kind = "", picked = -1;
  const text = { bytes: size, moved_bytes: (b) => b ? size(b) : "\u2013" };
  const matching = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = rows.filter((row) => (!kind || row[at.does] === kind)
      && words.every((word) => row[at.name].toLowerCase().includes(word)));
    const sign = down ? -1 : 1, key = at[sort];
    return found.sort((a, b) => {
      const x = a[key], y = b[key];
      if (x === null || y === null) return x === y ? a[0] - b[0] : x === null ? 1 : -1;   // what has none comes last
      return x < y ? -sign : x > y ? sign : a[0] - b[0];
    });
  };
  const cell = (row, name) => {
    const td = document.createElement("td"), value = row[at[name]];
    if (name === "does") {
      const mark = document.createElement("i");
      mark.className = "mark " + (value === "in part" ? "part" : value);
      td.append(mark, value);
    } else if (name === "name") td.textContent = value;
    else td.textContent = value === null ? "\u2013" : (text[name] || time)(value);
    if (name !== "name" && name !== "does") td.className = "n";
    if (name !== "name") td.dataset.label = table.querySelector(`[data-key="${name}"]`).textContent;
    return td;
  };
  const drawn = $$("#tensors [data-key]").map((button) => button.dataset.key);
  const draw = () => {
    const found = matching(), fragment = document.createDocumentFragment();
    for (const row of found.slice(0, shown)) {
      const tr = document.createElement("tr");
      tr.tabIndex = 0; tr.dataset.tensor = row[0];
      tr.setAttribute("aria-selected", row[0] === picked);
      drawn.forEach((name) => tr.append(cell(row, name)));
      fragment.append(tr);
    }
    body.replaceChildren(fragment);
    const bytes = found.reduce((sum, row) => sum + row[at.bytes], 0);
    count.textContent = `${Math.min(shown, found.length)} of ${found.length} tensors, ${size(bytes)} in all`;
    more.hidden = found.length <= shown;
    $$("#tensors th").forEach((th) => {
      const own = th.querySelector("button").dataset.key === sort;
      th.setAttribute("aria-sort", own ? (down ? "descending" : "ascending") : "none");
    });
    kinds.forEach((button) => button.setAttribute("aria-pressed", button.dataset.kind === kind));
  };
  const pick = (number) => {
    picked = picked === number ? -1 : number;
    for (const [id, bars] of [["out", data.step.out], ["back", data.step.back], ["compute", data.step.compute]]) {
      let path = "";
      if (picked >= 0) bars.tensor.forEach((tensor, i) => {
        if (tensor === picked) path += `M${bars.from[i] / data.step.end_us * 1000} 0H${bars.to[i] / data.step.end_us * 1000}V100H${bars.from[i] / data.step.end_us * 1000}Z`;
      });
      $(`#step [data-row="${id}"] .pick`).setAttribute("d", path);
    }
    draw();
  };
  const byRow = (event) => { const tr = event.target.closest("tr"); if (tr) pick(+tr.dataset.tensor); };
  body.addEventListener("click", byRow);
  body.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault(); byRow(event);
    const again = body.querySelector(`[data-tensor="${event.target.dataset.tensor}"]`);
    if (again) again.focus();
  });
  $$("#tensors [data-key]").forEach((button) => button.addEventListener("click", () => {
    const key = button.dataset.key;
    down = key === sort ? !down : key !== "name" && key !== "does"; sort = key; shown = 100; draw();
  }));
  kinds.forEach((button) => button.addEventListener("click", () => { kind = button.dataset.kind; shown = 100; draw(); }));
  search.addEventListener("input", () => { shown = 100; draw(); });
  more.addEventListener("click", () => { shown += 400; draw(); });
  draw();
}
})();
