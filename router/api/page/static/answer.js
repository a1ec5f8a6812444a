// An answer as it grows: plain text, with fenced code set apart.

import { element } from "./dom.js";

const FENCE = /^ {0,3}```/;

/** Text only ever goes into text nodes. A line that is complete is never touched again, so a selection above
 * it survives. */
export class AnswerView {
  constructor(node) {
    this.node = node;
    this.text = "";
    this.inCode = false;
    this.block = null;
    this.line = null;
    this.last = "";
  }

  push(text) {
    this.text += text;
    const parts = text.split("\n");
    parts.forEach((part, i) => {
      if (i > 0) this.#endLine();
      this.#extend(part);
    });
  }

  #extend(part) {
    if (!part) return;
    this.last += part;
    if (!this.line) {
      this.block ??= this.#open();
      this.line = document.createTextNode("");
      this.block.append(this.line);
    }
    this.line.appendData(part);
  }

  #endLine() {
    if (FENCE.test(this.last)) {
      this.line?.remove();
      if (this.block && !this.block.textContent) this.block.remove();
      this.inCode = !this.inCode;
      this.block = null;
    } else {
      this.block ??= this.#open();
      if (this.line) this.line.appendData("\n");
      else this.block.append("\n");
    }
    this.line = null;
    this.last = "";
  }

  /** A fence that ends the answer without a line break is taken away too. */
  finish() {
    if (this.inCode && FENCE.test(this.last)) this.line?.remove();
  }

  #open() {
    const block = element(this.inCode ? "pre" : "div", { className: this.inCode ? "code" : "text" });
    if (this.inCode) {
      block.tabIndex = 0;
      block.setAttribute("role", "region");
      block.setAttribute("aria-label", "Code");
    }
    this.node.append(block);
    return block;
  }
}

/** What a model thinks before it answers, above the answer; there only when it does. */
export class ThoughtsView {
  constructor(message) {
    this.message = message;
    this.view = null;
  }

  push(text) {
    if (!this.view) {
      const body = element("div");
      const node = element("details", {
        className: "thoughts",
        attributes: { open: "" },
        children: [element("summary", { text: "Thoughts" }), body],
      });
      this.message.prepend(node);
      this.view = new AnswerView(body);
    }
    this.view.push(text);
  }
}
