// A line of the last values, without axes: the number beside it says how high it is.

const SVG = "http://www.w3.org/2000/svg";
const N_POINTS = 90;
const WIDTH = 100;
const HEIGHT = 24;

export class Spark {
  constructor() {
    this.values = [];
    this.node = document.createElementNS(SVG, "svg");
    this.node.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    this.node.setAttribute("preserveAspectRatio", "none");
    this.node.setAttribute("aria-hidden", "true");
    this.node.classList.add("spark");
    this.area = document.createElementNS(SVG, "polygon");
    this.line = document.createElementNS(SVG, "polyline");
    this.node.append(this.area, this.line);
  }

  /** `top` is the least height of the scale. */
  push(value, top = 1) {
    this.values.push(value);
    if (this.values.length > N_POINTS) this.values.shift();
    const most = Math.max(top, ...this.values);
    const step = WIDTH / (N_POINTS - 1);
    const first = N_POINTS - this.values.length;
    const points = this.values.map((v, i) => {
      const y = HEIGHT - 1 - (v / most) * (HEIGHT - 3);
      return `${((first + i) * step).toFixed(1)},${y.toFixed(1)}`;
    });
    this.line.setAttribute("points", points.join(" "));
    this.area.setAttribute("points", `${(first * step).toFixed(1)},${HEIGHT} ${points.join(" ")} ${WIDTH},${HEIGHT}`);
  }
}
