"""The site's search, by the site's own script: what people type finds the page that they need."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# The worker of the site's theme, which ranks in the browser, with the messages that pages send it.
NODE = """
const fs = require("fs");
const [site, queries] = [process.argv[1], JSON.parse(fs.readFileSync(0))];
let handle, answered;
globalThis.self = globalThis;
globalThis.addEventListener = (_, call) => { handle = call; };
globalThis.postMessage = (message) => answered(message);
const folder = site + "/assets/javascripts/workers/";
const name = fs.readdirSync(folder).find((each) => each.endsWith(".js"));
(0, eval)(fs.readFileSync(folder + name, "utf8"));
const send = (data) => new Promise((done) => { answered = done; handle({ data }); });
(async () => {
  const index = JSON.parse(fs.readFileSync(site + "/search/search_index.json"));
  index.options = { suggest: true };
  await send({ type: 0, data: index });
  const found = [];
  for (const query of queries) {
    const groups = (await send({ type: 2, data: query })).data.items;
    found.push(groups.map((group) => group.sort((a, b) => b.score - a.score)[0].location));
  }
  console.log(JSON.stringify(found));
})();
"""
# What is typed, and where the first result leads.
ERRORS = "troubleshooting.html#a-budget-was-exceeded-or-refused-the-classes-of-errors"
FIRST = {
    "Hugging Face": "whole_model.html#hugging-face-models-and-the-trainer",
    "Trainer": "whole_model.html#hugging-face-models-and-the-trainer",
    "OOM": "troubleshooting.html#out-of-memory-oom",
    "out of memory": "troubleshooting.html#out-of-memory-oom",
    "CUDA out of memory": "troubleshooting.html#out-of-memory-oom",
    "gradient checkpointing": "troubleshooting.html#gradient-checkpointing",
    "DataParallel": "troubleshooting.html#dataparallel-distributeddataparallel-and-fsdp",
    "how much slower": "troubleshooting.html#how-much-slower-is-it",
    "macOS": "troubleshooting.html#macos-and-windows",
    "budget exceeded": ERRORS,
    "truncated": "migration.html#from-truncated-bptt",
    "add an operator": "how_to_add.html",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The whole site, where mkdocs is there to build it."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install -e '.[docs]'")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder)))
    return folder


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_what_people_type_finds_the_page_that_they_need(site):
    run = subprocess.run(
        ["node", "-e", NODE, str(site)],
        input=json.dumps([*FIRST]), capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = dict(zip(FIRST, json.loads(run.stdout), strict=True))
    assert {query: (places or ["nothing"])[0] for query, places in found.items()} == FIRST
