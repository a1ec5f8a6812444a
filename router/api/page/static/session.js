// The key, requests that carry it, and server-sent events read from a response.

const KEY = "quire.key";

/** `where` is "session", for this tab, or "local", for this browser. */
export function recall(name, where = "session") {
  try {
    return (where === "local" ? localStorage : sessionStorage).getItem(name);
  } catch {
    return null; // Storage is refused.
  }
}

export function remember(name, value, where = "session") {
  try {
    const storage = where === "local" ? localStorage : sessionStorage;
    if (value) storage.setItem(name, value);
    else storage.removeItem(name);
  } catch {
    // Storage is refused: it lasts as long as the page.
  }
}

let key = recall(KEY) ?? "";

export const hasKey = () => key !== "";

export function setKey(value) {
  key = value.trim();
  remember(KEY, key);
}

/** What the server said against a request. */
export class Refusal extends Error {
  constructor(status, { message, code = null, retryAfterS = null }) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfterS = retryAfterS;
  }

  get needsKey() {
    return this.status === 401;
  }
}

/** Resolves with an ok response. Rejects with Refusal, with TypeError when the server can't be reached, and
 * with AbortError. */
export async function request(path, { body, signal } = {}) {
  const headers = {};
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const response = await fetch(path, {
    method: body === undefined ? "GET" : "POST",
    headers,
    body: body === undefined ? undefined : JSON.stringify(body),
    signal,
    cache: "no-store",
    credentials: "omit",
  });
  if (response.ok) return response;
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // Something between us and the server answered.
  }
  const retry = Number(response.headers.get("retry-after"));
  throw new Refusal(response.status, {
    message: error.message ?? `The server answered with status ${response.status}.`,
    code: error.code,
    retryAfterS: retry > 0 ? retry : null,
  });
}

/** The data of each event, in order; ends with the response. */
export async function* readEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        if (part.startsWith("data: ")) yield part.slice(6);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
