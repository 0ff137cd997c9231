// Follows a run. With every event of its stream, the page is loaded again and its live part takes the place of the
// old one: the server makes all HTML, and nothing from an event becomes HTML here.
"use strict";
const connection = document.getElementById("connection");
const stream = new EventSource(document.getElementById("live").dataset.events);
let loading = false, again = false, ended = false;

async function refresh() {
  if (loading) { again = true; return; }
  loading = true;
  do {
    again = false;
    try {
      const answer = await fetch(location.pathname, { headers: { Accept: "text/html" }, redirect: "error" });
      if (!answer.ok) throw new Error(answer.statusText);
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
      const part = fresh.getElementById("live");
      const focused = document.activeElement?.getAttribute("aria-label");
      document.getElementById("live").replaceWith(part);
      if (focused) [...part.querySelectorAll("[tabindex]")].find((e) => e.getAttribute("aria-label") === focused)?.focus();
      document.title = fresh.title;
      say(ended ? "The run has ended." : "Live.");
    } catch {
      say("The server does not answer. Use Refresh, or wait.");
    }
  } while (again);
  loading = false;
}

// The line is written only when its text differs, because a screen reader reads it aloud every time it is written.
function say(text) {
  if (connection.textContent !== text) connection.textContent = text;
}

stream.addEventListener("progress", refresh);
stream.addEventListener("end", () => { ended = true; stream.close(); refresh(); });
stream.addEventListener("problem", () => { stream.close(); say("The stream has ended with a problem. Use Refresh."); });
stream.addEventListener("error", () => {
  if (!ended) say(stream.readyState === EventSource.CLOSED ? "Not live. Use Refresh." : "Connecting again …");
});
