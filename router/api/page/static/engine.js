// The live view: what the router knows of its replicas, blocks, rows and prefixes, once a second.

import { BlockMap } from "./blockmap.js";
import { $, count, element, percent, reconcile, seconds, setText } from "./dom.js";
import { Feed } from "./feed.js";
import { hasKey } from "./session.js";
import { Tiles } from "./tiles.js";

const MAX_ROWS_SHOWN = 24;
const SHADES = ["leased", "shared", "cached", "free"];

export class Engine {
  /** `onNeedsKey()` opens the question for a key; `onState(ready, reason)` hears of the server. */
  constructor({ onNeedsKey, onState }) {
    this.onState = onState;
    this.tiles = new Tiles();
    this.map = new BlockMap($("map"), $("legend"));
    this.shown = null;
    this.feed = new Feed({
      event: (event) => this.#event(event),
      refused: (refusal) => this.#refused(refusal),
      lost: (message) => this.#lost(message),
    });
    $("notice").querySelector("button").addEventListener("click", () => onNeedsKey());
  }

  watch(watching) {
    this.feed.watch(watching);
  }

  restart() {
    this.feed.restart();
  }

  redraw() {
    this.map.draw();
  }

  // ---- the connection ----

  #refused(refusal) {
    this.#feedStatus("off", "Live view is off");
    $("live").hidden = true;
    let text = refusal.message;
    if (refusal.code === "admin_needs_key") {
      text =
        "The live view is shown only on the server's own host unless it was started with API keys" +
        " (--api-keys). Chatting works without it.";
    } else if (refusal.needsKey) {
      text = hasKey() ? "The server does not accept this API key." : "The live view needs an API key.";
    }
    this.#notice(text, refusal.needsKey);
  }

  #lost(why) {
    this.#feedStatus("wait", "Reconnecting…");
    if (why) this.#notice(why);
    $("live").classList.add("stale");
  }

  #notice(text, withButton = false) {
    const notice = $("notice");
    notice.hidden = !text;
    setText(notice.querySelector("p"), text ?? "");
    notice.querySelector("button").hidden = !withButton;
  }

  #feedStatus(kind, text) {
    $("feed").dataset.kind = kind;
    setText($("feed"), text);
  }

  // ---- one event ----

  #event(event) {
    if (event.error) {
      this.#lost(event.error);
      this.onState(false, event.error);
      return;
    }
    $("live").hidden = false;
    $("live").classList.remove("stale");
    this.#feedStatus("live", "Live");
    this.#notice(null);
    this.onState(event.ready, event.reason);
    this.tiles.update(event);
    this.#replicas(event);
    this.#detail(event);
  }

  #replicas(event) {
    const live = event.replicas.filter((replica) => replica.blocks).length;
    setText($("replicas-note"), `${live} of ${event.replicas.length} live`);
    reconcile($("replicas"), event.replicas, {
      key: (replica) => replica.id,
      make: (replica) => this.#makeReplica(replica),
      update: (node, replica) => this.#updateReplica(node, replica, event.detail?.replica),
    });
  }

  #makeReplica(replica) {
    const bar = element("span", { className: "stack", attributes: { "aria-hidden": "true" } });
    for (const state of SHADES) bar.append(element("i", { attributes: { "data-state": state } }));
    const button = element("button", {
      attributes: { type: "button", title: "Show its blocks, rows and prefixes" },
      children: [
        element("span", { className: "name" }),
        element("span", { className: "badge" }),
        element("span", { className: "facts" }),
        bar,
      ],
    });
    button.addEventListener("click", () => this.feed.show(replica.id));
    return element("li", { children: [button] });
  }

  #updateReplica(node, replica, shown) {
    const button = node.firstElementChild;
    const [name, badge, facts, bar] = button.children;
    const [state, kind] = stateOf(replica);
    button.setAttribute("aria-pressed", String(replica.id === shown));
    button.disabled = !replica.blocks;
    setText(name, replica.address);
    name.title = replica.address;
    setText(badge, state);
    badge.dataset.kind = kind;
    bar.hidden = !replica.blocks;
    if (!replica.blocks) {
      setText(facts, replica.reason || "not connected");
      return;
    }
    const { blocks } = replica;
    const usable = blocks.n_blocks - 1;
    const parts = [
      `${count(replica.n_running)} of ${count(replica.max_rows)} rows`,
      `KV ${percent(blocks.leased, usable)}`,
    ];
    if (replica.last_step_us) parts.push(`step ${seconds(replica.last_step_us / 1e6)}`);
    if (replica.device) parts.push(replica.device);
    setText(facts, parts.join(" · "));
    const sizes = { ...blocks, leased: blocks.leased - blocks.shared };
    for (const part of bar.children) part.style.width = `${(100 * sizes[part.dataset.state]) / usable}%`;
  }

  #detail(event) {
    const { detail } = event;
    const replica = event.replicas.find((one) => one.id === detail?.replica);
    if (!detail || !replica?.blocks) {
      this.map.clear();
      setText($("map-note"), "no worker is connected");
      for (const node of $("legend").querySelectorAll("b")) setText(node, "");
      reconcile($("rows"), [], {});
      reconcile($("prefixes"), [], {});
      this.shown = null;
      return;
    }
    this.map.update(detail.map, this.shown === replica.id);
    this.shown = replica.id;
    this.#describeMap(replica, event.block_size);
    this.#rows(detail.rows);
    this.#prefixes(detail.prefixes ?? [], event);
  }

  #describeMap(replica, blockSize) {
    const { blocks } = replica;
    const sizes = { ...blocks, leased: blocks.leased - blocks.shared };
    const perCell = this.map.blocksPerCell;
    const cell = perCell > 1 ? `, ${perCell} per cell` : "";
    const note = `${replica.address}: ${count(blocks.n_blocks - 1)} blocks of ${blockSize} tokens${cell}`;
    setText($("map-note"), note);
    const words = SHADES.map((state) => `${count(sizes[state])} ${state}`);
    $("map").setAttribute("aria-label", `Map of KV blocks: ${words.join(", ")}`);
    for (const item of $("legend").children) {
      setText(item.querySelector("b"), count(sizes[item.firstElementChild.dataset.state]));
    }
  }

  #rows(rows) {
    const items = rows.row
      .map((row, i) => ({
        row,
        prompt: rows.prompt[i],
        cached: rows.cached[i],
        target: rows.target[i],
        done: rows.done[i],
        known: rows.known[i],
      }))
      .slice(0, MAX_ROWS_SHOWN);
    const more = rows.row.length - items.length;
    const parts = [`${count(rows.row.length)} running`];
    if (more) parts.push(`${items.length} shown`);
    setText($("rows-note"), parts.join(", "));
    const longest = Math.max(1, ...items.map((item) => Math.max(item.known, item.prompt)));
    reconcile($("rows"), items, {
      key: (item) => item.row,
      make: () => {
        const bar = element("span", { className: "stack", attributes: { "aria-hidden": "true" } });
        for (const state of ["cached", "leased", "answer"]) {
          bar.append(element("i", { attributes: { "data-state": state } }));
        }
        return element("li", { children: [element("span"), bar, element("small")] });
      },
      update: (node, item) => {
        const [name, bar, note] = node.children;
        const prefill = item.done < item.target;
        const answer = Math.max(0, item.known - item.prompt);
        const computed = Math.max(0, Math.min(item.done, item.prompt) - item.cached);
        setText(name, `Row ${item.row}`);
        const what = prefill
          ? `prompt ${count(item.done)} of ${count(item.target)}`
          : `prompt ${count(item.prompt)} + answer ${count(answer)}`;
        setText(note, what);
        const widths = [Math.min(item.cached, item.prompt), computed, answer];
        [...bar.children].forEach((part, i) => {
          part.style.width = `${(100 * widths[i]) / longest}%`;
        });
      },
    });
  }

  #prefixes(prefixes, event) {
    const empty = $("prefixes-empty");
    empty.hidden = prefixes.length > 0;
    if (!event.prefix_caching) setText(empty, "Prefix caching is off on this server.");
    $("prefixes").closest(".scroll").hidden = prefixes.length === 0;
    setText($("prefixes-note"), prefixes.length ? "found again by later prompts" : "");
    // By place: two prefixes may begin and end alike.
    const items = prefixes.map((prefix, place) => ({ ...prefix, place }));
    reconcile($("prefixes"), items, {
      key: (prefix) => prefix.place,
      make: () => {
        const begins = element("th", { attributes: { scope: "row" } });
        begins.append(element("code"), element("code", { className: "end" }));
        const cells = ["", "", "", ""].map(() => element("td"));
        return element("tr", { children: [begins, ...cells] });
      },
      update: (row, prefix) => {
        const [begins, ...cells] = row.children;
        const first = oneLine(prefix.first_text ?? prefix.first_tokens.join(" "));
        const last = oneLine(prefix.last_text ?? prefix.last_tokens.join(" "));
        setText(begins.firstChild, first);
        setText(begins.lastChild, last ? `… ${last}` : "");
        begins.title = last ? `${first} … ${last}` : first;
        const values = [prefix.hits, prefix.n_tokens, prefix.n_blocks, prefix.n_leases];
        cells.forEach((cell, i) => setText(cell, count(values[i])));
      },
    });
  }
}

const oneLine = (text) => text.replaceAll("\n", "↵");

/** The word and the kind of a replica's state. */
function stateOf(replica) {
  if (!replica.blocks) return [replica.state, replica.state === "refused" ? "bad" : "wait"];
  if (replica.suspect) return ["suspect", "bad"];
  if (replica.draining) return ["draining", "wait"];
  if (replica.half_open) return ["probing", "wait"];
  return ["live", "live"];
}
