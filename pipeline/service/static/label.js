// Presses a button of the form by one key. It can be turned off, because a key alone may belong to another program.
"use strict";
const keys = { g: "good", b: "bad", u: "unsure" };
const form = document.getElementById("label"), wanted = document.getElementById("by-key");
let sent = false;

wanted.checked = localStorage.getItem("label-by-key") !== "no";
wanted.addEventListener("change", () => localStorage.setItem("label-by-key", wanted.checked ? "yes" : "no"));
document.getElementById("keys").hidden = false;
document.addEventListener("keydown", (event) => {
  const label = keys[event.key];
  if (!label || !wanted.checked || sent || event.repeat || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.matches("input:not([type=checkbox]), select, textarea")) return;
  // a second key press must not send another label while the next document is loaded
  sent = true;
  form.requestSubmit(form.querySelector(`button[value="${label}"]`));
});
