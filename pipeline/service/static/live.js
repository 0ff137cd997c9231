// Keeps the part of a page with the id `live` current: loads the page at data-from again every data-every milliseconds,
// and changes only the elements that differ, in place. So the focus, an open <details>, a half-filled form, a selection
// and scroll positions stay as they are. When the new page has no data-every, it is not loaded again, and its data-ended
// says why. The server makes all HTML; nothing from an answer is run as code.
"use strict";
const SLOWEST_MS = 60_000;
const connection = document.getElementById("connection");

// The line is written only when its text differs, because a screen reader reads it aloud every time it is written.
function say(text) {
  if (connection.textContent !== text) connection.textContent = text;
}

// Returns a key by which a node is found again among the children of the new page. Nodes without a name have the same
// key, and are matched by their order. A form is named by its action, so that a button that stops something is never
// turned into one that resumes it just when a user presses it.
function key(node) {
  const name = node.dataset?.key ?? (node.id || node.getAttribute?.("action") || node.getAttribute?.("aria-label"));
  return `${node.nodeName} ${name ?? (/^H\d$/.test(node.nodeName) ? node.textContent : "")}`;
}

// Gives `old` the children of `fresh`, and keeps those that both have. Adds a promise to `images` for each image that
// is being loaded.
function merge(old, fresh, images) {
  const wanted = new Set([...fresh.childNodes].map(key));
  let at = old.firstChild;
  for (const child of [...fresh.childNodes]) {
    while (at && key(at) !== key(child) && !wanted.has(key(at))) at = remove(at);
    if (at && key(at) === key(child)) {
      const next = at.nextSibling;
      change(at, child, images);
      at = next;
    } else old.insertBefore(child, at);
  }
  while (at) at = remove(at);
}

function remove(node) {
  const next = node.nextSibling;
  node.remove();
  return next;
}

function change(old, fresh, images) {
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return;
  }
  if (old.nodeName === "IMG" && old.getAttribute("src") !== fresh.getAttribute("src")) {
    images.push(exchange(old, fresh));
    return;
  }
  // the reader of the page opens and closes a <details>, so this attribute is not taken from the new page
  const own = old.nodeName === "DETAILS" ? ["open"] : [];
  for (const { name } of [...old.attributes]) {
    if (!fresh.hasAttribute(name) && !own.includes(name)) old.removeAttribute(name);
  }
  for (const { name, value } of fresh.attributes) {
    if (old.getAttribute(name) !== value && !own.includes(name)) old.setAttribute(name, value);
  }
  merge(old, fresh, images);
}

// shows the old image until the new one is loaded
async function exchange(old, fresh) {
  const image = document.importNode(fresh);
  await image.decode();
  old.replaceWith(image);
}

// loads the page again, and returns whether to load it once more later
async function refresh() {
  const live = document.getElementById("live");
  let answer, text;
  try {
    answer = await fetch(live.dataset.from, { headers: { Accept: "text/html" }, redirect: "manual",
      signal: AbortSignal.timeout(SLOWEST_MS) });
    text = await answer.text();
  } catch {
    say("The server does not answer. Trying again …");
    return true;
  }
  if (!answer.ok) {
    const again = answer.status === 429 || answer.status >= 500;
    say(answer.type === "opaqueredirect" ? "Not live: signed out. Use Refresh." :
      `The server reports a problem (${answer.status}). ${again ? "Trying again …" : "Use Refresh."}`);
    return again;
  }
  const fresh = new DOMParser().parseFromString(text, "text/html");
  const part = fresh.getElementById("live"), images = [];
  const focused = live.contains(document.activeElement);
  change(live, part, images);
  // if the element with the focus is gone, the focus goes to the content, or the next Tab would begin at the page's top
  if (focused && !live.contains(document.activeElement)) document.getElementById("content").focus({ preventScroll: true });
  document.title = fresh.title;
  await Promise.allSettled(images);
  say(part.dataset.every ? "Live." : part.dataset.ended);
  return Boolean(part.dataset.every);
}

function pause(ms) {
  return new Promise((wake) => { setTimeout(wake, ms); });
}

async function visible() {
  while (document.hidden) {
    await new Promise((wake) => { document.addEventListener("visibilitychange", wake, { once: true }); });
  }
}

async function follow() {
  for (let took = 0, again = true; again;) {
    // a server that takes long is asked less often
    await pause(Math.max(Number(document.getElementById("live").dataset.every), Math.min(10 * took, SLOWEST_MS)));
    await visible();
    const began = performance.now();
    again = await refresh();
    took = performance.now() - began;
  }
}

follow().catch(() => say("Not live. Use Refresh."));
