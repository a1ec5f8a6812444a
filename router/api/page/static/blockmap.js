// The KV blocks as a grid of cells, in the order of their ids, drawn on a canvas.

const MAX_HEIGHT = 280;
const CELL_SIZES = [14, 12, 10, 8, 7, 6, 5, 4, 3, 2];
const FLASH_MS = 900;

export class BlockMap {
  /** `legend` has a swatch per state: its colours are the map's. */
  constructor(canvas, legend) {
    this.canvas = canvas;
    this.legend = legend;
    this.cells = new Uint8Array(0);
    this.changedAt = new Float64Array(0);
    this.states = [];
    this.blocksPerCell = 1;
    this.still = matchMedia("(prefers-reduced-motion: reduce)");
    this.frame = 0;
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
    canvas.addEventListener("pointermove", (event) => this.#point(event));
    canvas.addEventListener("pointerleave", () => canvas.removeAttribute("title"));
  }

  /** `map` as the server tells it: runs of [state, cells]. `same` says that it is of the replica drawn before. */
  update(map, same) {
    const cells = new Uint8Array(map.runs.reduce((sum, [, n]) => sum + n, 0));
    let at = 0;
    for (const [state, n] of map.runs) {
      cells.fill(state, at, at + n);
      at += n;
    }
    const comparable = same && cells.length === this.cells.length;
    if (!comparable) this.changedAt = new Float64Array(cells.length).fill(-FLASH_MS);
    else {
      const now = performance.now();
      for (let i = 0; i < cells.length; i++) if (cells[i] !== this.cells[i]) this.changedAt[i] = now;
    }
    this.cells = cells;
    this.states = map.states;
    this.blocksPerCell = map.blocks_per_cell;
    this.draw();
  }

  clear() {
    this.cells = new Uint8Array(0);
    this.draw();
  }

  draw() {
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.#paint());
  }

  #layout(width) {
    const n = this.cells.length;
    for (const size of CELL_SIZES) {
      const columns = Math.floor(width / size);
      const rows = Math.ceil(n / columns);
      const fits = rows * size <= MAX_HEIGHT || size === CELL_SIZES.at(-1);
      // The columns fill the width: a cell may be a little wider than high.
      if (fits) return { size, columns, rows, step: width / columns };
    }
  }

  #colours() {
    const swatch = (state) => {
      const node = this.legend.querySelector(`[data-state="${state}"]`);
      return node ? getComputedStyle(node).backgroundColor : "#888";
    };
    return this.states.map(swatch);
  }

  #paint() {
    const { canvas, cells } = this;
    const width = canvas.parentElement.clientWidth - this.#padding();
    if (width <= 0 || !cells.length) {
      canvas.style.height = "0px";
      return;
    }
    const layout = this.#layout(width);
    const { size, columns, rows, step } = layout;
    this.layout = layout;
    const scale = devicePixelRatio || 1;
    const height = rows * size;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    const colours = this.#colours();
    const gap = size > 4 ? 1 : 0;
    const ring = getComputedStyle(canvas).color;
    const now = performance.now();
    let moving = false;
    for (let i = 0; i < cells.length; i++) {
      const column = i % columns;
      const x = Math.round(column * step);
      const cellWidth = Math.round((column + 1) * step) - x - gap;
      const y = Math.floor(i / columns) * size;
      context.fillStyle = colours[cells[i]];
      context.fillRect(x, y, cellWidth, size - gap);
      const age = now - this.changedAt[i];
      if (age < FLASH_MS && !this.still.matches) {
        moving = true;
        context.globalAlpha = 0.55 * (1 - age / FLASH_MS);
        context.fillStyle = ring;
        context.fillRect(x, y, cellWidth, size - gap);
        context.globalAlpha = 1;
      }
    }
    if (moving) this.draw();
  }

  #padding() {
    const style = getComputedStyle(this.canvas.parentElement);
    return parseFloat(style.paddingLeft) + parseFloat(style.paddingRight);
  }

  #point(event) {
    if (!this.layout || !this.cells.length) return;
    const { size, columns, step } = this.layout;
    const column = Math.floor(event.offsetX / step);
    const i = Math.floor(event.offsetY / size) * columns + column;
    if (column >= columns || i >= this.cells.length) {
      this.canvas.removeAttribute("title");
      return;
    }
    const first = i * this.blocksPerCell;
    const last = first + this.blocksPerCell - 1;
    const which = this.blocksPerCell === 1 ? `Block ${first}` : `Blocks ${first} to ${last}, mostly`;
    this.canvas.title = `${which}: ${this.states[this.cells[i]]}`;
  }
}
