// The connection to /admin/live: open while the engine is looked at, opened again when it breaks.

import { Refusal, readEvents, request } from "./session.js";

const FIRST_PAUSE_MS = 1000;
const LONGEST_PAUSE_MS = 10000;

export class Feed {
  /** `on.event(value)`, `on.refused(refusal)` (not tried again before `restart`), `on.lost(why)` with the
   * server's words, if it had any. */
  constructor(on) {
    this.on = on;
    this.replica = 0;
    this.watching = false;
    this.abort = null;
  }

  /** Whether somebody looks. */
  watch(watching) {
    if (watching === this.watching) return;
    this.watching = watching;
    if (watching) this.#run();
    else this.abort?.abort();
  }

  show(replica) {
    this.replica = replica;
    this.restart();
  }

  restart() {
    this.abort?.abort();
    if (this.watching) this.#run();
  }

  async #run() {
    const abort = new AbortController();
    this.abort = abort;
    let pauseMs = FIRST_PAUSE_MS;
    while (!abort.signal.aborted) {
      try {
        const response = await request(`admin/live?replica=${this.replica}`, { signal: abort.signal });
        for await (const data of readEvents(response)) {
          if (abort.signal.aborted) return;
          pauseMs = FIRST_PAUSE_MS;
          this.on.event(JSON.parse(data));
        }
        if (!abort.signal.aborted) this.on.lost(null);
      } catch (error) {
        if (abort.signal.aborted) return;
        if (error instanceof Refusal && error.status < 500) {
          this.on.refused(error);
          return;
        }
        this.on.lost(error instanceof Refusal ? error.message : null);
        if (error.retryAfterS) pauseMs = Math.max(pauseMs, error.retryAfterS * 1000);
      }
      await new Promise((resolve) => {
        setTimeout(resolve, pauseMs);
        abort.signal.addEventListener("abort", resolve, { once: true });
      });
      pauseMs = Math.min(2 * pauseMs, LONGEST_PAUSE_MS);
    }
  }
}
