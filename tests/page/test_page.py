"""The web page of a real router in a headless Chromium; ``make page`` runs it.

What it sees it leaves as pictures in docs/page/, for people to judge. Colours, headers and what is
served to whom are unit tests.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal

import httpx
import pytest

from tests.cluster import Cluster, running_cluster

pytest.importorskip("playwright.sync_api", reason="playwright is missing: make page installs it")
from playwright.sync_api import (
    Browser,
    Page,
    Route,
    ViewportSize,
    expect,
    sync_playwright,
)

PICTURES: Final = Path(__file__).parents[2] / "docs" / "page"
CHROMIUM: Final = shutil.which("chromium") or shutil.which("chromium-browser")
QUESTION: Final = "What is the capital of France?"
WIDE: Final = ViewportSize(width=1040, height=700)
TALL: Final = ViewportSize(width=1040, height=920)
NARROW: Final = ViewportSize(width=390, height=780)
PATIENCE_MS: Final = 60_000
expect.set_options(timeout=PATIENCE_MS)  # a page's own default does not reach it

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium"),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(
        tmp_path_factory.mktemp("page"),
        "demo",
        num_prefill=2,
        num_decode=2,
        worker_flags={"num-blocks": "256", "max-model-len": "2048"},
        router_flags={"local-prefill-below-tokens": "0"},
    ) as running:
        yield running


@pytest.fixture(scope="module")
def url(cluster: Cluster) -> str:
    base = f"http://{cluster.router.http_address}"
    with httpx.Client(transport=httpx.HTTPTransport(retries=3)) as client:
        while client.get(f"{base}/health").status_code != 200:
            pass
        while sum(pair["state"] == "proven" for pair in _cluster(client, base)) < 4:
            pass
    return base


def _cluster(client: httpx.Client, base: str) -> list[dict[str, str]]:
    pairs: list[dict[str, str]] = client.get(f"{base}/v1/cluster").json()["pairs"]
    return pairs


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@contextmanager
def opened(
    browser: Browser, url: str, *, scheme: Literal["light", "dark"] = "light"
) -> Iterator[Page]:
    """The page in a browser that knows nothing yet. It asks nobody else, and nothing goes wrong."""
    context = browser.new_context(viewport=WIDE, color_scheme=scheme)
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    asked: list[str] = []
    wrong: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(url)
    set_option(page, "temperature", "0")
    set_option(page, "max_tokens", "48")
    yield page
    assert wrong == []
    assert all(each.startswith(f"{url}/") for each in asked)
    context.close()


def set_option(page: Page, name: str, value: str) -> None:
    page.click("#open-settings")
    page.fill(f"[name={name}]", value)
    page.click("[value=save]")


def say(page: Page, text: str) -> None:
    page.fill("#said", text)
    page.keyboard.press("Enter")


def ended(page: Page, num_answers: int) -> None:
    expect(page.locator(".turn.assistant .timing")).to_have_count(num_answers)


def test_a_chat_and_where_its_time_went(browser: Browser, url: str) -> None:
    with opened(browser, url) as page:
        expect(page.locator("#health")).to_have_text("ready")
        say(page, QUESTION)
        ended(page, 1)
        expect(page.locator(".turn.assistant .text")).to_contain_text("Paris")
        expect(page.locator("#spoken")).to_contain_text("Paris")
        set_option(page, "max_tokens", "110")
        say(page, "Write a Python function that adds two numbers.")
        expect(page.locator("#stop")).to_be_visible()
        ended(page, 2)
        expect(page.locator(".turn.assistant pre code").first).to_contain_text("def ")
        page.screenshot(path=PICTURES / "chat.png")
        page.locator(".timing summary").first.click()
        rows = page.locator(".waterfall").first.locator("tbody th")
        stages = ["queue", "prefill", "KV transfer", "first write", "hand-off gap", "decode"]
        expect(rows).to_have_text(stages)
        expect(page.locator(".waterfall").first).to_contain_text("KV pulled")
        page.locator("#turns").evaluate("turns => turns.scrollTo(0, 0)")
        page.screenshot(path=PICTURES / "waterfall.png")
        page.reload()
        expect(page.locator(".turn.assistant .text").first).to_contain_text("Paris")


def test_an_answer_is_stopped_made_again_and_its_question_edited(
    browser: Browser, url: str
) -> None:
    with opened(browser, url) as page:
        set_option(page, "max_tokens", "1000")
        set_option(page, "system", "Tell very long stories.")
        say(page, "Tell a long story about the sea.")
        expect(page.locator(".turn.assistant .text")).to_contain_text("sea")
        page.keyboard.press("Escape")
        expect(page.locator(".turn.assistant")).to_contain_text("Stopped.")
        expect(page.locator("#send")).to_be_visible()
        set_option(page, "max_tokens", "8")
        page.get_by_role("button", name="Regenerate").click()
        ended(page, 1)
        expect(page.locator(".turn.assistant")).to_contain_text("Cut off")
        page.get_by_role("button", name="Edit").click()
        page.fill(".edited", QUESTION)
        page.get_by_role("button", name="Send again").click()
        expect(page.locator(".turn.user .text")).to_have_text(QUESTION)
        ended(page, 1)
        expect(page.locator(".turn")).to_have_count(2)


def test_chats_are_kept_chosen_and_deleted(browser: Browser, url: str) -> None:
    with opened(browser, url) as page:
        say(page, QUESTION)
        ended(page, 1)
        page.click("#new-chat")
        expect(page.locator(".welcome")).to_be_visible()
        names = page.locator(".chat-name")
        expect(names).to_have_text(["New chat", QUESTION])
        names.nth(1).click()
        expect(page.locator(".turn")).to_have_count(2)
        page.get_by_label(f"Delete {QUESTION}").click()
        expect(names).to_have_text(["New chat"])


def test_two_tabs_share_their_chats(browser: Browser, url: str) -> None:
    with opened(browser, url) as page:
        page.context.route("**/v1/chat/completions", lambda route: answer(route, sse("Well.")))
        other = page.context.new_page()
        other.goto(url)
        other.click("#new-chat")
        say(other, "In the other tab")
        names, others = page.locator(".chat-name"), other.locator(".chat-name")
        expect(names).to_have_text(["In the other tab", "New chat"])
        say(page, "In this tab")
        expect(others).to_have_text(["In the other tab", "In this tab"])
        expect(other.locator(".turn.user .text")).to_have_text("In the other tab")
        page.get_by_label("Delete In the other tab").click()
        expect(others).to_have_text(["In this tab"])
        expect(other.locator(".turn.user .text")).to_have_text("In this tab")
        say(other, "And on")
        expect(page.locator(".turn.user .text")).to_have_text(["In this tab", "And on"])
        page.reload()
        expect(page.locator(".turn.assistant .text")).to_have_text(["Well.", "Well."])


def sse(*texts: str, reasoning: Sequence[str] = ()) -> str:
    """Of a whole answer."""
    deltas = [{"reasoning_content": text} for text in reasoning]
    deltas += [{"content": text} for text in texts]
    pieces = [{"choices": [{"delta": delta, "finish_reason": None}]} for delta in deltas]
    return "".join(f"data: {json.dumps(piece)}\n\n" for piece in pieces) + "data: [DONE]\n\n"


def answer(route: Route, events: str) -> None:
    route.fulfill(content_type="text/event-stream", body=events)


def test_what_a_model_reasons_is_shown_and_not_sent_again(browser: Browser, url: str) -> None:
    cut_off = sse(reasoning=["Paris or ", "<b>Rome</b>?"])
    answers = [cut_off, sse("\n\nParis", ".", reasoning=["It is ", "Paris"]), sse("Yes.")]
    sent: list[list[tuple[str, str]]] = []

    def serve(route: Route) -> None:
        asked = json.loads(route.request.post_data or "")["messages"]
        sent.append([(each["role"], each["content"]) for each in asked])
        answer(route, answers[len(sent) - 1])

    with opened(browser, url) as page:
        page.route("**/v1/chat/completions", serve)
        reasoned, texts = page.locator(".reasoning"), page.locator(".turn.assistant .text")
        say(page, "One")
        expect(reasoned.locator("p")).to_have_text("Paris or <b>Rome</b>?")
        expect(reasoned.locator("p")).to_be_visible()
        expect(page.locator("#send")).to_be_visible()
        say(page, "Two")
        expect(texts.nth(1)).to_have_text("Paris.")
        expect(reasoned.nth(1).locator("p")).to_be_hidden()
        reasoned.nth(1).locator("summary").click()
        expect(reasoned.nth(1).locator("p")).to_have_text("It is Paris")
        expect(reasoned.nth(1).locator("p")).to_be_visible()
        expect(page.locator("#send")).to_be_visible()
        say(page, "Three")
        expect(texts.nth(2)).to_have_text("Yes.")
        expect(reasoned.nth(2)).to_be_hidden()
        assert sent[1:] == [
            [("user", "Two")],
            [("user", "Two"), ("assistant", "\n\nParis."), ("user", "Three")],
        ]


def test_what_a_model_writes_is_never_more_than_text(browser: Browser, url: str) -> None:
    hostile = "<img src=x onerror='document.title=1'>"
    written = f"{hostile}\n\n**{hostile}** [a](javascript:1)\n\n- `<b>`\n\n```html\n<script>"

    events = sse(written[:9], written[9:60], written[60:])
    with opened(browser, url) as page:
        page.route("**/v1/chat/completions", lambda route: answer(route, events))
        say(page, "Hello")
        text = page.locator(".turn.assistant .text")
        expect(text.locator("strong")).to_have_text(hostile)
        expect(text.locator("p").first).to_have_text(hostile)
        expect(text.locator("li code")).to_have_text("<b>")
        expect(text.locator("pre")).to_have_text("<script>")
        expect(text.locator("img, script, a, b")).to_have_count(0)
        assert page.title() == "Diptych"


def test_a_key_is_asked_for_and_kept_in_the_tab_alone(browser: Browser, url: str) -> None:
    seen: list[str | None] = []

    def lock(route: Route) -> None:
        seen.append(route.request.headers.get("authorization"))
        if seen[-1] == "Bearer secret-key":
            route.continue_()
        else:
            told = {"error": {"message": "no key", "code": "invalid_api_key"}}
            route.fulfill(status=401, json=told)

    with opened(browser, url) as page:
        page.route("**/v1/**", lock)
        page.reload()
        expect(page.locator("#notice")).to_have_text("This router asks for a key.")
        expect(page.locator("#key")).to_be_focused()
        page.fill("#key", "secret-key")
        page.click("[value=save]")
        expect(page.locator("#notice")).to_be_hidden()
        say(page, QUESTION)
        ended(page, 1)
        assert seen[0] is None
        assert seen[-1] == "Bearer secret-key"
        kept = page.evaluate("() => [JSON.stringify(localStorage), document.cookie]")
        assert "secret-key" not in "".join(kept)
        assert "secret-key" in page.evaluate("() => JSON.stringify(sessionStorage)")


def test_kv_moves_between_the_panels(browser: Browser, url: str) -> None:
    def ask(index: int) -> int:
        said = f"Story {index}. " + "Tell a long story about the sea and the ships on it. " * 12
        body = {"model": "SmolLM2-135M-Instruct", "max_tokens": 120, "temperature": 0}
        messages = [{"role": "user", "content": said}]
        answer = httpx.post(
            f"{url}/v1/chat/completions", json={**body, "messages": messages}, timeout=120
        )
        return answer.status_code

    with opened(browser, url, scheme="dark") as page, ThreadPoolExecutor(10) as asking:
        page.set_viewport_size(TALL)
        page.get_by_role("tab", name="Chat").focus()
        page.keyboard.press("ArrowRight")
        expect(page.get_by_role("tab", name="Pools")).to_be_focused()
        expect(page.locator(".wire.proven")).to_have_count(4)
        answers = [asking.submit(ask, index) for index in range(10)]
        expect(page.locator(".wire.moving").first).to_be_visible()
        expect(page.locator(".dot").first).to_be_attached()
        page.get_by_role("tab", name="Pools").blur()
        page.wait_for_timeout(250)  # the dots are on their way
        page.screenshot(path=PICTURES / "pools.png")
        expect(page.locator(".decode .blocks .o-running").first).to_be_visible()
        assert {each.result() for each in answers} == {200}
        expect(page.locator(".decode .blocks .o-running")).to_have_count(0)
        assert sum(int(n) for n in page.locator("#pairs td:last-child").all_text_contents()) >= 10


def pools_told(pulls: int, *, num_prefill: int = 1) -> dict[str, object]:
    """As /v1/cluster tells of one decode worker and its pairs, each with so many pulls."""
    owners = ("total", "running", "reserved", "leased", "quarantined", "cached", "free")
    worker = {"state": "ready", "message": "", "is_used": True, "blocks": dict.fromkeys(owners, 0)}
    worker |= dict.fromkeys(("max_num_seqs", "num_running", "num_waiting"), 0)
    worker |= dict.fromkeys(("num_pending_prefill_tokens", "prefill_tokens_per_s"), 0)
    prefill = [{**worker, "address": f"p:{index}"} for index in range(num_prefill)]
    pair = {"decode": "d:0", "state": "proven", "transport": "tcp", "bytes_per_s": 0}
    pair["way"] = "DRAM to DRAM"
    latency = {"num_samples": 0}
    return {
        **{"num_waiting": 0, "num_placed": 0, "num_output_tokens": 0},
        **{"ttft": latency, "itl": latency},
        **{"prefill": prefill, "num_prefill": num_prefill},
        **{"decode": [{**worker, "address": "d:0"}], "num_decode": 1},
        "pairs": [{**pair, "prefill": each["address"], "num_pulls": pulls} for each in prefill],
    }


# How many squares set off, and came to their end, as attributes of the body.
COUNT_MOTIONS: Final = """() => {
  const { dataset } = document.body;
  for (const name of ["beginEvent", "endEvent"])
    document.addEventListener(name, ({ target, type }) => {
      const key = type.toLowerCase();
      if (target.tagName === "animateMotion") dataset[key] = Number(dataset[key] ?? 0) + 1;
    }, true);
}"""


def test_a_square_runs_to_its_end_and_goes(browser: Browser, url: str) -> None:
    looks = [pools_told(0), pools_told(100), pools_told(100), pools_told(100, num_prefill=2)]

    def tell(route: Route) -> None:
        route.fulfill(json=looks.pop(0) if len(looks) > 1 else looks[0])

    with opened(browser, url) as page:
        page.route("**/v1/cluster", tell)
        page.evaluate(COUNT_MOTIONS)
        page.get_by_role("tab", name="Pools").click()
        expect(page.locator("body")).to_have_attribute("data-endevent", "6")
        expect(page.locator("body")).to_have_attribute("data-beginevent", "6")
        expect(page.locator(".worker.prefill")).to_have_count(2)
        expect(page.locator(".dot")).to_have_count(0)


def test_a_pool_without_workers_says_what_that_means(browser: Browser, url: str) -> None:
    none = {**pools_told(0, num_prefill=0), "decode": [], "num_decode": 0}

    with opened(browser, url) as page:
        page.route("**/v1/cluster", lambda route: route.fulfill(json=none))
        page.get_by_role("tab", name="Pools").click()
        expect(page.locator("#prefill-workers")).to_have_text(
            "No workers: decode computes prompts itself."
        )
        expect(page.locator("#decode-workers")).to_have_text(
            "No workers: requests wait for one, or are refused."
        )


@pytest.mark.parametrize("view", ["chat", "pools"])
def test_it_fits_a_telephone(browser: Browser, url: str, view: str) -> None:
    with opened(browser, url) as page:
        page.set_viewport_size(NARROW)
        page.goto(f"{url}/#{view}")
        expect(page.locator(f"#view-{view}")).to_be_visible()
        if view == "pools":
            expect(page.locator(".wire.proven")).to_have_count(4)
        wide, seen = page.evaluate("() => [document.documentElement.scrollWidth, innerWidth]")
        assert wide <= seen


def test_a_router_that_does_not_show_its_pools(browser: Browser, url: str) -> None:
    def hide(route: Route) -> None:
        told = {"error": {"message": "not told", "code": "not_served"}}
        route.fulfill(status=501, json=told)

    with opened(browser, url) as page:
        page.route("**/v1/cluster", hide)
        page.get_by_role("tab", name="Pools").click()
        expect(page.locator("#notice")).to_have_text("This router does not show its pools.")
        page.get_by_role("tab", name="Chat").click()
        expect(page.locator("#notice")).to_be_hidden()
