"""The pages in a real headless Chromium: no error, no request, right numbers, usable by keyboard, readable.

Skipped without Chromium (Debian: `apt-get install chromium`), except in CI, where its absence fails.
"""

import asyncio
import json
import math
import os
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from chrome import Page, browser_page, find_chromium
from make_run import HOSTILE, RunSpec, make_empty, make_hostile, make_huge, make_run, make_sweep

from grpo.report import build_run, build_sweep
from grpo.token_record import read

pytestmark = pytest.mark.slow

# Contrast of every visible text with what is behind it, by WCAG 2: [text, ratio] of those below 4.5 (large text: 3).
CONTRAST = """(() => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const rgba = (value) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = value;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const linear = (x) => (x /= 255) <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] / 255 + below[i] * (1 - top[3] / 255));
  const behind = (node) => {
    const layers = [];
    for (; node; node = node.parentElement) layers.unshift(rgba(getComputedStyle(node).backgroundColor));
    return layers.reduce((below, top) => over(top, below), [255, 255, 255]);
  };
  const skipped = 'script, noscript, .readout, option, .faintmark, [disabled], svg title';
  const bad = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const node = walk.currentNode.parentElement, text = walk.currentNode.data;
    if (!text.trim() || node.closest(skipped) || !node.getClientRects().length) continue;
    const style = getComputedStyle(node), back = behind(node), size = parseFloat(style.fontSize);
    const front = over(rgba(node instanceof SVGElement ? style.fill : style.color), back);
    const [a, b] = [light(front), light(back)].sort((x, y) => y - x);
    const large = size >= 24 || (size >= 18.6 && style.fontWeight >= 700);
    if ((a + 0.05) / (b + 0.05) < (large ? 3 : 4.5)) bad.push([text.slice(0, 40), (a + 0.05) / (b + 0.05)]);
  }
  return bad;
})()"""
NAMELESS = """[...document.querySelectorAll('button, input, select, a, [tabindex="0"]')].filter((node) =>
  !(node.getAttribute('aria-label') || node.textContent.trim() || node.labels?.length || node.title))
  .map((node) => node.outerHTML.slice(0, 120))"""
CONTROLS = "'a, button:not([disabled]), input, select, .plot'"


@pytest.fixture(autouse=True)
def chromium() -> None:
    if find_chromium() is None:
        if os.environ.get("CI"):
            pytest.fail("CI is set and there is no chromium: the pages would go unchecked")
        pytest.skip("no chromium: apt-get install chromium, and the pages are checked in it")


def visit(report: Path, work: Callable[[Page], Awaitable[None]], **view: Any) -> None:
    """Open a page, run `work` on it; afterwards there must have been no error and no request but the page itself."""
    url = report.resolve().as_uri()

    async def run() -> None:
        async with browser_page() as page:
            await page.open(url, **view)
            assert await page.evaluate("document.documentElement.dataset.ready") == "true"
            await work(page)
            assert page.errors == []
            assert page.requests == [url]

    asyncio.run(run())


def chart(title: str) -> str:
    """JavaScript for the card of the chart with a title."""
    found = f"[...document.querySelectorAll('.chart')].find((c) => c.querySelector('h3').textContent === {title!r})"
    return f"({found})"


def text(selector: str) -> str:
    """JavaScript for the text of the first element that matches."""
    return f"document.querySelector({selector!r}).textContent"


def numbers(selector: str) -> str:
    """JavaScript for the exact numbers behind the rounded ones that the matching elements show."""
    return f"[...document.querySelectorAll({selector!r})].map((node) => Number(node.dataset.value))"


async def read_out(page: Page, title: str, points: int) -> list[dict[str, float]]:
    """Walk a chart with the right arrow key and note the values in its legend: what a reader sees."""
    await page.evaluate(f"{chart(title)}.querySelector('.plot').focus()")
    values = (
        f"Object.fromEntries([...{chart(title)}.querySelectorAll('.legend .key:has(.value)')]"
        ".map((key) => [key.childNodes[1].data, Number(key.querySelector('.value').dataset.value)]))"
    )
    seen = []
    for _ in range(points):
        await page.key("ArrowRight")
        seen.append(await page.evaluate(values))
    return seen


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 24 steps with recorded tokens. Read only."""
    folder = make_run(tmp_path_factory.mktemp("good") / "run", RunSpec(steps=24, max_staleness=2, tokens=True))
    build_run(folder)
    return folder


def test_the_values_at_the_cursor_are_those_of_the_files(good: Path) -> None:
    metrics = [json.loads(line) for line in (good / "metrics.jsonl").read_text().splitlines()]
    evals = [json.loads(line) for line in (good / "evals.jsonl").read_text().splitlines()]

    async def work(page: Page) -> None:
        assert await read_out(page, "Reward", 24) == [{"mean": line["reward/mean"]} for line in metrics]
        assert await read_out(page, "Evaluation", len(evals)) == [{"arithmetic": line["accuracy"]} for line in evals]
        assert await read_out(page, "Lag by step", 24) == [
            {"mean": line["lag/mean"], "oldest": line["lag/max"]} for line in metrics
        ]
        seconds = await read_out(page, "Seconds per step", 3)
        assert [point["training"] for point in seconds] == [line["time/train_s"] for line in metrics[:3]]
        await page.evaluate("document.querySelector('nav .segments button:nth-child(2)').click()")  # wall-clock
        assert await read_out(page, "Reward", 24) == [{"mean": line["reward/mean"]} for line in metrics]
        x = await page.evaluate(f"{chart('Reward')}.querySelector('.value').dataset.x")
        assert float(x) == metrics[-1]["time/elapsed_s"]

    visit(good / "report.html", work)


def test_the_cursor_stays_when_the_window_gets_another_width(good: Path) -> None:
    metrics = [json.loads(line) for line in (good / "metrics.jsonl").read_text().splitlines()]

    async def work(page: Page) -> None:
        wide = f"{chart('Reward')}.querySelector('svg').getBoundingClientRect().width"
        before = await page.evaluate(wide)
        await read_out(page, "Reward", 6)
        await page.size(800)
        drawn = f"{chart('Reward')}.querySelector('svg').viewBox.baseVal.width || {wide}"
        assert await page.evaluate(
            f"new Promise(r => {{ const f = () => {drawn} < {before} ? r(1) : setTimeout(f, 20); f() }})"
        )
        await page.evaluate("new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)))")
        assert await read_out(page, "Reward", 2) == [{"mean": line["reward/mean"]} for line in metrics[6:8]]

    visit(good / "report.html", work)


def test_a_pointer_reads_out_all_charts_of_the_same_axis(good: Path) -> None:
    metrics = [json.loads(line) for line in (good / "metrics.jsonl").read_text().splitlines()]

    async def work(page: Page) -> None:
        await page.evaluate(f"{chart('Reward')}.scrollIntoView()")
        box = await page.evaluate(
            f"(({{x, y, width}}) => [x, y, width])({chart('Reward')}.querySelector('.plot').getBoundingClientRect())"
        )
        middle = 50 + (box[2] - 60) * (12 - 1) / 23  # step 12 of 1 to 24, between the margins
        await page.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0] + middle, y=box[1] + 60)
        value = "{}.querySelector('.value').dataset.value"
        assert float(await page.evaluate(value.format(chart("Reward")))) == metrics[11]["reward/mean"]
        assert float(await page.evaluate(value.format(chart("Entropy")))) == metrics[11]["entropy"]

    visit(good / "report.html", work)


def test_tiles_and_ledger(good: Path) -> None:
    last = json.loads((good / "metrics.jsonl").read_text().splitlines()[-1])
    evals = [json.loads(line) for line in (good / "evals.jsonl").read_text().splitlines()]

    async def work(page: Page) -> None:
        big = await page.evaluate("[...document.querySelectorAll('.tile .big')].map((node) => node.textContent)")
        assert big[0] == f"{evals[0]['accuracy']:.3f} → {evals[-1]['accuracy']:.3f}"
        assert big[2] == f"{100 * last['tokens/trained'] / last['tokens/generated']:.1f} %"
        ledger = await page.evaluate(text("#ledger-bar"))
        assert "The accounts add up" in ledger
        assert "in all 24 lines of metrics.jsonl" in ledger

    visit(good / "report.html", work)


def test_a_ledger_that_does_not_add_up_is_said(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", RunSpec(steps=5))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows[-1]["tokens/trained"] -= 12
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    async def work(page: Page) -> None:
        ledger = await page.evaluate(text("#ledger-bar"))
        assert "does not add up 12 tokens are in no account after the last step; 1 of 5 lines" in ledger
        assert "law 6" in await page.evaluate(text("#warnings"))

    visit(build_run(folder), work)


COLUMN = "[...document.querySelectorAll('#rollouts tbody tr.pick')].map((row) => row.children[{}].textContent)"
# Format with the value, the event, the element's id.
TYPE = """((node) => {{ node.value = {!r}; node.dispatchEvent(new Event('{}', {{bubbles: true}})); }})(
  document.getElementById({!r}))"""


def test_sorting_filtering_and_searching_rollouts(good: Path) -> None:
    rows = [json.loads(line) for line in (good / "rollouts.jsonl").read_text().splitlines()]

    async def work(page: Page) -> None:
        async def shown() -> int:
            status: str = await page.evaluate(text("#rollouts [role=status]"))
            return int(status.split(" ")[0].replace(",", ""))

        async def sort(name: str) -> list[str]:
            index = ["step", "group", "reward", "advantage", "lag", "tokens"].index(name)
            await page.evaluate(f"document.querySelectorAll('#rollouts th')[{index}].firstChild.click()")
            column: list[str] = await page.evaluate(COLUMN.format(index))
            return column

        assert await shown() == len(rows)
        assert [int(x) for x in await sort("tokens")] == sorted((row["tokens"] for row in rows), reverse=True)[:15]
        assert [int(x) for x in await sort("tokens")] == sorted(row["tokens"] for row in rows)[:15]
        assert "ascending" in await page.evaluate(
            "[...document.querySelectorAll('#rollouts th')].map((th) => th.getAttribute('aria-sort'))"
        )
        await page.evaluate(TYPE.format("discarded:zero_variance:all_right", "change", "filter-outcome"))
        assert await shown() == sum(row["outcome"] == "discarded:zero_variance:all_right" for row in rows)
        await page.evaluate(TYPE.format("20", "input", "filter-step0"))
        assert await shown() == sum(
            row["outcome"] == "discarded:zero_variance:all_right" and row["step"] >= 20 for row in rows
        )
        await page.evaluate(TYPE.format("", "change", "filter-outcome"))
        await page.evaluate(TYPE.format("", "input", "filter-step0"))
        needle = rows[77]["prompt"]
        await page.evaluate(TYPE.format(needle, "input", "search"))
        assert await shown() == sum(needle in row["prompt"] + row["completion"] for row in rows) > 0
        await page.evaluate(TYPE.format("nowhere at all", "input", "search"))
        assert await page.evaluate(text("#rollouts tbody")) == "Nothing matches."

    visit(good / "report.html", work)


def test_a_row_opens_its_group_by_keyboard(good: Path) -> None:
    rows = [json.loads(line) for line in (good / "rollouts.jsonl").read_text().splitlines()]

    async def work(page: Page) -> None:
        await page.evaluate("document.querySelector('#rollouts tbody tr.pick').focus()")
        await page.key("ArrowDown")
        group = await page.evaluate("document.activeElement.children[1].textContent")
        await page.key("Enter")
        assert (await page.evaluate(text(".groupview h3"))).startswith(f"Group {group.split('.')[0]}, ")
        texts = await page.evaluate(
            "[...document.querySelectorAll('.sibling .sample')].map((node) => node.textContent)"
        )
        members = [row for row in rows if str(row["group"]) == group.split(".")[0]]
        assert texts == [row["completion"] + "<eos>" for row in members]
        shown = await page.evaluate("document.querySelectorAll('.sibling .token').length")
        assert shown == sum(row["tokens"] for row in members)
        assert await page.evaluate("document.querySelectorAll('.sibling .token.special').length") == len(members)

    visit(good / "report.html", work)


SHARES = """[...document.querySelectorAll('.sibling.picked .token')].map(
  (node) => parseFloat(node.style.getPropertyValue('--share')))"""
HOVER = """((node) => node.dispatchEvent(new PointerEvent('pointerover', {{bubbles: true}})))(
  document.querySelectorAll('.sibling.picked .token')[{}])"""
PRESS = "[...document.querySelectorAll('.groupview .segments button')].find((b) => b.textContent === {!r}).click()"


def test_tokens_are_coloured_and_read_out(good: Path) -> None:
    """By log-ratio and by advantage, with a legend in numbers; by pointer and by the arrow keys."""
    rows = [json.loads(line) for line in (good / "rollouts.jsonl").read_text().splitlines()]
    mixed = next(row for row in rows if row["outcome"] == "trained" and row["version_first"] < row["version_last"])

    async def work(page: Page) -> None:
        data = await page.evaluate("JSON.parse(document.getElementById('data').textContent)")
        scale = data["traces"]["scale"]
        step, group, index = mixed["step"], mixed["group"], mixed["index"]
        await page.evaluate(TYPE.format(str(step), "input", "filter-step0"))
        await page.evaluate(TYPE.format(str(step), "input", "filter-step1"))
        await page.evaluate("document.querySelector('#rollouts .more').click()")
        await page.evaluate(
            "[...document.querySelectorAll('#rollouts tbody tr.pick')]"
            f".find((row) => row.children[1].textContent === '{group}.{index}').click()"
        )
        record = read(good, step, {group})
        c = record.groups[0].completions[index]
        ratios = [p - s for p, s in zip(c.policy_logprobs, c.logprobs, strict=True)]
        expected = [50 * min(1, abs(x) / scale) for x in ratios]
        assert await page.evaluate(SHARES) == pytest.approx(expected, abs=0.1)
        sides = await page.evaluate(
            "[...document.querySelectorAll('.sibling.picked .token')].map((n) => n.style.getPropertyValue('--c'))"
        )
        assert sides == ["var(--c0)" if x > 0 else "var(--c1)" for x in ratios]
        legend = await page.evaluate(text(".tokenlegend"))
        assert f"≥ +{scale:g} ({math.exp(scale):.3g})" in legend
        assert f"≤ −{scale:g} ({math.exp(-scale):.3g})" in legend

        last = len(c.token_ids) - 1
        for i in (last, last - 1):
            if i == last:
                await page.evaluate(HOVER.format(i))
                await page.evaluate("document.querySelector('.sibling.picked .sample').focus()")
            else:
                await page.key("ArrowLeft")
            said = await page.evaluate(text(".tokenfacts"))
            assert near(
                said,
                f"#{index}, token {i + 1}: id {c.token_ids[i]} · sampler log p −{-c.logprobs[i]:.3g} · "
                f"policy log p −{-c.policy_logprobs[i]:.3g} · ratio {math.exp(ratios[i]):.4g} ",
            )
            assert said.endswith(f"version {c.versions[i]} · lag {record.version - c.versions[i]}")
        assert c.versions[last] != c.versions[last - 1]
        assert await page.evaluate("document.querySelectorAll('.token.at').length") == 1

        await page.evaluate(PRESS.format("advantage"))
        largest = max(abs(row["advantage"] or 0) for g in data["groups"] for row in g["rows"])
        expected = [50 * abs(record.advantages[index] or 0) / largest] * len(c.token_ids)
        assert await page.evaluate(SHARES) == pytest.approx(expected, abs=0.1)
        assert f"≥ +{largest:.3g}" in await page.evaluate(text(".tokenlegend"))
        await page.evaluate(PRESS.format("plain"))
        assert set(await page.evaluate(SHARES)) == {None}
        assert await page.evaluate("document.querySelector('.tokenlegend')") is None
        assert "All of them can be read token by token" in await page.evaluate(text("#sampled"))

    visit(good / "report.html", work)


def near(said: str, expected: str) -> bool:
    """The same words, and the same numbers but for the rounding of the page's data (4 digits)."""
    number = re.compile(r"−?\d+(?:\.\d+)?")
    pairs = zip(number.findall(said), number.findall(expected), strict=False)
    same = all(float(a.replace("−", "-")) == pytest.approx(float(b.replace("−", "-")), rel=2e-3) for a, b in pairs)
    return same and number.sub("", said).startswith(number.sub("", expected))


@pytest.mark.parametrize("tokens", [False, True])
def test_observations_are_marked(tmp_path: Path, tokens: bool) -> None:
    folder = make_run(tmp_path / "run", RunSpec(steps=3, tokens=tokens, observed=True))
    rows = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]

    async def work(page: Page) -> None:
        where = await page.evaluate("document.querySelector('#rollouts tbody tr.pick').children[1].textContent")
        await page.evaluate("document.querySelector('#rollouts tbody tr.pick').click()")
        group, index = map(int, where.split("."))
        [row] = [row for row in rows if (row["group"], row["index"]) == (group, index)]
        marked = "[...document.querySelectorAll('.sibling.picked .observation')].map((n) => n.textContent).join('')"
        assert await page.evaluate(marked) == row["turns"][1]["text"] != ""
        whole = await page.evaluate(text(".sibling.picked .sample"))
        assert whole == row["completion"] + ("<eos>" if tokens else "")
        assert "not sampled, not trained" in await page.evaluate(text(".groupview .card"))
        if tokens:
            await page.evaluate(HOVER.format(row["turns"][0]["tokens"]))
            assert "observation: put in by the environment" in await page.evaluate(text(".tokenfacts"))
            shares = await page.evaluate(SHARES)
            assert [share is None for share in shares].count(True) == row["turns"][1]["tokens"]

    visit(build_run(folder), work)


def test_where_the_page_has_no_room_for_tokens_it_says_so(tmp_path: Path) -> None:
    words = tuple(f"{i} and so on and on, " * 18 for i in range(50))
    folder = make_run(tmp_path / "run", RunSpec(steps=60, tokens=True, completions=words))
    report = build_run(folder)
    assert report.stat().st_size < 3_000_000

    async def work(page: Page) -> None:
        data = await page.evaluate("JSON.parse(document.getElementById('data').textContent)")
        rows = [row for group in data["groups"] for row in group["rows"]]
        assert data["traces"]["rows"] == sum("trace" in row for row in rows)
        assert 32 <= data["traces"]["rows"] < len(rows) < 60 * 32
        assert all("trace" in row for row in rows if "why" in row)
        said = await page.evaluate(text("#sampled"))
        assert f" {data['traces']['rows']:,} of them (the best, worst, longest and strangest first)" in said
        bare = next(group for group in data["groups"] if not any("trace" in row for row in group["rows"]))
        await page.evaluate(TYPE.format(bare["rows"][0]["step"], "input", "filter-step0"))
        await page.evaluate(TYPE.format(bare["rows"][0]["step"], "input", "filter-step1"))
        await page.evaluate(
            f"[...document.querySelectorAll('#rollouts tbody tr.pick')].find("
            f"(row) => row.children[1].textContent.startsWith('{bare['group']}.')).click()"
        )
        assert "The tokens of this group are not on the page." in await page.evaluate(text(".groupview"))
        assert await page.evaluate("document.querySelectorAll('.sibling .token').length") == 0

    visit(report, work)


def test_hostile_tokens_are_text(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", RunSpec(steps=1, tokens=True, completions=("abcdef",)))
    path = folder / "tokens" / "tokenizer.json"
    saved = json.loads(path.read_text())
    vocabulary = saved["model"]["vocab"]
    for char, instead in zip("abcdef", (HOSTILE[0], HOSTILE[1], "\x00\u202e", "x" * 10_000, "\n\t", ""), strict=True):
        vocabulary[instead] = vocabulary.pop(char)
    path.write_text(json.dumps(saved))

    async def work(page: Page) -> None:
        shown = await page.evaluate(text(".sibling .sample"))
        assert HOSTILE[0] in shown
        assert HOSTILE[1] in shown
        assert "␀U+202E" in shown
        assert "⏎" in shown
        assert "x" * 200 in shown
        assert "x" * 201 not in shown
        assert await page.evaluate("document.querySelectorAll('img, main script').length") == 0
        assert await page.evaluate("document.title") == "run · run"
        await page.size(390)
        assert await page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0

    visit(build_run(folder), work)


def test_everything_is_reached_by_tab_and_named(good: Path) -> None:
    async def work(page: Page) -> None:
        assert await page.evaluate(NAMELESS) == []
        wanted = await page.evaluate(f"document.querySelectorAll({CONTROLS}).length")
        reached: set[str] = set()
        await page.evaluate("document.querySelectorAll('*').forEach((node, i) => { node.dataset.i = i; })")
        for _ in range(wanted + 200):
            await page.key("Tab")
            where = await page.evaluate("document.activeElement.dataset.i")
            if where in reached:
                break
            reached.add(where)
        unreached = await page.evaluate(
            f"[...document.querySelectorAll({CONTROLS})].filter((node) => node.getClientRects().length &&"
            f" !{json.dumps(sorted(reached))}.includes(node.dataset.i)).map((node) => node.outerHTML.slice(0, 100))"
        )
        assert unreached == []
        assert await page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"

    visit(good / "report.html", work)


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("kind", ["good", "failed", "sweep"])
def test_contrast_and_width(good: Path, tmp_path: Path, kind: str, dark: bool) -> None:
    if kind == "sweep":
        report = build_sweep(make_sweep(tmp_path / "sweep", steps=12))
    elif kind == "failed":
        report = build_run(make_run(tmp_path / "run", RunSpec(state="failed", stop_at=7)))
    else:
        report = good / "report.html"

    async def work(page: Page) -> None:
        assert await page.evaluate(CONTRAST) == []
        for width in (360, 768, 1600):
            await page.size(width)
            await page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
            assert await page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, width

    visit(report, work, dark=dark)


def test_hostile_text_is_shown_and_does_nothing(tmp_path: Path) -> None:
    async def work(page: Page) -> None:
        assert await page.evaluate("document.title") == "run · run"
        assert await page.evaluate("document.querySelectorAll('img, iframe, main script').length") == 0
        await page.evaluate(TYPE.format("onerror", "input", "search"))
        assert "<img src=x onerror" in await page.evaluate(text("#rollouts tbody"))
        for needle, sign in (("separator", "U+2028"), ("left", "U+202E"), ("lone", "U+D800"), ("nul", "␀")):
            await page.evaluate(TYPE.format(needle, "input", "search"))
            assert sign in await page.evaluate(
                "[...document.querySelectorAll('#rollouts tbody .control')].map((n) => n.textContent)"
            )
        await page.evaluate(TYPE.format("x" * 100, "input", "search"))
        await page.evaluate("document.querySelector('#rollouts tbody tr.pick').click()")
        assert "characters left out" in await page.evaluate(text(".sibling.picked"))
        assert HOSTILE[1] in await page.evaluate(text(".command"))
        assert HOSTILE[0] in await page.evaluate(text("#error"))
        assert await page.evaluate("document.title") == "run · run"

    visit(build_run(make_hostile(tmp_path / "run")), work)


def test_the_timeline_has_generation_under_training(good: Path) -> None:
    """Two lanes over the same clock: widths are seconds, heights open requests; the marks tell the time."""
    metrics = [json.loads(line) for line in (good / "metrics.jsonl").read_text().splitlines()]
    bars = """[...document.querySelectorAll('#timeline rect')].map((node) => [node.style.getPropertyValue('--c'),
      ...['x', 'y', 'width', 'height'].map((key) => Number(node.getAttribute(key)))])"""

    async def work(page: Page) -> None:
        first, last = map(int, re.findall(r"\d+", await page.evaluate(text("#timeline .controls > .muted"))))
        shown = metrics[first - 1 : last]
        assert len(shown) == 20
        lanes: dict[str, list[list[float]]] = {}
        for name, *numbers_ in await page.evaluate(bars):
            lanes.setdefault(name, []).append(numbers_)
        start = shown[0]["time/elapsed_s"] - shown[0]["time/step_s"]
        scale = (lanes["var(--generate)"][-1][0] + lanes["var(--generate)"][-1][2] + 0.4 - 78) / (
            shown[-1]["time/elapsed_s"] - start
        )
        most = max(line["sampler/open_requests_mean"] for line in metrics)
        for i, line in enumerate(shown):
            begin = 78 + scale * (line["time/elapsed_s"] - line["time/step_s"] - start)
            x, y, width, _ = lanes["var(--train)"][i]
            assert x == pytest.approx(begin + scale * line["time/wait_rollouts_s"], abs=0.1)
            assert width + 0.4 == pytest.approx(scale * line["time/train_s"], abs=0.1)
            below = lanes["var(--generate)"][i]
            assert below[0] == pytest.approx(begin, abs=0.1)
            assert below[0] <= x
            assert x + width <= below[0] + below[2] + 0.1
            assert below[1] > y
            assert below[3] == pytest.approx(26 * line["sampler/open_requests_mean"] / most)
        await page.evaluate("document.querySelector('#timeline .segments button').click()")
        view = [int(x) for x in re.findall(r"\d+", await page.evaluate(text("#timeline .controls > .muted")))]
        assert view[1] - view[0] == 4
        assert "generation went on during at least" in await page.evaluate(text("#time"))

    visit(good / "report.html", work)


def test_marks_of_the_timeline_differ_late_in_a_long_run(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", RunSpec(steps=24))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row["time/elapsed_s"] += 7200
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    async def work(page: Page) -> None:
        marks = await page.evaluate(
            "[...document.querySelectorAll('#timeline svg text')].map((node) => node.textContent)"
        )
        assert marks[:2] == ["trainer", "generation"]
        assert len(marks) > 4
        assert len(set(marks)) == len(marks)
        assert all(re.fullmatch(r"2:00:\d\d(\.\d)?", mark) for mark in marks[2:])

    visit(build_run(folder), work)


def test_an_empty_run_opens(tmp_path: Path) -> None:
    async def work(page: Page) -> None:
        assert "there is nothing to judge" in await page.evaluate(text("#warnings"))
        assert await page.evaluate("document.querySelector('#settings > h2').nextSibling.nodeName") != "#text"

    visit(build_run(make_empty(tmp_path / "run")), work)


def test_a_huge_run_opens_with_few_elements(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def work(page: Page) -> None:
        assert await page.evaluate("document.querySelectorAll('*').length") < 6000
        assert "of 200,000 completions" in await page.evaluate(text("#sampled"))
        milliseconds = await page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd")
        with capsys.disabled():
            print(f" [opened in {milliseconds / 1000:.2f} s] ", end="")

    visit(build_run(make_huge(tmp_path / "run")), work)


def test_the_sweep_page(tmp_path: Path) -> None:
    folder = make_sweep(tmp_path / "sweep", steps=12)
    for job in range(3):
        build_run(folder / str(job))

    async def work(page: Page) -> None:
        data = await page.evaluate("JSON.parse(document.getElementById('data').textContent)")
        means = await page.evaluate(numbers("#arms tbody b"))
        assert means == [arm["result"]["mean"] for arm in data["arms"]]
        cells = await page.evaluate(numbers("#heat td"))
        assert cells == means  # rows: staleness, columns: group size, the order of the arms
        assert "cannot separate" in await page.evaluate(text("#tile-tied"))
        assert "1 failed" in await page.evaluate(text("#warnings"))
        await page.evaluate(TYPE.format("0", "change", "baseline"))
        got = await page.evaluate(numbers("#differences tbody b"))
        expected = [d["interval"]["mean"] for d in data["differences"] if d["a"] == 0]
        assert got == pytest.approx(expected)
        await page.evaluate(TYPE.format("2", "change", "baseline"))
        got = await page.evaluate(numbers("#differences tbody b"))
        [back] = [d["interval"]["mean"] for d in data["differences"] if (d["a"], d["b"]) == (0, 2)]
        assert got[0] == pytest.approx(-back)
        await page.evaluate(TYPE.format("failed", "input", "job-search"))
        assert await page.evaluate("document.querySelectorAll('#jobs tbody tr').length") == 1
        await page.evaluate(TYPE.format("", "input", "job-search"))
        links = await page.evaluate("[...document.querySelectorAll('#jobs tbody a')].map((a) => a.href)")
        assert links == [(folder / str(job) / "report.html").resolve().as_uri() for job in range(3)]
        await page.evaluate(TYPE.format("reward/mean", "change", "curve-key"))
        assert await page.evaluate("document.querySelectorAll('#curves path.curve').length") == 6
        assert await page.evaluate(NAMELESS) == []

    visit(build_sweep(folder), work)
