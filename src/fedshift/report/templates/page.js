"use strict";
// Columns sort when their name is pressed: first downwards, then upwards. Cells hold their exact number in data-value.
function valueOf(row, column) {
  const cell = row.cells[column], exact = cell.dataset.value;
  const number = exact === undefined ? parseFloat(cell.textContent.replace("−", "-").replace(/,/g, "")) : Number(exact);
  return Number.isNaN(number) ? null : number;
}
function compare(column, down) {
  return (one, other) => {
    const a = valueOf(one, column), b = valueOf(other, column);
    if (a === null && b === null) {
      const order = one.cells[column].textContent.localeCompare(other.cells[column].textContent);
      return down ? -order : order;
    }
    if (a === null || b === null) return a === null ? 1 : -1; // what is missing stays last
    return down ? b - a : a - b;
  };
}
for (const table of document.querySelectorAll("table")) {
  const names = table.tHead.rows[0].cells;
  if (table.tBodies[0].rows.length < 2) continue;
  for (const [column, name] of Array.from(names).entries()) {
    const button = document.createElement("button");
    button.type = "button";
    button.title = "Sort by this column";
    button.append(...name.childNodes);
    name.append(button);
    button.addEventListener("click", () => {
      const down = name.getAttribute("aria-sort") !== "descending";
      for (const other of names) other.removeAttribute("aria-sort");
      name.setAttribute("aria-sort", down ? "descending" : "ascending");
      table.tBodies[0].append(...Array.from(table.tBodies[0].rows).sort(compare(column, down)));
    });
  }
}
// What is wider than the screen says that it scrolls.
function markWide() {
  for (const box of document.querySelectorAll(".scroll")) box.classList.toggle("wide", box.scrollWidth > box.clientWidth + 1);
}
addEventListener("resize", markWide);
markWide();
// A figure's file has the colours of a light page written out, since it leaves the page's style sheet.
for (const button of document.querySelectorAll(".svg-file")) {
  const figure = button.closest("figure");
  button.hidden = false;
  button.addEventListener("click", () => {
    const copy = figure.querySelector("svg").cloneNode(true), style = getComputedStyle(document.documentElement);
    copy.setAttribute("font-family", "sans-serif");
    const text = new XMLSerializer().serializeToString(copy).replace(/var\((--[a-z0-9-]+)\)/g, (_, name) => style.getPropertyValue(name).trim());
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], {type: "image/svg+xml"}));
    link.download = figure.id.replace("figure-", "") + ".svg";
    link.click();
    URL.revokeObjectURL(link.href);
  });
}
// A link to a part opens it, and so does printing the page.
function openPart() {
  const part = document.getElementById(decodeURIComponent(location.hash.slice(1)))?.querySelector(":scope > details");
  if (part) part.open = true;
}
addEventListener("hashchange", openPart);
for (const link of document.querySelectorAll("nav a")) link.addEventListener("click", () => setTimeout(openPart));
for (const part of document.querySelectorAll("details")) part.addEventListener("toggle", markWide);
addEventListener("beforeprint", () => { for (const part of document.querySelectorAll("details")) part.open = true; });
openPart();
