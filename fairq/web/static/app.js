// Refreshes a page: the server sends its live part whenever that has changed. The page also works without this.
"use strict";
(() => {
  const live = document.querySelector("[data-live]");
  const state = document.getElementById("state");
  let source;

  const say = (what, text) => {
    state.dataset.state = what;
    if (text) state.textContent = text;
  };

  const show = (html) => {
    const chosen = document.getSelection();
    if (!chosen.isCollapsed && live.contains(chosen.anchorNode)) return; // keep a selection
    const focused = live.contains(document.activeElement) && document.activeElement.getAttribute("href");
    const open = [...live.querySelectorAll("details")].map((each) => each.open);
    live.replaceChildren(...new DOMParser().parseFromString(html, "text/html").body.childNodes);
    live.querySelectorAll("details").forEach((each, at) => (each.open = open[at] ?? each.open));
    if (focused) [...live.querySelectorAll("a")].find((each) => each.getAttribute("href") === focused)?.focus();
  };

  const listen = () => {
    source = new EventSource(location.pathname + location.search);
    source.onopen = () => say("live", "live");
    source.onmessage = (event) => show(event.data);
    source.addEventListener("trouble", (event) => say("broken", JSON.parse(event.data)));
    source.onerror = () => say("broken", "connecting …");
  };

  if (live && state) {
    document.addEventListener("visibilitychange", () => {
      source?.close();
      if (!document.hidden) listen();
    });
    if (!document.hidden) listen();
  }

  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.target.closest("input, textarea, select")) return;
    const find = document.querySelector(".find input[name=group]");
    if (find) event.preventDefault(), find.focus();
  });
})();
