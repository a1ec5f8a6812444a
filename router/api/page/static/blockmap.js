// The KV blocks as a grid of cells, in the order of their ids, drawn on a canvas.

const MAX_HEIGHT = 280;
const CELL_SIZES = [14, 12, 10, 8, 7, 6, 5];
const FLASH_MS = 900;

export class BlockMap {
  /** `legend` has a swatch per state: its colours are the map's. */
  constructor(canvas, legend) {
    this.canvas = canvas;
    this.legend = legend;
    this.blocks = new Uint8Array(0);
    this.cells = new Uint8Array(0);
    this.changedAt = new Float64Array(0);
    this.layout = null;
    this.toldPerCell = 1;
    this.states = [];
    this.still = matchMedia("(prefers-reduced-motion: reduce)");
    this.frame = 0;
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
    canvas.addEventListener("pointermove", (event) => this.#point(event));
    canvas.addEventListener("pointerleave", () => canvas.removeAttribute("title"));
  }

  /** `map` as the server tells it: runs of [state, cells]. `same` says that it is of the replica drawn before. */
  update(map, same) {
    this.blocks = new Uint8Array(map.runs.reduce((sum, [, n]) => sum + n, 0));
    let at = 0;
    for (const [state, n] of map.runs) {
      this.blocks.fill(state, at, at + n);
      at += n;
    }
    this.states = map.states;
    this.toldPerCell = map.blocks_per_cell;
    if (!same) this.layout = null;
    this.#arrange();
    this.draw();
  }

  clear() {
    this.blocks = new Uint8Array(0);
    this.layout = null;
    this.#arrange();
    this.draw();
  }

  /** Blocks that one drawn cell stands for. */
  get blocksPerCell() {
    return this.toldPerCell * (this.layout?.factor ?? 1);
  }

  draw() {
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.#paint());
  }

  /** Lays the cells out for the width there is, and notes which of them changed. */
  #arrange() {
    const width = this.canvas.parentElement.clientWidth - this.#padding();
    const before = this.layout;
    this.layout = width > 0 && this.blocks.length ? layoutFor(this.blocks.length, width) : null;
    if (!this.layout) {
      this.cells = new Uint8Array(0);
      return;
    }
    const cells = coarsened(this.blocks, this.layout.factor, this.states.length);
    if (before && before.factor === this.layout.factor && cells.length === this.cells.length) {
      const now = performance.now();
      for (let i = 0; i < cells.length; i++) if (cells[i] !== this.cells[i]) this.changedAt[i] = now;
    } else {
      this.changedAt = new Float64Array(cells.length).fill(-FLASH_MS);
    }
    this.cells = cells;
  }

  #colours() {
    const swatch = (state) => {
      const node = this.legend.querySelector(`[data-state="${state}"]`);
      return node ? getComputedStyle(node).backgroundColor : "#888";
    };
    return this.states.map(swatch);
  }

  #paint() {
    const width = this.canvas.parentElement.clientWidth - this.#padding();
    if (width !== this.layout?.width) this.#arrange();
    const { canvas, cells, layout } = this;
    canvas.hidden = !layout;
    if (!layout) return;
    const { size, columns, rows, step } = layout;
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

function layoutFor(n, width) {
  const smallest = CELL_SIZES.at(-1);
  const most = Math.floor(width / smallest) * Math.floor(MAX_HEIGHT / smallest);
  const factor = Math.ceil(n / most);
  const nCells = Math.ceil(n / factor);
  for (const size of CELL_SIZES) {
    const columns = Math.floor(width / size);
    const rows = Math.ceil(nCells / columns);
    // The columns fill the width: a cell may be a little wider than high.
    if (rows * size <= MAX_HEIGHT || size === smallest) {
      return { width, factor, size, columns, rows, step: width / columns };
    }
  }
}

/** Each cell has the state that most of its blocks have. */
function coarsened(blocks, factor, nStates) {
  if (factor === 1) return blocks;
  const cells = new Uint8Array(Math.ceil(blocks.length / factor));
  const counts = new Uint32Array(nStates);
  for (let i = 0; i < cells.length; i++) {
    counts.fill(0);
    const end = Math.min(blocks.length, (i + 1) * factor);
    for (let at = i * factor; at < end; at++) counts[blocks[at]]++;
    cells[i] = counts.indexOf(Math.max(...counts));
  }
  return cells;
}
