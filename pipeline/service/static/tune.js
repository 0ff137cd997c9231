// Moves one threshold without the server: the cube holds what each bin of the threshold adds, and a move is a sum.
// The value goes into its field of the form, which works without this script.
"use strict";
const slide = document.getElementById("slide"), slider = document.getElementById("slider");
const field = document.getElementById("tune").elements[slide.dataset.field];
const exact = new Intl.NumberFormat("en");

function size(bytes) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  for (; bytes >= 999.5 && unit < units.length - 1; unit++) bytes /= 1000;
  return `${Number(bytes.toPrecision(3)).toLocaleString("en")} ${units[unit]}`;
}

function sums(cell, below) {
  const total = cell.start.slice();
  for (const [bin, ...changes] of cell.bins) if (bin < below) changes.forEach((n, i) => { total[i] += n; });
  return total;
}

function row(names, values, columns) {
  const at = (name) => values[columns.indexOf(name)];
  const line = document.createElement("tr");
  const head = document.createElement("th");
  head.scope = "row";
  head.textContent = names[0];
  line.append(head);
  const count = (name) => exact.format(Math.round(at(name)));
  const ends = columns.includes("kept tokens") ? ["kept tokens low", "kept tokens high"].map(count) : [];
  const range = new Set(ends).size > 1 ? ` (${ends.join("–")})` : "";
  for (const [text, kind] of [[names[1], ""], [count("kept documents"), "n"], [size(at("kept bytes")), "n"],
    ...(ends.length ? [[count("kept tokens") + range, "n"]] : []), [count("unknown documents"), "n"]]) {
    const cell = document.createElement("td");
    cell.className = kind;
    cell.textContent = text;
    line.append(cell);
  }
  return line;
}

function show(cube) {
  const place = Number(slider.value), value = cube.edges[place];
  const each = cube.cells.map((cell) => sums(cell, place));
  const all = cube.columns.map((_, i) => each.reduce((total, values) => total + values[i], 0));
  const kept = exact.format(Math.round(all[cube.columns.indexOf("kept documents")]));
  document.getElementById("slid").textContent = Number(value.toPrecision(6));
  slider.setAttribute("aria-valuetext", `${Number(value.toPrecision(6))}: ${kept} documents kept`);
  document.getElementById("cells").replaceChildren(row(["All", ""], all, cube.columns), ...cube.cells.slice(0, 30).map(
    (cell, i) => row([cell.source || "(none)", cell.language || "(none)"], each[i], cube.columns)));
}

async function begin() {
  const answer = await fetch(slide.dataset.cube, { headers: { Accept: "application/json" } });
  // the table below shows the same moves
  if (!answer.ok) return;
  const cube = await answer.json();
  slider.max = cube.edges.length - 1;
  const now = slide.dataset.now === "" ? cube.edges[0] : Number(slide.dataset.now);
  slider.value = Math.max(0, cube.edges.findLastIndex((edge) => edge <= now));
  slider.addEventListener("input", () => {
    field.value = cube.edges[slider.value];
    show(cube);
  });
  show(cube);
  slide.hidden = false;
  document.getElementById("moved").open = false;
}

begin().catch(() => {});
