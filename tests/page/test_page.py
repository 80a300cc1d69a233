"""The web page of a real router in a headless Chromium; ``make page`` runs it.

What it sees it leaves as pictures in docs/page/, for people to judge. Colours, headers and what is
served to whom are unit tests.
"""

import json
import shutil
from collections.abc import Iterator
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
NARROW: Final = ViewportSize(width=390, height=780)
PATIENCE_MS: Final = 60_000

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
    expect(page.locator(".turn.assistant .timing")).to_have_count(num_answers, timeout=PATIENCE_MS)


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


def sse(*texts: str) -> str:
    pieces = [{"choices": [{"delta": {"content": text}, "finish_reason": None}]} for text in texts]
    return "".join(f"data: {json.dumps(piece)}\n\n" for piece in pieces) + "data: [DONE]\n\n"


def test_what_a_model_writes_is_never_more_than_text(browser: Browser, url: str) -> None:
    hostile = "<img src=x onerror='document.title=1'>"
    written = f"{hostile}\n\n**{hostile}** [a](javascript:1)\n\n- `<b>`\n\n```html\n<script>"

    def answer(route: Route) -> None:
        route.fulfill(
            content_type="text/event-stream", body=sse(written[:9], written[9:60], written[60:])
        )

    with opened(browser, url) as page:
        page.route("**/v1/chat/completions", answer)
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
        page.get_by_role("tab", name="Chat").focus()
        page.keyboard.press("ArrowRight")
        expect(page.get_by_role("tab", name="Pools")).to_be_focused()
        expect(page.locator(".wire.proven")).to_have_count(4)
        answers = [asking.submit(ask, index) for index in range(10)]
        expect(page.locator(".wire.moving").first).to_be_visible()
        page.get_by_role("tab", name="Pools").blur()
        page.wait_for_timeout(250)  # the dots are on their way
        page.screenshot(path=PICTURES / "pools.png")
        assert page.locator(".dot").count() >= 1
        expect(page.locator(".decode .blocks .o-running").first).to_be_visible()
        assert {each.result() for each in answers} == {200}
        expect(page.locator(".decode .blocks .o-running")).to_have_count(0)
        assert sum(int(n) for n in page.locator("#pairs td:last-child").all_text_contents()) >= 10


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
