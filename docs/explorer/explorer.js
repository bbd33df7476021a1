// The explorer of the planning page: sliders, the numbers they ask for, and two pictures on canvas.
// All numbers come from plans.js; nothing is loaded from elsewhere.
(function () {
  "use strict";

  const place = document.getElementById("explorer");
  if (place === null) return;

  const NAMES = { hsm: "HSM", ism: "ISM", msm: "MSM" };
  const COLORS = { hsm: "#3b7dd8", ism: "#2a9d5c", msm: "#e07b28" };
  const BLUE = COLORS.hsm, GREEN = COLORS.ism, ORANGE = COLORS.msm, GREY = "#9aa3ab";
  const LONGEST = 1000, LARGEST = 400;
  const state = { policy: "hsm", length: 100, memory: 10, alpha: 5 };

  function make(tag, attributes, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  }

  function slider(name, label, most) {
    const input = make("input", { type: "range", id: `explorer-${name}`, min: 1, max: most });
    input.value = state[name];
    const shown = make("output", { for: `explorer-${name}` });
    input.addEventListener("input", () => {
      state[name] = Number(input.value);
      update();
    });
    const row = make("label", { class: "explorer-row" }, make("span", {}, label), input, shown);
    return { row, input, shown };
  }

  const policy = make("select", { id: "explorer-policy" });
  for (const [value, title] of [
    ["hsm", "HSM: hidden states"],
    ["ism", "ISM: internal states"],
    ["msm", "MSM: both"],
  ]) {
    policy.append(make("option", { value }, title));
  }
  policy.addEventListener("input", () => {
    state.policy = policy.value;
    update();
  });

  const sliders = {
    length: slider("length", "length, in steps", LONGEST),
    memory: slider("memory", "memory, in slots", LARGEST),
    alpha: slider("alpha", "α, an internal state's size", 20),
  };
  const cost = make("strong", { id: "explorer-cost" });
  const sentence = make("p", { id: "explorer-sentence", "aria-live": "polite" });
  const code = make("code", { id: "explorer-code" });
  const schedule = make("canvas", { id: "explorer-schedule", role: "img" });
  const curve = make("canvas", { id: "explorer-curve", role: "img" });

  function legend(...items) {
    const row = make("p", { class: "explorer-legend" });
    for (const [color, text] of items) {
      const swatch = make("i", {});
      swatch.style.background = color;
      row.append(make("span", {}, swatch, text));
    }
    return row;
  }

  place.replaceChildren(
    make("label", { class: "explorer-row" }, make("span", {}, "policy"), policy, make("output", {})),
    ...Object.values(sliders).map((each) => each.row),
    sentence,
    make("p", {}, code),
    make("h3", { id: "the-schedule" }, "The schedule"),
    schedule,
    legend([BLUE, "run forward"], [ORANGE, "recorded"], [GREEN, "backpropagated"], [GREY, "kept"]),
    make("h3", { id: "the-trade-off" }, "The trade-off"),
    curve,
    legend([COLORS.hsm, "HSM"], [COLORS.ism, "ISM"], [COLORS.msm, "MSM"]),
  );

  const words = (number) => number.toLocaleString("en-US");
  const ink = () => getComputedStyle(place).color;

  // A canvas as wide as its column, in device pixels, cleared; coordinates stay CSS pixels.
  function brush(canvas, height) {
    const width = Math.max(240, place.clientWidth), ratio = window.devicePixelRatio || 1;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.font = "11px sans-serif";
    pen.fillStyle = ink();
    return [pen, width];
  }

  // Rows are sweeps: what runs forward from a state until the next state is loaded.
  function laidOut(actions) {
    const runs = [], kept = [], since = new Map();
    let row = 0;
    for (const [verb, start, stop] of actions) {
      if (verb === "load") row++;
      else if (verb === "store") since.set(`s${start}`, row);
      else if (verb === "free") kept.push([start, start, since.get(`s${start}`), row]);
      else {
        runs.push([verb, start, stop, row]);
        if (verb === "record") since.set(`r${start}`, row);
        if (verb === "backward") kept.push([start, stop, since.get(`r${start}`), row]);
      }
    }
    return { runs, kept, rows: row + 1 };
  }

  function drawSchedule(actions) {
    const { runs, kept, rows } = laidOut(actions);
    const high = Math.min(24, Math.max(420 / rows, 0.4));
    const top = 18, left = 6, [pen, width] = brush(schedule, top + rows * high + 6);
    const x = (step) => left + (step * (width - 2 * left)) / state.length;
    pen.fillText("step 0", left, 11);
    pen.textAlign = "right";
    pen.fillText(`step ${words(state.length)}`, width - left, 11);
    for (const [start, stop, first, last] of kept) {
      const field = stop > start;
      pen.globalAlpha = field ? 0.25 : 0.6;
      pen.fillStyle = field ? ORANGE : GREY;
      const wide = field ? x(stop) - x(start) : Math.min(3, Math.max(1, width / state.length / 3));
      pen.fillRect(x(start) - (field ? 0 : wide / 2), top + first * high, wide, (last - first + 1) * high);
    }
    pen.globalAlpha = 1;
    const thick = Math.max(0.5, Math.min(3, high / 4));
    for (const [verb, start, stop, row] of runs) {
      pen.fillStyle = verb === "advance" ? BLUE : verb === "record" ? ORANGE : GREEN;
      const at = verb === "backward" ? 0.7 : 0.3;
      pen.fillRect(x(start), top + (row + at) * high - thick / 2, x(stop) - x(start), thick);
    }
    schedule.setAttribute("aria-label", `the schedule: ${words(rows)} sweeps over ${words(state.length)} steps`);
  }

  // Memories at which the curve is drawn: every one while few, then ever fewer.
  function memories(most) {
    const found = [];
    for (let m = 1; m <= most; m += Math.max(1, Math.floor(m / 24))) found.push(m);
    if (found[found.length - 1] !== most) found.push(most);
    return found;
  }

  function drawCurve() {
    const { length, alpha } = state, height = 260, bottom = 34, left = 40, top = 12;
    const [pen, width] = brush(curve, height);
    const most = state.policy === "ism" ? LARGEST * alpha : LARGEST;
    const x = (units) => left + ((width - left - 10) * Math.log(units)) / Math.log(most);
    const highest = (length + 1) / 2;
    const y = (steps) =>
      height - bottom - ((height - bottom - top) * Math.log(steps)) / Math.max(0.7, Math.log(highest));
    pen.strokeStyle = GREY;
    pen.lineWidth = 0.5;
    pen.textAlign = "right";
    for (const steps of [1, 2, 5, 10, 20, 50, 100, 200, 500].filter((s) => s <= Math.max(2, highest))) {
      pen.beginPath();
      pen.moveTo(left, y(steps));
      pen.lineTo(width - 10, y(steps));
      pen.stroke();
      pen.fillText(`${steps}×`, left - 5, y(steps) + 4);
    }
    pen.textAlign = "center";
    for (const units of [1, 3, 10, 30, 100, 300, 1000, 3000].filter((u) => u <= most)) {
      pen.fillText(words(units), x(units), height - bottom + 15);
    }
    pen.fillText("memory, in hidden states", left + (width - left) / 2, height - 4);
    for (const each of ["hsm", "ism", "msm"]) {
      const size = each === "ism" ? alpha : 1;
      pen.strokeStyle = COLORS[each];
      pen.lineWidth = each === state.policy ? 2.5 : 1;
      pen.beginPath();
      for (const m of memories(Math.min(LARGEST, Math.floor(most / size)))) {
        pen.lineTo(x(m * size), y(plans.cost(each, length, m, alpha) / length));
      }
      pen.stroke();
    }
    const now = plans.cost(state.policy, length, state.memory, alpha) / length;
    pen.fillStyle = COLORS[state.policy];
    pen.beginPath();
    pen.arc(x(state.memory * (state.policy === "ism" ? alpha : 1)), y(now), 5, 0, 7);
    pen.fill();
    curve.setAttribute("aria-label", "forward steps of each step against memory, for three policies");
  }

  let due = false;

  function draw() {
    due = false;
    drawSchedule(plans.actions(state.policy, state.length, state.memory, state.alpha));
    drawCurve();
  }

  function update() {
    const { length, memory, alpha } = state;
    const steps = plans.cost(state.policy, length, memory, alpha);
    const enough = plans.plenty(state.policy, length, alpha);
    const slots = state.policy === "ism" ? "internal states" : "hidden states";
    for (const [name, each] of Object.entries(sliders)) each.shown.textContent = words(state[name]);
    cost.textContent = words(steps);
    sentence.replaceChildren(
      cost,
      ` forward steps for ${words(length)} steps in the room of ${words(memory)} ${slots}: ` +
        `${(steps / length).toFixed(2)} for each step. If a backward step takes as long as two forward ` +
        `steps, an iteration takes ${((steps / length + 2) / 3).toFixed(2)} times ordinary backpropagation. ` +
        `From ${words(enough)} ${slots} on, more memory saves nothing.`,
    );
    const also = state.policy === "msm" ? `, alpha=${alpha}` : "";
    code.textContent = `rg.cost(${length}, ${memory}, policy="${state.policy}"${also})  # ${steps}`;
    if (!due) {
      due = true;
      requestAnimationFrame(draw);
    }
  }

  window.addEventListener("resize", draw);
  // Light and dark: the ink of the pictures follows the page's.
  new MutationObserver(draw).observe(document.body, { attributeFilter: ["data-md-color-scheme"] });
  update();
})();
