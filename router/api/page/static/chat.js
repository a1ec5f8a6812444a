// The playground: a conversation, its settings, and what each answer cost.

import { AnswerView, ThoughtsView } from "./answer.js";
import { $, count, element, rate, seconds } from "./dom.js";
import { readEvents, recall, remember, request } from "./session.js";

const SETTINGS = "quire.settings";

export class Chat {
  /** `onNeedsKey(message)` is called when the server wants a key. */
  constructor({ onNeedsKey }) {
    this.onNeedsKey = onNeedsKey;
    this.turns = [];
    this.running = null;
    this.settings = $("settings");
    this.log = $("log");
    this.prompt = $("prompt");
    this.#restoreSettings();
    this.#wire();
  }

  setLimits({ max_total_tokens: most }) {
    if (most) this.settings.elements.max_tokens.max = most;
  }

  // ---- wiring ----

  #wire() {
    $("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit();
    });
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      if (matchMedia("(pointer: coarse)").matches) return;
      event.preventDefault();
      this.#submit();
    });
    this.prompt.addEventListener("input", () => this.#fitPrompt());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !document.querySelector("dialog[open]")) this.stop();
    });
    $("stop-button").addEventListener("click", () => this.stop());
    $("clear-button").addEventListener("click", () => this.clear());
    $("settings-button").addEventListener("click", () => this.#showSettings(this.settings.hidden));
    this.settings.addEventListener("submit", (event) => event.preventDefault());
    this.settings.addEventListener("input", () => this.#settingsChanged());
    for (const example of $("empty").querySelectorAll("button")) {
      example.addEventListener("click", () => {
        this.prompt.value = example.textContent;
        this.#submit();
      });
    }
  }

  #showSettings(shown) {
    this.settings.hidden = !shown;
    $("settings-button").setAttribute("aria-expanded", String(shown));
  }

  #fitPrompt() {
    this.prompt.style.height = "auto";
    this.prompt.style.height = `${Math.min(this.prompt.scrollHeight + 2, 200)}px`;
  }

  #restoreSettings() {
    let saved = {};
    try {
      saved = JSON.parse(recall(SETTINGS) ?? "{}");
    } catch {
      // Another version's settings.
    }
    for (const field of this.settings.elements) {
      if (field.name && typeof saved[field.name] === "string") field.value = saved[field.name];
    }
    this.#settingsChanged();
  }

  #settingsChanged() {
    const values = {};
    for (const field of this.settings.elements) if (field.name) values[field.name] = field.value;
    remember(SETTINGS, JSON.stringify(values));
    for (const output of this.settings.querySelectorAll("output")) {
      output.textContent = Number($(output.htmlFor.value).value).toFixed(2);
    }
  }

  // ---- the conversation ----

  clear() {
    this.stop();
    this.turns = [];
    this.log.replaceChildren($("empty") ?? this.emptyNode);
    this.prompt.focus();
  }

  stop() {
    this.running?.abort();
  }

  #submit() {
    const text = this.prompt.value;
    if (this.running || !text.trim()) return;
    if (!this.settings.checkValidity()) {
      this.#showSettings(true);
      this.settings.reportValidity();
      return;
    }
    this.prompt.value = "";
    this.#fitPrompt();
    this.emptyNode ??= $("empty");
    this.emptyNode.remove();
    const turn = { user: text, answer: "", nodes: [this.#userNode(text)] };
    this.turns.push(turn);
    this.#answer(turn);
  }

  #again(turn) {
    if (this.running || this.turns.at(-1) !== turn) return;
    turn.nodes.pop().remove();
    turn.answer = "";
    this.#answer(turn);
  }

  #userNode(text) {
    const node = element("article", {
      className: "message user",
      attributes: { "aria-label": "You" },
      children: [element("div", { className: "text", text })],
    });
    this.log.append(node);
    return node;
  }

  #body() {
    const { system, temperature, top_p, max_tokens, seed } = this.settings.elements;
    const messages = [];
    if (system.value.trim()) messages.push({ role: "system", content: system.value });
    for (const turn of this.turns) {
      // A question that got no answer is not asked again with the next one.
      if (!turn.answer && turn !== this.turns.at(-1)) continue;
      messages.push({ role: "user", content: turn.user });
      if (turn.answer) messages.push({ role: "assistant", content: turn.answer });
    }
    const body = {
      messages,
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
      temperature: Number(temperature.value),
      top_p: Number(top_p.value),
      max_tokens: Number(max_tokens.value),
    };
    if (seed.value !== "") body.seed = Number(seed.value);
    return body;
  }

  async #answer(turn) {
    for (const old of this.log.querySelectorAll(".again")) old.remove();
    const content = element("div", { className: "content" });
    const facts = element("p", { className: "facts", text: "Waiting for the first token…" });
    const node = element("article", {
      className: "message answer running",
      attributes: { "aria-label": "Answer", "aria-busy": "true" },
      children: [content, facts],
    });
    turn.nodes.push(node);
    this.log.append(node);
    this.log.scrollTop = this.log.scrollHeight;
    const view = new AnswerView(content);
    const thoughts = new ThoughtsView(node);
    const measure = new Measure();
    this.running = new AbortController();
    this.#showRunning(true);
    let end = "";
    try {
      end = await this.#stream({ view, thoughts, measure, facts }, this.running.signal);
    } catch (error) {
      if (error.name === "AbortError") end = "stopped";
      else this.#showError(node, error);
    } finally {
      view.finish();
      turn.answer = view.text;
      this.running = null;
      this.#showRunning(false);
      node.classList.remove("running");
      node.removeAttribute("aria-busy");
      this.#finish(turn, node, facts, measure, end);
    }
  }

  /** Resolves with why the answer ended. */
  async #stream({ view, thoughts, measure, facts }, signal) {
    const response = await request("v1/chat/completions", { body: this.#body(), signal });
    let end = "";
    for await (const data of readEvents(response)) {
      if (data === "[DONE]") return end;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      const choice = event.choices[0];
      const { content, reasoning_content: thought } = choice?.delta ?? {};
      if (content || thought) measure.token();
      if (thought) this.#keepAtEnd(() => thoughts.push(thought));
      if (content) this.#keepAtEnd(() => view.push(content));
      if (choice?.finish_reason) end = choice.finish_reason;
      if (event.usage) measure.usage = event.usage;
      facts.textContent = measure.text();
    }
    throw new Error("The connection ended before the answer did.");
  }

  /** Follows the text unless the reader has scrolled away from its end. */
  #keepAtEnd(change) {
    const { scrollHeight, scrollTop, clientHeight } = this.log;
    change();
    if (scrollHeight - scrollTop - clientHeight < 60) this.log.scrollTop = this.log.scrollHeight;
  }

  #finish(turn, node, facts, measure, end) {
    const reasons = { length: "reached max tokens", stopped: "stopped" };
    facts.textContent = measure.text(reasons[end] ?? "");
    if (this.turns.at(-1) !== turn) return;
    const again = element("button", {
      className: "quiet again",
      text: node.querySelector(".error") ? "Try again" : "Regenerate",
      attributes: { type: "button" },
    });
    again.addEventListener("click", () => this.#again(turn));
    this.#keepAtEnd(() => node.append(again));
  }

  #showError(node, error) {
    let message = error.message;
    if (error instanceof TypeError) message = "The server can't be reached.";
    if (error.retryAfterS) message += ` Try again in ${error.retryAfterS} s.`;
    if (error.needsKey) this.onNeedsKey(message);
    node.querySelector(".content").append(
      element("p", { className: "error", text: message, attributes: { role: "alert" } }),
    );
  }

  #showRunning(running) {
    const stop = $("stop-button");
    const send = $("send-button");
    const hadFocus = document.activeElement === stop || document.activeElement === send;
    stop.hidden = !running;
    send.hidden = running;
    if (hadFocus) (running ? stop : this.prompt).focus();
  }
}

/** Times as the reader sees them; counts as the server tells them. */
class Measure {
  constructor() {
    this.begunMs = performance.now();
    this.firstMs = null;
    this.lastMs = null;
    this.nFirst = 0;
    this.usage = null;
  }

  token() {
    this.lastMs = performance.now();
    this.firstMs ??= this.lastMs;
  }

  text(end = "") {
    const parts = [];
    const { usage, firstMs, lastMs } = this;
    if (usage) {
      const n = usage.completion_tokens;
      this.nFirst ||= n;
      parts.push(`${count(n)} ${n === 1 ? "token" : "tokens"}`);
      const spentS = (lastMs - firstMs) / 1000;
      if (n > this.nFirst && spentS > 0) parts.push(`${rate((n - this.nFirst) / spentS)} tokens/s`);
    }
    if (firstMs !== null) parts.push(`first token ${seconds((firstMs - this.begunMs) / 1000)}`);
    if (usage) {
      const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
      parts.push(`${count(cached)} of ${count(usage.prompt_tokens)} prompt tokens cached`);
    }
    if (end) parts.push(end);
    return parts.join(" · ");
  }
}
