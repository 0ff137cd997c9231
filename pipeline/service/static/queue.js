// Keeps the tables of the queue up to date. The server makes all HTML; the form below them is left alone.
"use strict";
const EVERY_MS = 3000;

async function refresh() {
  const answer = await fetch(document.querySelector("main a").href, { headers: { Accept: "text/html" }, redirect: "error" });
  if (!answer.ok) return;
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html").getElementById("live");
  const old = document.getElementById("live");
  // buttons carry a token that changes with the session; a table that says the same is left alone
  if (fresh.textContent === old.textContent) return;
  const focused = old.contains(document.activeElement) ? document.activeElement.textContent : "";
  old.replaceWith(fresh);
  if (focused) [...fresh.querySelectorAll("a, button")].find((e) => e.textContent === focused)?.focus();
}

setInterval(() => { if (!document.hidden) refresh().catch(() => {}); }, EVERY_MS);
