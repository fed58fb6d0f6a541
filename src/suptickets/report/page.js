"use strict";

// Light or dark: as the system says, until the button says otherwise.
const root = document.documentElement;
const memory = { get: () => null, set: () => {} };
try {
  const storage = window.localStorage;
  memory.get = () => storage.getItem("suptickets-theme");
  memory.set = (theme) => storage.setItem("suptickets-theme", theme);
  root.style.colorScheme = memory.get() || "";
} catch { /* no storage, no memory */ }
document.getElementById("theme").addEventListener("click", () => {
  const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  const theme = (root.style.colorScheme || system) === "dark" ? "light" : "dark";
  root.style.colorScheme = theme;
  memory.set(theme);
});

// A click on the head of a column sorts by it; a second one turns the order. Cells without a value come last.
const collator = new Intl.Collator("en", { numeric: true });
function compare(a, b) {
  const [x, y] = [a, b].map((cell) => cell.dataset.value ?? cell.textContent);
  return a.classList.contains("number") ? Number(x) - Number(y) : collator.compare(x, y);
}
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const head = button.parentElement;
    const body = head.closest("table").tBodies[0];
    const down = head.getAttribute("aria-sort") === "ascending";
    const cells = [...body.rows].map((row) => row.cells[head.cellIndex]);
    const known = cells.filter((cell) => "value" in cell.dataset || !cell.classList.contains("number"));
    const missing = cells.filter((cell) => !known.includes(cell));
    known.sort((a, b) => (down ? compare(b, a) : compare(a, b)));
    body.append(...[...known, ...missing].map((cell) => cell.parentElement));
    for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
  });
}

// A table that is wider than its place shows where it goes on.
for (const box of document.querySelectorAll(".scroll")) {
  const hint = box.previousElementSibling;
  const look = () => {
    const left = box.scrollWidth - box.clientWidth - box.scrollLeft;
    box.classList.toggle("on", left > 1);
    box.classList.toggle("back", box.scrollLeft > 1);
    hint.classList.toggle("shown", box.scrollWidth > box.clientWidth + 1);
  };
  box.addEventListener("scroll", look, { passive: true });
  new ResizeObserver(look).observe(box);
}

// The nearest point within reach of the pointer, or what is under it, shows its tooltip.
const REACH = 22;
const tooltip = document.getElementById("tooltip");
let near = null;
function distance(target, event) {
  const box = target.getBoundingClientRect();
  const x = Math.max(box.left - event.clientX, 0, event.clientX - box.right);
  const y = Math.max(box.top - event.clientY, 0, event.clientY - box.bottom);
  return Math.hypot(x, y);
}
function show(target, event) {
  if (near !== target) near?.classList.remove("near");
  near = target;
  tooltip.hidden = !target;
  if (!target) return;
  target.classList.add("near");
  tooltip.textContent = target.dataset.tip;
  const { width, height } = tooltip.getBoundingClientRect();
  tooltip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 4))}px`;
  tooltip.style.top = `${Math.max(4, event.clientY - height - 14)}px`;
}
for (const plot of document.querySelectorAll(".plot svg")) {
  const targets = [...plot.querySelectorAll("[data-tip]")];
  const look = (event) => {
    let [best, least] = [null, REACH];
    for (const target of targets) {
      const away = distance(target, event);
      if (away <= least) [best, least] = [target, away];
    }
    show(best, event);
  };
  plot.addEventListener("pointermove", look);
  plot.addEventListener("pointerdown", look);
  plot.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && show(null, event));
}
document.addEventListener("pointerdown", (event) => event.target.closest(".plot svg") || show(null, event));

// Copy the lines beside the button; where the clipboard is closed, they are at least selected.
for (const button of document.querySelectorAll(".copy")) {
  button.addEventListener("click", async () => {
    const lines = button.parentElement.querySelector("code");
    getSelection().selectAllChildren(lines);
    try {
      await navigator.clipboard.writeText(lines.textContent);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Selected";
    }
  });
}
