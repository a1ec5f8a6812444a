// The engine in six numbers. Rates are made of the counters of successive events.

import { $, compact, count, element, percent, rate, seconds, setText } from "./dom.js";
import { Spark } from "./spark.js";

const RATE_OVER_S = 3;
const HITS_OVER_S = 60;

const KINDS = [
  ["output", "Output tokens/s"],
  ["prompt", "Prompt tokens/s"],
  ["running", "Running"],
  ["waiting", "Waiting"],
  ["kv", "KV in use"],
  ["hits", "Cache hits"],
];

export class Tiles {
  constructor() {
    this.history = [];
    this.tiles = {};
    for (const [name, title] of KINDS) {
      const value = element("b");
      const note = element("small");
      const spark = new Spark();
      const node = element("div", {
        className: "tile",
        attributes: { "data-tile": name },
        children: [element("span", { text: title }), value, note],
      });
      node.append(spark.node);
      $("tiles").append(node);
      this.tiles[name] = { value, note, spark };
    }
  }

  update(event) {
    const { history } = this;
    const before = history.at(-1);
    // Counters go back when the router was started again.
    if (before && event.totals.output_tokens < before.totals.output_tokens) history.length = 0;
    history.push({ time_s: event.time_s, totals: event.totals });
    while (history.length > 2 && event.time_s - history[1].time_s > HITS_OVER_S) history.shift();
    const live = event.replicas.filter((replica) => replica.blocks);
    const sum = (pick) => live.reduce((total, replica) => total + pick(replica), 0);
    const running = sum((r) => r.n_running);
    const blocks = sum((r) => r.blocks.n_blocks - 1);
    const leased = sum((r) => r.blocks.leased);
    const cached = sum((r) => r.blocks.cached);
    const output = this.#rate("output_tokens");
    const prompt = this.#rate("prompt_tokens");
    const first = history[0].totals;
    const asked = event.totals.asked_tokens - first.asked_tokens;
    const hit = event.totals.hit_tokens - first.hit_tokens;
    this.#show("output", rate(output), `${compact(event.totals.output_tokens)} in all`, output);
    this.#show("prompt", rate(prompt), `${compact(event.totals.prompt_tokens)} computed`, prompt);
    this.#show("running", count(running), `of ${count(sum((r) => r.max_rows))} rows`, running);
    const oldest = event.n_waiting ? `oldest ${seconds(event.oldest_wait_s)}` : "queue is empty";
    this.#show("waiting", count(event.n_waiting), oldest, event.n_waiting);
    this.#show("kv", percent(leased, blocks), `${percent(cached, blocks)} cached`, blocks ? leased / blocks : 0);
    if (!event.prefix_caching) this.#show("hits", "off", "prefix caching is off", 0);
    else if (asked > 0) this.#show("hits", percent(hit, asked), "of tokens, last minute", hit / asked);
    else {
      const { hit_tokens, asked_tokens } = event.totals;
      const note = asked_tokens ? "of tokens so far" : "no prompts yet";
      this.#show("hits", percent(hit_tokens, asked_tokens), note, 0);
    }
  }

  #rate(name) {
    const last = this.history.at(-1);
    const first = this.history.find((past) => last.time_s - past.time_s <= RATE_OVER_S + 0.5);
    const spent = last.time_s - first.time_s;
    return spent > 0 ? (last.totals[name] - first.totals[name]) / spent : 0;
  }

  #show(name, value, note, height) {
    const tile = this.tiles[name];
    setText(tile.value, value);
    setText(tile.note, note);
    tile.spark.push(height);
  }
}
