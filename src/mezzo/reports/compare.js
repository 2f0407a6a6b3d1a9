// Several runs: tables sort by a click on a column's name, a filter hides rows and their curves, and the pointer shows a figure.
const state = { filter: "", sort: [] };
const number = (text) => parseFloat(text.replaceAll(",", ""));

function compareCells(a, b) {
  const [x, y] = [number(a), number(b)];
  if (isNaN(x) || isNaN(y)) return isNaN(x) - isNaN(y) || a.localeCompare(b);
  return x - y;
}

function sortTable(table, column, descending) {
  const rows = [...table.rows].slice(1);
  const text = (row) => row.cells[column].textContent.trim();
  rows.sort((a, b) => (descending ? -1 : 1) * compareCells(text(a), text(b)));
  rows.forEach((row) => row.parentNode.append(row));
  [...table.rows[0].cells].forEach((cell, index) => {
    cell.setAttribute("aria-sort", index !== column ? "none" : descending ? "descending" : "ascending");
  });
}

function filterRuns() {
  const words = state.filter.toLowerCase().split(/\s+/).filter(Boolean);
  const hidden = new Set(), shown = new Set();
  document.querySelectorAll("table.sortable tr[data-series]").forEach((row) => {
    const text = [...row.cells].map((cell) => cell.textContent).join(" ").toLowerCase();
    row.hidden = !words.every((word) => text.includes(word));
    (row.hidden ? hidden : shown).add(row.dataset.series);
  });
  document.querySelectorAll("g.series").forEach((series) => {
    const name = series.dataset.series;
    series.style.display = hidden.has(name) && !shown.has(name) ? "none" : "";
  });
}

function apply() {  // also to a page that was fetched anew
  const tables = document.querySelectorAll("table.sortable");
  state.sort.forEach(([column, descending], index) => tables[index] && sortTable(tables[index], column, descending));
  document.querySelectorAll("input.filter").forEach((input) => { if (input.value !== state.filter) input.value = state.filter; });
  filterRuns();
}

document.addEventListener("click", (event) => {
  const cell = event.target.closest("table.sortable th");
  if (!cell) return;
  const table = cell.closest("table"), index = [...document.querySelectorAll("table.sortable")].indexOf(table);
  // Figures first from the top, texts from A.
  const first = cell.classList.contains("number"), now = cell.getAttribute("aria-sort");
  state.sort[index] = [cell.cellIndex, now === "ascending" || now === "descending" ? now === "ascending" : first];
  sortTable(table, ...state.sort[index]);
});
document.addEventListener("input", (event) => {
  if (!event.target.matches("input.filter")) return;
  state.filter = event.target.value;
  filterRuns();
});

const tip = document.createElement("div");
tip.className = "tip";
tip.hidden = true;
document.body.append(tip);
document.addEventListener("pointermove", (event) => {
  const picture = event.target.closest(".chart svg");
  document.querySelectorAll("g.series.near").forEach((series) => series.classList.remove("near"));
  document.querySelectorAll(".chart svg.hovered").forEach((svg) => svg.classList.toggle("hovered", svg === picture));
  const points = [...(picture ? picture.querySelectorAll("g.series circle") : [])].map((point) => {
    const box = point.getBoundingClientRect();
    return { point, box, distance: Math.hypot(box.x + box.width / 2 - event.clientX, box.y + box.height / 2 - event.clientY) };
  }).filter(({ box, distance }) => box.width && distance < 60).sort((a, b) => a.distance - b.distance);
  tip.hidden = !points.length;
  if (!points.length) { if (picture) picture.classList.remove("hovered"); return; }
  picture.classList.add("hovered");
  const near = points.filter(({ distance }) => distance < points[0].distance + 3).slice(0, 6);  // curves may coincide
  near.forEach(({ point }) => point.closest("g.series").classList.add("near"));
  tip.textContent = near.map(({ point }) => point.querySelector("title").textContent).join("\n");
  const room = document.documentElement.clientWidth - tip.offsetWidth - 8;
  tip.style.left = `${Math.max(8, Math.min(event.clientX + 12, room))}px`;
  const below = event.clientY + 14, fits = below + tip.offsetHeight < innerHeight;
  tip.style.top = `${fits ? below : event.clientY - tip.offsetHeight - 14}px`;
});
new MutationObserver((changes) => {
  if (changes.some((change) => [...change.addedNodes].some((node) => node.tagName === "MAIN"))) apply();
}).observe(document.body, { childList: true });
