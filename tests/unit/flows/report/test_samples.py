"""The page of samples: nothing that a text says is ever anything but text."""

import base64
import hashlib
import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flows.report import samples
from flows.report.samples import ShownRun, samples_page
from infra.tracking.samples import KeptSample, within

HOSTILE = (
    "</script><script>document.title='owned'</script>",
    "<!--<script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "&lt;b&gt; ${state} `x` \u2028 \u0000 PAGE_DATA SCRIPT_DIGEST",
)
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


class Page(HTMLParser):
    """Tags, attributes and the text of scripts, as a browser's parser sees them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            self.scripts[-1] += data


def kept(name: str = "round=1/step=1/prompt=0 sample 0", **changes: Any) -> KeptSample:
    values = {
        "name": name,
        "group": 0,
        "prompt": "1+1=",
        "tokens": ("2", "<eos>"),
        "num_tokens": 2,
        "mismatch": (0.25, -0.5),
        "score": 1.0,
        "reward": 1.0,
        "advantage": 0.7,
        "finish_reason": "stop",
        **changes,
    }
    return KeptSample.model_validate(values)


def run(name: str, steps: dict[int, list[KeptSample]]) -> ShownRun:
    curves = {title: [(1, 0.5), (2, 0.75)] for title in samples.CURVES}
    return ShownRun(name, curves, steps, len(steps))


def opened(page: str, tmp_path: Path, fragment: str = "") -> str:
    """The document after its script ran, in a browser."""
    if CHROMIUM is None:
        pytest.skip("needs chromium")
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    browser = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    address = f"{(tmp_path / 'page.html').as_uri()}{fragment}"
    done = subprocess.run(
        [*browser, profile, address], check=True, capture_output=True, text=True, timeout=60
    )
    # The data are still there, below the page.
    return done.stdout.partition('<script type="application/json"')[0]


@given(text=st.text(max_size=60) | st.sampled_from(HOSTILE))
def test_every_text_is_data_and_comes_back_as_it_was(text: str) -> None:
    text = text.encode("utf-8", "replace").decode()
    shown = run(text, {1: [kept(text, prompt=text, tokens=(text, text))]})
    page = samples_page([shown])
    plain = Page(samples_page([run("", {})]))
    parsed = Page(page)
    assert [tag for tag, _ in parsed.tags] == [tag for tag, _ in plain.tags]
    data, script = parsed.scripts
    (back,) = json.loads(data)
    assert back["name"] == text
    assert KeptSample.model_validate(back["steps"]["1"][0]) == shown.steps[1][0]
    assert script == plain.scripts[1]


def test_page_allows_only_its_own_script_and_fetches_nothing() -> None:
    page = samples_page([run("a", {1: [kept()]})])
    parsed = Page(page)
    policy = next(a["content"] for tag, a in parsed.tags if tag == "meta" and "content" in a)
    digest = base64.b64encode(hashlib.sha256(parsed.scripts[1].encode()).digest()).decode()
    assert policy is not None
    assert policy.startswith("default-src 'none'; ")
    assert f"script-src 'sha256-{digest}';" in policy
    assert not any({"src", "href"} & set(attributes) for _, attributes in parsed.tags)
    assert not re.search(r"innerHTML|insertAdjacent|document\.write|eval\(", page)


def test_where_no_script_runs_the_last_step_stands_in_fences(tmp_path: Path) -> None:
    text = "a\n```\n````\n# no title"
    page = samples_page([run("a", {1: [kept()], 2: [kept(tokens=(text, "</script>"))]})])
    lines = samples.samples_markdown(page, tmp_path / "samples.html").splitlines()
    assert "## Step 2" in lines
    assert "## Step 1" not in lines
    assert "score 1.0, advantage 0.7, num_tokens 2" in lines
    fence = lines.index("`````text")
    assert lines[fence + 1 : fence + 6] == ["1+1=a", "```", "````", "# no title</script>", "`````"]
    assert any((tmp_path / "samples.html").as_uri() in line for line in lines)


@pytest.mark.slow
def test_a_hostile_answer_is_shown_as_it_is(tmp_path: Path) -> None:
    hostile = [kept(text, prompt=text, tokens=("2", text)) for text in HOSTILE]
    page = opened(samples_page([run(HOSTILE[0], {1: hostile})]), tmp_path)
    assert "<title>Samples: " in page
    assert "<script" not in page
    assert "<img" not in page
    shown = html.unescape(re.sub(r"<[^>]+>", "", page))
    for text in HOSTILE:
        assert shown.count(text.partition("\0")[0]) >= 3, "name, prompt, answer"


@pytest.mark.slow
def test_samples_are_sorted_and_their_tokens_coloured(tmp_path: Path) -> None:
    low, high = kept("low", score=0.0, advantage=-1.0), kept("high", mismatch=(None, 0.1))
    text = samples_page([run("a", {1: [low], 2: [low, high]})])
    page = opened(text, tmp_path, "#sort=score")
    assert page.index("<span>high</span>") < page.index("<span>low</span>")
    page = opened(text, tmp_path, "#sort=mismatch")
    assert page.index("<span>low</span>") < page.index("<span>high</span>")
    tokens = re.findall(r'<span title="([^"]*)"(?: style="background-color: ([^"]*);")?>', page)
    assert tokens == [
        ("trainer \u2212 sampler: 0.25 nats", "rgba(37, 99, 235, 0.325)"),
        ("trainer \u2212 sampler: -0.5 nats", "rgba(234, 88, 12, 0.65)"),
        ("trainer \u2212 sampler: no finite number nats", "rgba(220, 38, 38, 0.65)"),
        ("trainer \u2212 sampler: 0.1 nats", "rgba(37, 99, 235, 0.13)"),
    ]


@pytest.mark.slow
def test_two_runs_stand_side_by_side_by_prompt(tmp_path: Path) -> None:
    ours = [kept("ours", prompt="1+1="), kept("alone", prompt="3+3=")]
    theirs = [kept("theirs", prompt="2+2="), kept("other", prompt="1+1=")]
    page = opened(samples_page([run("a", {2: ours, 5: ours}), run("b", {2: theirs})]), tmp_path)
    rows = page.split('<div class="row two">')[1:]
    names = [re.findall(r"<span>(ours|alone|theirs|other)</span>|>(no such)", row) for row in rows]
    assert [["".join(pair) for pair in row] for row in names] == [
        ["ours", "other"],
        ["alone", "no such"],
        ["no such", "theirs"],
    ]
    assert page.count("<svg") == len(samples.CURVES)
    assert page.count('stroke="#2563eb"') == page.count('stroke="#ea580c"') == len(samples.CURVES)


@pytest.mark.slow
def test_a_run_without_samples_has_its_curves(tmp_path: Path) -> None:
    page = opened(samples_page([run("a", {})]), tmp_path)
    assert "no samples here" in page
    assert page.count("<svg") == len(samples.CURVES)


def test_long_page_drops_every_second_step_but_not_the_last() -> None:
    steps = {step: [kept()] for step in range(1, 8)}
    size = len(kept().model_dump_json())
    assert list(within(steps, 7 * size)) == [1, 2, 3, 4, 5, 6, 7]
    assert list(within(steps, 6 * size)) == [1, 3, 5, 7]
    assert list(within(steps, 1)) == [7]
