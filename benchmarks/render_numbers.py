"""Renders every table of measured numbers in README and docs from the JSON of the benchmarks.

A block of a page begins with ``<!-- numbers: NAME -->`` and ends with ``<!-- end numbers -->``. It
holds the text that the function NAME makes of the results. A test fails if a page and the results
differ.

    python benchmarks/render_numbers.py   # rewrites the pages; `make numbers`
"""

import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from render_gpu import GPU_BLOCKS
from tables import MIB, size, table, time

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"(<!-- numbers: (\w+) -->\n)(.*?)(<!-- end numbers -->)", re.DOTALL)


def results(name: str) -> Any:
    """What a script wrote."""
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


#: Scripts that do not name their file by ``script.table``.
OTHERS = {
    "gpu": "benchmarks/gpu.py",
    "figure_2b": "papers/gruslys2016/processes.py",
    "sparse_jacobians": "papers/wang2020/sparse_jacobians.py",
    "sparse_networks": "papers/wang2020/sparse_networks.py",
}


def script_of(name: str) -> str:
    """The script that wrote a file."""
    stem = re.sub("_(cpu|avx2|cuda)$|(?<=^gpu)_.*", "", name)
    for path in sorted((ROOT / "benchmarks").glob("*.py")):
        if re.search(rf'\.table\("{stem}["_]', path.read_text()):
            return f"benchmarks/{path.name}"
    return OTHERS[stem]


def source(name: str) -> str:
    """Where the numbers are from, and the machine."""
    machine = results(name)["machine"]
    where = machine["device"]
    if "threads" in machine:
        where += f", {machine['threads']} thread{'s' if machine['threads'] > 1 else ''}"
    if "torch" in machine:
        where += f", torch {machine['torch']}"
    if "jax" in machine:
        where += f", jax {machine['jax']}"
    up = script_of(name), f"benchmarks/results/{name}.json"
    return f"Measured on {where} ([script]({{up}}{up[0]}), [numbers]({{up}}{up[1]}))."


def shown(name: str, head: list[str], rows: list[list[str]], more: str = "") -> str:
    """A table, with what else there is to say, and its source."""
    return f"{table(head, rows)}\n{more}{source(name)}\n"


def ratios(row: Any, keys: Iterable[str]) -> list[str]:
    """A row's ratios, each that is not refused."""
    return [f"{row['ratios'][k]:.2f}" if k in row["ratios"] else "refused" for k in keys]


def worst_and_mean(found: Any, shares: Iterable[str]) -> list[list[str]]:
    """The last rows of a table of ratios."""
    return [
        [f"*{name}*", "", *(f"{found['summary'][share][key]:.2f}" for share in shares)]
        for name, key in (("worst", "worst"), ("geometric mean", "mean"))
    ]


def five_percent() -> str:
    found = results("recurrent_grid_cpu")
    rows = [row["ratios"] for row in found["rows"] if "5%" in row["ratios"]]
    segments = [[t for way, t in row.items() if way.startswith("checkpoint")] for row in rows]
    fastest = [(row["5%"], min(times)) for row, times in zip(rows, segments, strict=True) if times]
    ours, theirs = map(statistics.geometric_mean, zip(*fastest, strict=True))
    packed = [row for row in rows if "padded torch" in row]
    least, padded = (spread([row[way] for row in packed], ".2f") for way in ("5%", "padded torch"))
    return (
        f"In 5 % of the working memory {len(rows)} of {len(found['rows'])} recurrent layers run, "
        f"{sum(row['5%'] < 1 for row in rows)} of them faster than in torch. On geometric average "
        f"they take {found['summary']['5%']['mean']:.2f}× torch's time. On {len(fastest)} layers "
        f"we also timed `torch.utils.checkpoint`: its fastest segments take {theirs:.2f}×, "
        f"retrograde {ours:.2f}×. On packed batches retrograde takes {least}× torch's time. "
        f"torch's module on the same batches, padded, takes {padded}×. "
        f"{source('recurrent_grid_cpu')}\n"
    )


def front_page() -> str:
    rows = []
    for row in sorted(results("front_page_cpu")["rows"], key=lambda r: r["torch"]["total_bytes"]):
        torch, ours, other = row["torch"], row["ours"], row["checkpoint"]
        rows.append([
            row["network"],
            f"{size(torch['total_bytes'])}, {time(torch['ms'])}",
            f"**{size(ours['total_bytes'])}**, {ours['ms'] / torch['ms']:.2f}×",
            f"{size(row['counted']['torch'])} → {size(row['counted']['ours'])} ({row['budget']})",
            "–" if other is None
            else f"{size(other['total_bytes'])}, {other['ms'] / torch['ms']:.2f}× ({other['way']})",
        ])  # fmt: skip
    head = ["network", "torch", "retrograde", "of which the budget", "`torch.utils.checkpoint`"]
    return shown("front_page_cpu", head, rows)


def first_page() -> str:
    """Three rows of :func:`front_page`."""
    rows = []
    for row in sorted(results("front_page_cpu")["rows"], key=lambda r: r["torch"]["total_bytes"]):
        torch, ours = row["torch"], row["ours"]
        if row["network"].startswith(("GRU 24", "LSTM 64", "12 transformer")):
            sizes = size(torch["total_bytes"]), f"**{size(ours['total_bytes'])}**"
            name = f"{row['network']}, budget {row['budget']}"
            rows.append([name, *sizes, f"{ours['ms'] / torch['ms']:.2f}×"])
    head = ["one training iteration on a CPU", "torch", "retrograde", "time"]
    told = "This is the peak of the whole iteration, weights excepted. Slower cases are "
    return (
        f"{table(head, rows)}\n{told}[listed too](docs/measured.md). {source('front_page_cpu')}\n"
    )


def start_page() -> str:
    """Two rows of :func:`front_page`, and the mean of the grid."""
    lines = []
    for begin in ("LSTM 64", "12 transformer"):
        (row,) = [r for r in results("front_page_cpu")["rows"] if r["network"].startswith(begin)]
        torch, ours = row["torch"], row["ours"]
        lines.append(
            f"- **{size(ours['total_bytes'])} instead of {size(torch['total_bytes'])}**, in "
            f"{ours['ms'] / torch['ms']:.2f}× torch's time: {row['network']}, with a budget of "
            f"{row['budget']}.\n"
        )
    grid = results("recurrent_grid_cpu")
    run = sum("5%" in row["ratios"] for row in grid["rows"])
    lines.append(
        f"- **{grid['summary']['5%']['mean']:.2f}× torch's time** on geometric average with a "
        f"budget of 5%: {run} of {len(grid['rows'])} recurrent layers on a CPU; "
        f"{len(grid['rows']) - run} need a larger budget.\n"
    )
    told = "Memory is the peak of a whole training iteration, weights excepted. "
    return f"{''.join(lines)}\n{told}{source('front_page_cpu')}\n"


def recurrent_grid() -> str:
    found = results("recurrent_grid_cpu")
    shares = ("100%", "50%", "20%", "10%", "5%", "1%")
    rows = []
    for row in found["rows"]:
        ways = [k for k in row["ratios"] if k.startswith("checkpoint")]
        best = min(ways, key=lambda k, r=row: r["ratios"][k], default=None)  # type: ignore[misc]
        told = "–" if best is None else f"{row['ratios'][best]:.2f} ({size(row['bytes'][best])})"
        first = f"{time(row['torch_ms'])}, {size(row['torch_bytes'])}"
        rows.append([row["work"], first, *ratios(row, shares), told])
    rows += [[*row, ""] for row in worst_and_mean(found, shares)]
    head = ["network", "torch", *shares, "checkpoint, fastest of 4 to 32 segments"]
    behind = [f"{row['work']} ({n})" for row in found["rows"] for n in row["behind"]]
    compared = sum(k.startswith("as checkpoint") for row in found["rows"] for k in row["ratios"])
    more = (
        f"Given the bytes of each number of segments, ours is slower in {len(behind)} of "
        f"{compared} comparisons{': ' * bool(behind)}{'; '.join(behind)}. "
    )
    return f"{shown('recurrent_grid_cpu', head, rows, more)}\n{without_avx512()}"


def without_avx512() -> str:
    """The same grid on a processor with half as wide registers."""
    found = results("recurrent_grid_avx2")
    shares = ("100%", "50%", "20%", "10%", "5%")
    mean, worst = (
        " / ".join(f"{found['summary'][s][key]:.2f}" for s in shares) for key in ("mean", "worst")
    )
    behind = sum(len(row["behind"]) for row in found["rows"])
    return (
        f"Without AVX-512 the mean at {' / '.join(shares)} is {mean}, and the worst "
        f"{worst}. Slower than `checkpoint` in its bytes: {behind}. "
        f"{source('recurrent_grid_avx2')}\n"
    )


def recurrent_corners() -> str:
    found, shares = results("recurrent_corners_cpu"), ("100%", "50%", "20%", "5%")
    rows = [
        [row["work"].replace("torch.", ""), time(row["torch_ms"]), *ratios(row, shares)]
        for row in found["rows"]
    ]
    rows += worst_and_mean(found, shares)
    return shown("recurrent_corners_cpu", ["network", "torch", *shares], rows)


def recurrent_drawn() -> str:
    found = results("recurrent_drawn_cpu")
    count, shares = len(found["rows"]), found["summary"]
    rows = []
    for share, one in shares.items():
        told = [f"{one[key]:.2f}" for key in ("mean", "worst")]
        rows.append([share, f"{one['rows']} of {count}", *told, one["whose"]])
    head = ["memory", "layers that run", "mean", "worst", "the worst layer"]
    slower = sum(row["ratios"].get("5%", 0) > 1 for row in found["rows"])
    over = sum(bool(row["over"]) for row in found["rows"])
    more = (
        f"In 5 %, {slower} of {count} layers take longer than torch. Budgets that were exceeded: "
    )
    return shown("recurrent_drawn_cpu", head, rows, f"{more}{over}. ")


def small_cells() -> str:
    found = results("small_cells_cpu")["rows"]
    keys = [f"{way} {share}" for way in ("as it is", "compiled") for share in ("50%", "10%", "5%")]
    keys.insert(3, "compiled no budget")
    rows = [[row["cell"], time(row["plain_ms"]), *ratios(row, keys)] for row in found]
    return shown("small_cells_cpu", ["cell", "plain loop", *keys], rows)


def gated_cells() -> str:
    found = results("gated_cells_cpu")["rows"]
    keys = [key for key in found[0]["ratios"] if key != "plain"]
    rows = []
    for row in found:
        inputs, size, batch, steps = row["shape"]
        name = f"{row['cell']} {inputs}→{size}, B={batch}, T={steps}"
        rows.append([name, time(row["plain_ms"]), *ratios(row, keys)])
    columns = [[row["ratios"][key] for row in found if key in row["ratios"]] for key in keys]
    for name, of in (("mean", statistics.geometric_mean), ("worst", max)):
        rows.append([f"*{name}*", "", *(f"{of(column):.2f}" for column in columns)])
    worst = max(max(row["worst_difference"].values()) for row in found)
    more = f"Gradients differ from the loop's by at most {worst:.0e}, relative to their norms. "
    return shown("gated_cells_cpu", ["cell", "plain loop", *keys], rows, more)


def first_call() -> str:
    rows = []
    for row in results("first_call_cpu")["rows"]:
        told = [f"{row[key] / row['plain']:.2f}×" for key in ("first", "allowed", "later")]
        rows.append([row["what"], row["budget"], time(1e3 * row["plain"]), *told])
    head = ["what", "budget", "plain iteration", "first call", "aimed at", "later call"]
    return shown("first_call_cpu", head, rows)


def resident() -> str:
    found = results("resident_cpu")
    budget, first = found["budget_bytes"], found["rows"][0]
    rows = []
    for row in found["rows"]:
        ours, plain = row["ours"], row["torch"]
        chosen = {k: v for k, v in row["environment"].items() if k != "preload"}
        asked = [f"`{name}={value}`" for name, value in chosen.items()]
        if "preload" in row["environment"]:
            asked.append(f"`LD_PRELOAD=lib{row['environment']['preload']}.so`")
        rows.append([
            "<br>".join(asked) or "the C library as it is",
            f"{size(ours['resident_bytes'])}, {ours['resident_bytes'] / budget:.2f}×",
            f"{ours['resident_bytes_of_first'] / budget:.2f}×",
            f"{ours['seconds'] / first['ours']['seconds']:.2f}×",
            size(plain["resident_bytes"]),
            f"{plain['seconds'] / first['torch']['seconds']:.2f}×",
        ])  # fmt: skip
    head = ["environment", "within 200 MiB", "first call", "time", "torch", "time"]
    return shown("resident_cpu", head, rows)


def weight() -> str:
    rows = []
    for row in results("weight_cpu")["rows"]:
        more = {key: row["ours"][key] - row["torch"][key] for key in row["ours"]}
        rows.append([row["layer"], size(more["resident_bytes"]), f"{more['seconds']:.2f} s"])
    return shown("weight_cpu", ["once forward and back", "more resident", "more time"], rows)


def chain_least() -> str:
    rows = []
    for row in results("chain_least_cpu")["rows"]:
        cells = [size(row[s]) if row[s] else "refused" for s in ("50%", "25%")]
        least = f"{size(row['least'])}, {row['least'] / row['ordinary']:.0%}"
        rows.append([row["network"], size(row["ordinary"]), *cells, least])
    head = ["network", "ordinary", "seen at a half", "at a quarter", "the least"]
    return shown("chain_least_cpu", head, rows)


def jax_scan() -> str:
    shares = ("50%", "20%", "10%", "5%", "1%")
    rows, beside, beyond, more = [], [], [], 0.0
    for row in results("jax_scan_cpu")["rows"]:
        taken, held = row["ratios"], row["bytes"]
        cells = ratios(row, shares)
        nested = [k for k in taken if k.startswith("nested")]
        best = min(nested, key=taken.__getitem__)
        pairs = [(k, f"as {k}") for k in nested]
        pairs += [(k, k.replace("equinox ", "") + " checkpoints") for k in taken if k[:3] == "equ"]
        beside += [(taken[ours] / taken[k], row["work"], k) for k, ours in pairs]
        beyond += [(taken[k] / cost, row["work"], k) for k, cost in row["predicted"].items()]
        more = max(more, *(held[f"as {k}"] / held[k] for k in nested))
        both = f"{taken[best]:.2f}; {taken['as ' + best]:.2f}"
        other = f"{taken['equinox 10']:.2f}; {taken['10 checkpoints']:.2f}"
        sizes = f"{size(held['lax'])} → {size(held['5%'])}"
        rows.append([row["work"], time(row["lax_ms"]), sizes, *cells, both, other])
    head = ["work", "`lax.scan`", "at 5%", *shares, "nested; ours", "equinox; ours"]
    nested, others = ([b for b in beside if b[2][:3] == kind] for kind in ("nes", "equ"))
    (worst, work, way), (most, where, what) = max(nested), max(others)
    over, place, share = max(beyond)
    return (
        table(head, rows)
        + f"\nGiven the budget that nested segments hold, ours takes {worst:.2f} times their time "
        f"at worst ({work}, {way}). It is {statistics.geometric_mean(n[0] for n in nested):.2f} in "
        f"the mean; {sum(n[0] > 1.05 for n in nested)} of {len(nested)} are beyond 1.05. XLA "
        f"reuses buffers differently, so all bytes are up to {more:.2f} times theirs. "
        f"With as many checkpoints as equinox it takes {most:.2f} at worst ({where}, {what}), "
        f"{statistics.geometric_mean(n[0] for n in others):.2f} in the mean. An iteration takes at "
        f"most {over:.2f} of what its schedule's steps say ({place}, {share}). "
        f"{source('jax_scan_cpu')}\n"
    )


def jax_compiling() -> str:
    rows = [
        [f"{row['length']:,}", row["way"].replace("lax", "`lax.scan`"), f"{row['seconds']:.2f} s",
         f"{row['lines']:,}"]
        for row in results("jax_scan_cpu")["compiling"]
    ]  # fmt: skip
    head = ["steps", "way", "compiling", "lines of the program"]
    return shown("jax_scan_cpu", head, rows)


def other_people() -> str:
    shares = ("50%", "10%", "5%")
    rows = [
        [row["cell"], time(row["plain_ms"]), *ratios(row, shares), ("no", "yes")[row["bitwise"]]]
        for row in results("other_people_cpu")["rows"]
    ]
    head = ["cell", "plain loop", *shares, "same bits"]
    return shown("other_people_cpu", head, rows)


def library_models() -> str:
    rows = []
    shares = ("65%", "50%", "30%", "20%", "10%", "least")
    for row in results("library_models_cpu")["rows"]:
        cells = []
        for share in shares:
            told = "refused" if share not in row["ratios"] else f"{row['ratios'][share]:.2f}"
            if share in row["ratios"] and share not in row["bitwise"] and "plain" in row["bitwise"]:
                told += ", other bits"
            cells.append(told)
        cells[-1] += f" ({row['least'] / row['ordinary']:.0%})"
        other = "–"
        if "checkpoint" in row["bytes"]:
            taken = row["bytes"]["checkpoint"] / row["ordinary"]
            other = f"{row['ratios']['checkpoint']:.2f} ({taken:.0%})"
        plain = f"{time(row['plain_ms'])}, {size(row['ordinary'])}"
        covered = row["ordinary"] / (row["ordinary"] + row["elsewhere"])
        model = row["model"] + ("" if "plain" in row["bitwise"] else " (its own bits vary)")
        theirs = f"{row['ratios'].get('as checkpoint', 0):.2f}".replace("0.00", "–")
        rows.append([model, plain, f"{covered:.0%}", *cells, other, theirs])
    head = ["model", "as it is", "covered", *shares, "checkpoint of blocks", "ours in its bytes"]
    return shown("library_models_cpu", head, rows)


def rollouts() -> str:
    rows = []
    for row in results("rollouts_cpu")["rows"]:
        for by in ("budget", "unroll"):
            cells = []
            for share in ("50%", "20%", "10%", "5%", "least", "steps", "layers", "both"):
                if share == "least":
                    cells.append(f"{row['share'][f'{by} least']:.1%}")
                    continue
                ratio = row["ratio"].get(f"{by} {share}")
                told = "refused" if ratio is None else f"{ratio:.2f}"
                if share in row["ratio"]:
                    told += f", {row['ratio'][share]:.2f} ({row['share'][share]:.0%})"
                cells.append(told)
            whole = f"{time(row['plain_ms'])}, {size(row['plain_bytes'])}"
            rows.append([row["rollout"], whole, f"`rg.{by}`", *cells])
    head = [
        "rollout",
        "as it is",
        "by",
        "50%",
        "20%",
        "10%",
        "5%",
        "least",
        "steps",
        "layers",
        "both",
    ]
    return shown("rollouts_cpu", head, rows)


def scan_backward() -> str:
    rows = []
    for row in results("scan_backward_cpu")["results"]:
        case, ways = row["case"], row["ways"]
        cells = []
        for way in ("100%", "scan"):
            low, high = (f(ways[way]["backward_speedup_of_processes"]) for f in (min, max))
            taken = time(1e3 * ways[way]["backward_seconds"])
            speed = ways[way]["backward_speedup"]
            cells.append(f"{taken}, {speed:.2g}× ({low:.2g}–{high:.2g})")
        asked = f", in {case['memory']} of the memory" if case["memory"] else ""
        rows.append([
            f"{case['cell']} {case['inputs']}→{case['hidden']}, T = {case['length']:,}{asked}",
            time(1e3 * ways["torch"]["backward_seconds"]),
            *cells,
            f"{ways['100%']['step_speedup']:.2g}×",
        ])  # fmt: skip
    ways = '`memory="100%"`', '`backward="scan"`'
    head = ["network, B = 16", "torch's backward pass", *ways, "both passes"]
    return shown("scan_backward_cpu", head, rows)


def planner() -> str:
    def told(taken: float) -> str:
        return f"{1e6 * taken:.2g} µs" if taken < 1e-3 else f"{taken:.2g} s"

    rows = []
    for r in results("planner")["results"]:
        other = f"{r['peer']} {told(r['peer_seconds'])}" if r.get("peer") else ""
        rows.append([r["name"], told(r["seconds"]), other])
    for length in (100, 200, 400):
        found = [r for r in results("chain_planner")["results"] if r["layers"] == length]
        gap = f"at most {max(r['gap'] for r in found):.1%} above the proven bound"
        slowest = told(max(r["seconds"] for r in found))
        rows.append([f"a chain of {length} unequal layers; {gap}", slowest, ""])
    head = ["question", "retrograde", "others"]
    return (
        f"{table(head, rows)}\n{source('planner')} "
        f"{source('chain_planner').replace('Measured', 'Chains: measured')}\n"
    )


def chain_networks() -> str:
    rows = []
    for name, found in results("chain_networks_cpu")["networks"].items():
        budgets = found["budgets"]
        used = [b["peak_bytes"] / b["budget_bytes"] for b in budgets]
        predicted = [b["seconds"] / b["foreseen_seconds"] for b in budgets]
        ratios = [b["ratio"] for b in budgets if b["ratio"]]
        least = found["least_bytes"] / found["ordinary_bytes"]
        theirs = found["checkpoint_sequential"]["least_bytes"] / found["ordinary_bytes"]
        rows.append([
            name,
            f"{least:.0%} ({theirs:.0%})",
            f"{max(used):.3f}",
            f"{min(predicted):.2f} to {max(predicted):.2f}",
            f"{min(ratios):.2f} to {max(ratios):.2f}",
        ])  # fmt: skip
    head = [
        "network", "least memory (`checkpoint_sequential`'s)", "measured peak ÷ budget, at most",
        "measured ÷ predicted seconds", "`checkpoint_sequential`'s time ÷ ours",
    ]  # fmt: skip
    return shown("chain_networks_cpu", head, rows)


def sparse_jacobians() -> str:
    found = results("sparse_jacobians_cpu")
    rows = [
        [name, f"{one['sparsity']:.5f}", time(1e3 * one["analytic_seconds"]),
         f"{one['autograd_seconds']:.3g} s", f"{one['ratio']:,.0f}×"]
        for name, one in found["operators"].items()
    ]  # fmt: skip
    head = ["VGG-11's first", "zeros", "analytic", "autograd, a column at a time", "ratio"]
    told = []
    for pruned, samples in sorted({(p["pruned"], p["samples"]) for p in found["products"]})[::-1]:
        kind = pruned, samples
        products = [p for p in found["products"] if (p["pruned"], p["samples"]) == kind]
        ours, theirs = (sum(p[k] for p in products) for k in ("plan_seconds", "scipy_seconds"))
        ratios = [p["ratio"] for p in products]
        told.append(
            f"At {pruned:.0%} pruned and {samples} sample{'s' if samples > 1 else ''} they are "
            f"{theirs / ours:.1f} times as fast "
            f"({min(ratios):.1f} to {max(ratios):.1f} each)."
        )
    return (
        f"{table(head, rows)}\nProducts by their plans are faster than `scipy.sparse`'s. "
        f"{' '.join(told)} {source('sparse_jacobians_cpu')}\n"
    )


def rank_jacobians() -> str:
    rows = []
    for r in results("rank_jacobians_cpu")["rows"]:
        layers = f" in {r['layers']} layers" if r["layers"] > 1 else ""
        name = f"{r['cell']} of {r['units']}{layers}, batch {r['batch']}, {r['steps']:,} steps"
        keys = ("sweep_seconds", "columns_seconds", "slopes_seconds")
        rows.append([name, *(time(1e3 * r[key]) for key in keys)])
    head = ["a rank's", "a sweep", "J, a backward pass a column", "J from slopes"]
    return shown("rank_jacobians_cpu", head, rows)


def ranks_memory() -> str:
    found = [r for r in results("ranks_memory_cpu")["rows"] if r["way"] == "linear"]
    ranks = sorted({r["ranks"] for r in found})
    rows = []
    for asked, name in ((None, "ordinary"), ("10%", '`memory="10%"` on each')):
        held = {r["ranks"]: max(r["held_bytes"]) for r in found if r["memory"] == asked}
        rows.append([name, *(size(held[n]) for n in ranks)])
    return shown("ranks_memory_cpu", ["ranks", *map(str, ranks)], rows)


def million_steps() -> str:
    r = results("million_steps_cpu")["results"]
    return (
        f"An LSTM of {r['hidden']} units, batch {r['batch']}, over {r['length']:,} steps from a "
        f"memory-mapped file of {r['input_bytes'] / 1e9:.1f} GB, within {r['memory']} beside the "
        f"parameters, takes {r['bptt_seconds']:.0f} s. A plain forward pass takes "
        f"{r['forward_seconds']:.1f} s. Every step is run {r['forward_steps_per_step']:.2f} times. "
        f"The exact peak, on {r['exact_steps']:,} steps in the same budget, is "
        f"{r['exact_peak_bytes'] / MIB:.2f} MiB. The resident set of the process grew by "
        f"{size(r['resident_growth_bytes'])} meanwhile, and by "
        f"{size(r['resident_growth_bytes_after_trim'])} once the C library's free pages were given "
        f"back (`malloc_trim`). {source('million_steps_cpu')}\n"
    )


def recipes() -> str:
    rows = []
    for row in results("recipes_cpu")["rows"]:
        name = f"[{row['recipe']}.py]({{up}}examples/recipes/{row['recipe']}.py)"
        told = [f"{key} {version}" for key, version in row["packages"].items()]
        saved = 1 - row["after_bytes"] / row["before_bytes"]
        if "after_right" in row:
            right = f"{row['before_right']:.0%} → {row['after_right']:.0%} right"
            time_ratio = f"as many seconds; {right}"
        else:
            time_ratio = f"{row['after_ms'] / row['before_ms']:.2f}×"
        peaks = f"{size(row['before_bytes'])} → {size(row['after_bytes'])}"
        rows.append([
            name, row["before"], row["after"], peaks, f"{saved:.0%}", time_ratio, *(told or ["–"])
        ])  # fmt: skip
    head = ["recipe", "from", "to", "peak of an iteration", "saved", "time", "beside torch"]
    return shown("recipes_cpu", head, rows)


def examples() -> str:
    """Losses are means of the last tenth of the iterations; ranges are those of the seeds."""
    rows, machines, apart = [], set(), []
    for script in ("sequential_mnist", "ecg", "spoken_digits"):
        path = ROOT / "examples" / "results" / f"{script}.json"
        found = json.loads(path.read_text())
        machines.add((found["machine"]["device"], found["machine"]["threads"]))
        title = f"{found['title'].split(':')[0]}, T to {found['length']:,}, B = {found['batch']}"
        title = f"[{title}]({{up}}examples/results/{path.name})"
        usual = found["ordinary_bytes_extrapolated"]
        ways = dict.fromkeys(run["way"] for run in found["runs"])
        if "ordinary" not in ways:
            rows.append([title, "ordinary, not trained", size(usual), *["–"] * 5])
            title = ""
        for way in ways:
            runs = [run for run in found["runs"] if run["way"] == way]
            taken = runs[0]["working_bytes"]
            losses = [statistics.mean(run["losses"][-5:]) for run in runs]
            rows.append([
                title,
                f'**`memory="{found["memory"]}"`**' if way == "budgeted" else way,
                size(taken) + ("" if way == "ordinary" else f", {100 * taken / usual:.1f} %"),
                str(len(runs)),
                spread([run["iterations"] for run in runs], ",.0f"),
                spread([run["seconds"] / 60 for run in runs], ".1f") + " min",
                spread(losses, ".2f"),
                spread([100 * run["accuracy"] for run in runs], ".1f") + " %",
            ])  # fmt: skip
            title = ""
        ours = {run["seed"]: run for run in found["runs"] if run["way"] == "budgeted"}
        for run in (run for run in found["runs"] if run["way"] == "ordinary"):
            pairs = zip(run["first_losses"], ours[run["seed"]]["first_losses"], strict=True)
            apart += [abs(a - b) for a, b in pairs]
    ((device, threads),) = machines
    head = ["", "way", "peak", "seeds", "iterations", "CPU time", "loss", "held-out accuracy"]
    return table(head, rows) + (
        f"\nIn the first 20 iterations the losses within the budget differ from those of ordinary "
        f"BPTT by at most {max(apart):.0e}. Measured on {device}, threads: {threads}.\n"
    )


def spread(values: list[float], form: str) -> str:
    """The least and the most of some values, or the one."""
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def lean() -> str:
    rows = []
    for row in results("lean_cpu")["rows"]:
        rows.append([
            row["model"],
            f"{size(row['ordinary_bytes'])} → {size(row['lean_bytes'])}",
            *(f"{row[key]:.2f}" for key in ("memory", "memory_bf16", "time")),
            "all equal" if all(row["bits"].values()) else "**differ**",
        ])  # fmt: skip
    found = results("lean_cpu")["rows"]
    for name, of in (("*average*", statistics.mean), ("*worst*", max)):
        keys = ("memory", "memory_bf16", "time")
        rows.append([name, "", *(f"{of(row[key] for row in found):.2f}" for key in keys), ""])
    head = ["model", "working memory", "share", "bfloat16", "time", "bits"]
    return table(head, rows) + (
        "\nAll bits are compared in training and evaluation, in float32 and under autocast. The C "
        "library returns freed memory to the system, and takes it page by page. For the times, "
        "both sides ran with an allocator that does not return it. Times are medians of three "
        f"processes. {source('lean_cpu')}\n"
    )


def lean_front() -> str:
    found = results("lean_cpu")["rows"]
    memory, slower = ([row[key] for row in found] for key in ("memory", "time"))
    return (
        f"Of {len(found)} models it takes {statistics.mean(memory):.2f}× the working memory on "
        f"average, {min(memory):.2f} to {max(memory):.2f}×, in {statistics.mean(slower):.2f}× the "
        f"time, at worst {max(slower):.2f}×. {source('lean_cpu')}\n"
    )


def lean_beside() -> str:
    found = results("lean_cpu")["beside"]
    ways = [key for key in found[0] if key not in ("model", "ordinary")]
    rows = []
    for way in ways:
        both = [row[way].values() if way in row else () for row in found]
        rows.append([way, *("{:.2f}, {:.2f}×".format(*one) if one else "fails" for one in both)])
    return table(["memory, time", *(row["model"] for row in found)], rows)


def lean_overhead() -> str:
    found = results("lean_cpu")["overhead"]
    return (
        f"The tape takes {found['call_us']} µs for each function of torch that is called, and "
        f"{found['saved tensor_us']} µs for each saved tensor that is kept, counting both. A value "
        f"of 256 KiB that is dropped takes {found['let_go_us']} µs, computing it again included. "
        f"Twenty layers of 64 units with 32 samples gain nothing and take "
        f"{found['tiny_layers_time']:.2f}× the time.\n"
    )


def compile_budget() -> str:
    rows = []
    for row in results("compile_budget_cpu")["rows"]:
        ways = [row["bytes"], row["ratios"]]
        theirs, ours = (
            " / ".join(f"{way[name] / way['plain']:.2f}" for way in ways) if name in ways[0] else ""
            for name in ("compiled", "budget")
        )
        differs = row["gradients_differ"]
        rows.append([
            f"{row['dropout']:g}", f"{row['share']:.0%}", theirs,
            f"**{differs:.2f}**" if differs else "none",
            ours or f"refused: at least {row['least_share']:.0%}",
            "none" if row.get("ours_differ") == 0 else "",
        ])  # fmt: skip
    head = ["dropout", "asked", "torch.compile", "gradient differs by", "rg.budget", "differs by"]
    return table(head, rows) + f"\n{source('compile_budget_cpu')}\n"


def architectures() -> str:
    return f"{_of_library('timm')}\n{_of_library('transformers')}"


def _of_library(library: str) -> str:
    every = results(f"{library}_models_cpu")["rows"]
    rows = [row for row in every if "bits" in row]
    refused = sum("refused" in row for row in every)
    left_out = sum("left out" in row for row in every)
    assert not any("raised" in row for row in every)
    passes = [(row, share) for row in rows for share in row["bits"]]
    steady = [row["bits"][share] for row, share in passes if row["own_bits"]]
    over = {row["model"] for row, share in passes if row["peaks"][share] > 1.005}
    worst, share = max(passes, key=lambda one: one[0]["peaks"][one[1]])
    told, at = max(passes, key=lambda one: one[0]["told"][one[1]])
    more = f" ({left_out} more were left out)" if left_out else ""
    return (
        f"Architectures of {library}: {len(rows) + refused}{more}, refused: {refused}. Of "
        f"{len(steady)} steps within a budget, {sum(steady)} had the model's own bits. In "
        f"{len(over)} models the peak passed the budget plus the rest of the model, at worst by "
        f"{100 * (worst['peaks'][share] - 1):.0f} % ({worst['model']}). The peak was at most "
        f"{100 * (told['told'][at] - 1):.1f} % above the one that `rg.budget` reports "
        f"({told['model']}). {source(f'{library}_models_cpu')}\n"
    )


BLOCKS: dict[str, Callable[[], str]] = GPU_BLOCKS | {
    block.__name__: block
    for block in (
        first_page, start_page, front_page, recurrent_grid, recurrent_drawn, recurrent_corners,
        small_cells, gated_cells, other_people, library_models, scan_backward,
        planner, chain_networks, sparse_jacobians, rank_jacobians, ranks_memory,
        million_steps, recipes, chain_least, examples, first_call, resident, weight,
        jax_scan, jax_compiling, five_percent, lean, lean_front, lean_beside,
        lean_overhead, rollouts, compile_budget, architectures,
    )
}  # fmt: skip


def rendered(page: Path) -> str:
    """A page with every block made anew."""
    up = "../" * (len(page.relative_to(ROOT).parts) - 1)
    return BLOCK.sub(
        lambda found: found[1] + BLOCKS[found[2]]().replace("{up}", up) + found[4],
        page.read_text(),
    )


def main() -> None:
    for page in PAGES:
        text = rendered(page)
        if text != page.read_text():
            page.write_text(text)
            print(f"{page.relative_to(ROOT)} rewritten")


if __name__ == "__main__":
    main()
