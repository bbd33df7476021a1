// The questions of the planning page about one layer, and their answers in MiB and forward steps.
(function () {
  "use strict";

  const place = document.getElementById("layer");
  if (place === null) return;

  const MIB = 2 ** 20;
  const FIELDS = [
    ["inputs", "inputs", 64], ["units", "units", 64], ["batch", "samples in a batch", 16],
    ["steps", "steps", 1000], ["memory", "memory", 5],
  ];

  function make(tag, attributes, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  }

  function choice(name, values) {
    const select = make("select", { id: `layer-${name}`, "aria-label": name });
    for (const value of values) select.append(make("option", { value }, value));
    return select;
  }

  const kind = choice("kind", ["LSTM", "GRU", "RNN"]), unit = choice("unit", ["%", "MiB"]);
  const fields = {};
  const rows = [make("label", { class: "explorer-row" }, make("span", {}, "layer"), kind, "")];
  for (const [name, label, value] of FIELDS) {
    fields[name] = make("input", { id: `layer-${name}`, type: "number", min: 1, step: "any", value });
    const beside = name === "memory" ? unit : "";
    rows.push(make("label", { class: "explorer-row" }, make("span", {}, label), fields[name], beside));
  }
  const answer = make("p", { id: "layer-answer", "aria-live": "polite" });
  const code = make("code", { id: "layer-code" });
  place.replaceChildren(...rows, answer, make("p", {}, code));

  const size = (bytes) => {
    const mib = bytes / MIB;
    return mib < 0.1 ? `${(1024 * mib).toFixed(1)} KiB` : `${mib.toFixed(mib < 10 ? 2 : mib < 100 ? 1 : 0)} MiB`;
  };

  function update() {
    const asked = FIELDS.map(([name]) => Number(fields[name].value));
    if (!asked.every((number) => number > 0)) {
      answer.textContent = "Give a number above 0 in each field.";
      return;
    }
    const [inputs, units, batch, steps, memory] = asked;
    const share = unit.value === "%";
    const { ordinary } = plans.layer(kind.value, inputs, units, batch, steps, 0);
    const budget = share ? (ordinary * memory) / 100 : memory * MIB;
    const found = plans.layer(kind.value, inputs, units, batch, steps, budget);
    const more = found.near
      ? "That is near the least budget, where steps may run more often."
      : `The layer runs about ${found.forward.toLocaleString("en-US")} forward steps: ` +
        `${(found.forward / steps).toFixed(2)} for each of ${steps.toLocaleString("en-US")}.`;
    answer.textContent =
      `Ordinary backpropagation holds about ${size(ordinary)}. The budget is ${size(budget)}. ${more} ` +
      `The outputs, ${size(found.outputs)}, come on top.`;
    const text = share ? `${memory}%` : `${memory}MiB`;
    code.textContent =
      `rg.${kind.value}(${inputs}, ${units}, memory="${text}").fit((${steps}, ${batch}, ${inputs}))`;
  }

  for (const control of [kind, unit, ...Object.values(fields)]) control.addEventListener("input", update);
  update();
})();
