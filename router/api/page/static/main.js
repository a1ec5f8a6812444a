// Puts the page together: the server's state, the key, the theme, which view is shown.

import { Chat } from "./chat.js";
import { $, setText } from "./dom.js";
import { Engine } from "./engine.js";
import { hasKey, recall, remember, request, setKey } from "./session.js";

const THEMES = ["auto", "light", "dark"];
const wide = matchMedia("(min-width: 60rem)");

const chat = new Chat({ onNeedsKey: askForKey });
const engine = new Engine({ onNeedsKey: askForKey, onState: showState });

// ---- the server ----

function showState(ready, reason) {
  $("status").dataset.kind = ready ? "live" : "bad";
  setText($("status"), ready ? "Ready" : `Not ready: ${reason}`);
}

async function readInfo() {
  try {
    const info = await (await request("info")).json();
    setText($("model"), info.model_id ?? "");
    document.title = info.model_id ? `${info.model_id} · Quire` : "Quire";
    showState(info.ready, info.reason);
    chat.setLimits(info);
    if (!info.model_id) setTimeout(readInfo, 3000);
  } catch (error) {
    if (error.needsKey) {
      $("status").dataset.kind = "off";
      setText($("status"), "API key needed");
      askForKey(hasKey() ? "The server does not accept this API key." : undefined);
      return;
    }
    showState(false, error instanceof TypeError ? "the server can't be reached" : error.message);
    setTimeout(readInfo, 3000);
  }
}

// ---- the key ----

const dialog = $("key-dialog");

function askForKey(why) {
  $("key-error").hidden = !why;
  setText($("key-error"), why ?? "");
  $("key-forget").hidden = !hasKey();
  if (!dialog.open) dialog.showModal();
}

function useKey(value) {
  setKey(value);
  $("key-input").value = "";
  dialog.close();
  readInfo();
  engine.restart();
}

$("key-button").addEventListener("click", () => askForKey());
$("key-cancel").addEventListener("click", () => dialog.close());
$("key-forget").addEventListener("click", () => useKey(""));
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  if ($("key-input").value.trim()) useKey($("key-input").value);
});

// ---- the theme ----

let theme = recall("quire.theme", "local") ?? "auto";

function showTheme() {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  setText($("theme-button"), `Theme: ${theme}`);
  engine.redraw();
}

$("theme-button").addEventListener("click", () => {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  remember("quire.theme", theme === "auto" ? "" : theme, "local");
  showTheme();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => engine.redraw());

// ---- the views: side by side, or one at a time on a phone ----

function show(view) {
  document.body.dataset.view = view;
  for (const button of document.querySelectorAll("[data-show]")) {
    button.setAttribute("aria-pressed", String(button.dataset.show === view));
  }
  watch();
}

/** The engine is asked only while somebody can see it. */
function watch() {
  engine.watch(!document.hidden && (wide.matches || document.body.dataset.view === "engine"));
}

for (const button of document.querySelectorAll("[data-show]")) {
  button.addEventListener("click", () => show(button.dataset.show));
}
document.addEventListener("visibilitychange", watch);
wide.addEventListener("change", watch);

showTheme();
watch();
readInfo();
if (wide.matches) $("prompt").focus();
