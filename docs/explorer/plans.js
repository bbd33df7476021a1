// What a memory costs, and the schedule that takes it: the closed forms and the small dynamic
// program of src/retrograde/plan/steps, for the planning page. Numbers in, numbers out; no page.
// A test compares it with rg.cost, and replays its schedules with rg.simulate.
(function (root) {
  "use strict";

  // binom(n, k) as a double, exact below 2**53.
  function binom(n, k) {
    let value = 1;
    for (let i = 1; i <= k; i++) value = (value * (n - k + i)) / i;
    return Math.round(value);
  }

  // The least r with t <= binom(m + r, m): no step runs forward more than r + 1 times.
  function repetitions(t, m) {
    let r = 0;
    for (let reach = 1; reach < t; reach = binom(m + r, Math.min(m, r))) r++;
    return r;
  }

  function hsmCost(t, m) {
    const r = repetitions(t, m);
    return t + r * t - (r > 0 ? binom(m + r, r - 1) : 0);
  }

  function ismCost(t, m) {
    return hsmCost(t + 1, m) - (t + 1);
  }

  // A position y at which HSM keeps a state: both parts stay within r and r - 1 repetitions.
  function hsmSplit(t, m) {
    const r = repetitions(t, m);
    const most = binom(m + r - 1, Math.min(m, r - 1));
    const rest = r >= 2 ? binom(m + r - 2, Math.min(m - 1, r - 1)) : 1;
    return Math.max(1, Math.min(most, t - Math.min(rest, t - 1), t - 1));
  }

  // MSM: rows of C(0 … longest, m), one for each memory, filled as far as they are asked for.
  // Where alpha >= beta + 1 a step is recorded at the front of a segment or not at all.
  class Mixed {
    constructor(longest, alpha, beta) {
      this.longest = longest;
      this.alpha = alpha;
      this.beta = beta;
      this.rows = [null];
    }

    row(m) {
      while (this.rows.length <= m) this.rows.push(this.fill(this.rows.length));
      return this.rows[m];
    }

    fill(m) {
      const here = new Int32Array(this.longest + 1);
      const less = m > 1 ? this.rows[m - 1] : null;
      const recorded = m > this.beta ? this.rows[m - this.beta] : null;
      const wide = this.alpha <= this.beta && m > this.alpha ? this.rows[m - this.alpha] : null;
      for (let t = 1; t <= this.longest; t++) {
        let best = t + here[t - 1]; // the last step in the working core, the rest anew
        if (recorded !== null) best = Math.min(best, 1 + recorded[t - 1]);
        if (less !== null) {
          for (let y = 1; y < t; y++) {
            const cost = y + here[y] + less[t - y];
            if (cost < best) best = cost;
          }
        }
        if (wide !== null) {
          for (let y = 2; y < t; y++) {
            best = Math.min(best, y + here[y - 1] + wide[t - y]);
          }
        }
        here[t] = best;
      }
      return here;
    }

    cost(t, m) {
      return this.row(m)[t];
    }

    // Of the cheapest choices: record the first step, else keep a state, else keep nothing.
    choice(t, m) {
      const here = this.row(m);
      const best = here[t];
      if (m > this.beta && 1 + this.rows[m - this.beta][t - 1] === best) return ["record", 1];
      if (m > 1) {
        const less = this.rows[m - 1];
        for (let y = t - 1; y >= 1; y--) {
          if (y + here[y] + less[t - y] === best) return ["store", y];
        }
      }
      if (t + here[t - 1] === best) return ["again", t];
      const wide = this.rows[m - this.alpha];
      for (let y = 2; y < t; y++) {
        if (y + here[y - 1] + wide[t - y] === best) return ["record", y];
      }
      throw new Error("no choice attains the cost");
    }
  }

  const tables = new Map();

  // One table for each alpha and beta; a longer sequence asks for a new one.
  function mixed(longest, alpha, beta) {
    const key = `${alpha} ${beta}`;
    let table = tables.get(key);
    if (table === undefined || table.longest < longest) {
      table = new Mixed(Math.max(64, 4 ** Math.ceil(Math.log2(longest) / 2)), alpha, beta);
      tables.set(key, table);
    }
    return table;
  }

  function withoutInput(alpha) {
    return Math.max(1, alpha - 1);
  }

  // Forward steps in all, the first sweep included: rg.cost(t, m, policy, alpha=alpha).
  function cost(policy, t, m, alpha) {
    if (policy === "hsm") return hsmCost(t, m);
    if (policy === "ism") return ismCost(t, m);
    return mixed(t, alpha, withoutInput(alpha)).cost(t, m);
  }

  // The first memory from which more memory buys nothing.
  function plenty(policy, t, alpha) {
    if (policy === "hsm") return Math.max(1, t - 1);
    if (policy === "ism") return t;
    return 1 + withoutInput(alpha) * (t - 1);
  }

  // The actions of one cheapest schedule, [verb, start, stop]; a state's position is both.
  function actions(policy, t, m, alpha) {
    const list = [];
    const say = (verb, start, stop) => list.push([verb, start, stop]);
    const step = (k) => {
      say("record", k, k + 1);
      say("backward", k, k + 1);
    };
    const advance = (a, b) => {
      if (b > a) say("advance", a, b);
    };
    const keep = (a, b, memory, solve) => { // state a is current; steps a … b-1
      if (b - a > 1) {
        say("store", a, a);
        solve(a, b, memory);
        say("free", a, a);
      } else step(a); // one step needs the working core alone
    };

    function hsm(a, b, memory) {
      while (b - a > 1) {
        const y = memory === 1 ? b - a - 1 : hsmSplit(b - a, memory);
        advance(a, a + y);
        if (memory === 1) step(a + y);
        else keep(a + y, b, memory - 1, hsm);
        say("load", a, a);
        b = a + y;
      }
      step(a);
    }

    function ism(a, b, memory) {
      for (let first = true; b > a; first = false) {
        const y = memory === 1 ? b - a : hsmSplit(b - a + 1, memory);
        if (!first) say("load", a, a);
        advance(a, a + y - 1);
        say("record", a + y - 1, a + y);
        if (a + y < b) ism(a + y, b, memory - 1);
        say("backward", a + y - 1, a + y);
        b = a + y - 1;
      }
    }

    const table = policy === "msm" ? mixed(t, alpha, withoutInput(alpha)) : null;

    function msm(a, b, memory) {
      while (b - a > 1) {
        const [what, y] = table.choice(b - a, memory);
        if (what === "record") {
          const size = y === 1 ? table.beta : table.alpha;
          advance(a, a + y - 1);
          say("record", a + y - 1, a + y);
          if (a + y < b) msm(a + y, b, memory - size);
          say("backward", a + y - 1, a + y);
          b = a + y - 1;
        } else if (what === "again") {
          advance(a, b - 1);
          step(b - 1);
          b -= 1;
        } else {
          advance(a, a + y);
          keep(a + y, b, memory - 1, msm);
          b = a + y;
        }
        if (b > a) say("load", a, a);
      }
      if (b > a) step(a);
    }

    say("store", 0, 0);
    ({ hsm, ism, msm })[policy](0, t, m);
    say("free", 0, 0);
    return list;
  }

  // What one layer takes in float32 on a CPU: bytes of ordinary backpropagation, of the outputs, and
  // forward steps within a budget of bytes. Sizes are as measured; module.fit(shape) has the exact ones.
  const LAYERS = { // numbers that torch holds for each unit and step; gates; numbers to keep a step
    LSTM: { held: 20, gates: 4, kept: 5 },
    GRU: { held: 10, gates: 3, kept: 0 },
    RNN: { held: 2, gates: 1, kept: 0 },
  };

  function layer(kind, inputs, units, batch, steps, budget) {
    const { held, gates, kept } = LAYERS[kind];
    const row = 4 * batch * units, weights = 4 * gates * units * (inputs + units);
    const working = kept ? 4 * weights + 50 * row : weights;
    const again = kept ? steps - Math.floor((budget - working) / (kept * row)) : 0;
    return {
      ordinary: held * row * steps,
      outputs: row * steps,
      forward: steps + Math.min(steps, Math.max(0, again)),
      near: budget < working,
    };
  }

  root.plans = { cost, plenty, actions, withoutInput, layer };
})(typeof globalThis === "undefined" ? window : globalThis);
