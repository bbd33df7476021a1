"""The planning page's explorer, against the planner: costs in the page, schedules by the rules."""

import json
import random
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import retrograde as rg
from oracles import browser

ROOT = Path(__file__).parents[2]
PLANS = ROOT / "docs" / "explorer" / "plans.js"
NODE = """
require(process.argv[1]);
const asked = JSON.parse(require("fs").readFileSync(0));
console.log(JSON.stringify(asked.map((one) => [plans.cost(...one), plans.plenty(one[0], one[1],
  one[3]), plans.actions(...one)])));
"""
# Put the choice into the page's controls as a user does; what the page then says.
CHOOSE = """(choices) => choices.map(([policy, length, memory, alpha]) => {
  for (const [name, value] of Object.entries({ policy, length, memory, alpha })) {
    const control = document.getElementById("explorer-" + name);
    control.value = value;
    control.dispatchEvent(new Event("input"));
  }
  return document.getElementById("explorer-cost").textContent;
})"""


def choices(count, longest, largest, most_alpha):
    """Policies, lengths, memories and sizes: the ends of the sliders, and any in between."""
    draw = random.Random(24)
    for k in range(count):
        length = draw.choice([1, 2, 3, 63, 64, 65, longest, draw.randint(1, longest)])
        memory = draw.choice([1, 2, 3, largest, draw.randint(1, largest), draw.randint(1, 40)])
        yield ["hsm", "ism", "msm"][k % 3], length, memory, draw.randint(1, most_alpha)


def cost(policy, length, memory, alpha):
    return int(rg.cost(length, memory, policy, **({"alpha": alpha} if policy == "msm" else {})))


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_plans_in_javascript_are_those_of_the_planner():
    asked = list(choices(150, 130, 200, 12))
    run = subprocess.run(
        ["node", "-e", NODE, str(PLANS)],
        input=json.dumps(asked), capture_output=True, text=True, check=True,
    )  # fmt: skip
    verbs = {kind.__name__.lower(): kind for kind in (rg.Advance, rg.Record, rg.Backward)}
    states = {kind.__name__.lower(): kind for kind in (rg.Store, rg.Load, rg.Free)}
    for one, (steps, plenty, told) in zip(asked, json.loads(run.stdout), strict=True):
        policy, length, memory, alpha = one
        actions = [
            verbs[verb](start, stop) if verb in verbs else states[verb](start)
            for verb, start, stop in told
        ]
        sizes = {"alpha": alpha} if policy == "msm" else {}
        units = rg.plan(length, memory, policy, **sizes).units
        schedule = rg.Schedule.from_actions(actions, length=length, units=units)
        assert rg.simulate(schedule).cost == schedule.cost == steps == cost(*one), one
        assert schedule.peak <= memory, one
        least = cost(policy, length, plenty, alpha)
        assert least == cost(policy, length, plenty + 1, alpha)
        assert plenty == 1 or least < cost(policy, length, plenty - 1, alpha)


LAYERS = """
require(process.argv[1]);
const asked = JSON.parse(require("fs").readFileSync(0));
console.log(JSON.stringify(asked.map((one) => plans.layer(...one))));
"""
SIZES = [(64, 64, 16, 1000), (8, 128, 4, 500), (24, 32, 32, 700)]


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_a_layer_takes_about_what_the_page_estimates(kind):
    if kind == "LSTM" and torch.__version__ < "2.13":
        pytest.skip("torch's own LSTM took twice as much then: the page tells of torch 2.13")
    fits = [
        getattr(rg, kind)(inputs, units, memory=memory).fit((steps, batch, inputs))
        for inputs, units, batch, steps in SIZES
        for memory in ("50%", "20%", "8%")
    ]
    asked = [(kind, *SIZES[n // 3], fit.budget_bytes) for n, fit in enumerate(fits)]
    run = subprocess.run(
        ["node", "-e", LAYERS, str(PLANS)],
        input=json.dumps(asked), capture_output=True, text=True, check=True,
    )  # fmt: skip
    for fit, found in zip(fits, json.loads(run.stdout), strict=True):
        assert found["ordinary"] == pytest.approx(fit.ordinary_bytes, rel=0.1)
        assert found["near"] or found["forward"] == pytest.approx(fit.forward_steps, rel=0.1)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The planning page as the site has it, where mkdocs is there to build it."""
    if browser.CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install -e '.[docs]'")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder)))
    server = browser.serve(folder)
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.mark.quick(0)
def test_the_explorer_shows_what_the_planner_says_at_200_points(site):
    asked = list(choices(200, 1000, 400, 20))
    with browser.Browser() as chromium:
        chromium.open(f"{site}/planning.html")
        shown = chromium.run(f"({CHOOSE})({json.dumps(asked)})")
        chromium.run("new Promise((done) => requestAnimationFrame(() => setTimeout(done, 100)))")
        assert not chromium.errors
        sizes = chromium.run(
            "[...document.querySelectorAll('#explorer canvas')].map((c) => c.width * c.height)"
        )
    assert len(sizes) == 2
    assert min(sizes) > 10_000
    for one, text in zip(asked, shown, strict=True):
        assert text == f"{cost(*one):,}", one


@pytest.mark.quick(2)
@pytest.mark.parametrize("page", ["index", "planning", "troubleshooting", "reference_nn"])
@pytest.mark.parametrize("width", [1280, 390])
def test_a_page_has_no_errors_and_fits_its_window(site, page, width):
    with browser.Browser() as chromium:
        chromium.open(f"{site}/{page}.html", width)
        assert chromium.run("document.documentElement.scrollWidth") <= width
        assert not chromium.errors
