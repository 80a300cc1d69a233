"""The page's files: what is served, to whom, under which policy; its colours are told apart."""

import re
from pathlib import Path
from typing import Final

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from diptych.errors import InvalidApiKeyError
from diptych.tenant import Tenant
from router.frontend.callers.callers import Callers
from router.frontend.http import static_page
from router.frontend.http.authenticated import Authenticated
from router.frontend.http.identified import Identified
from router.frontend.http.static_page import PAGE_PATHS, answer_page

FOLDER: Final = Path(static_page.__file__).parent / "page"
SCRIPTS: Final = sorted(FOLDER.glob("*.js"))


class Locked(Callers):
    """Knows nobody."""

    async def run(self) -> None:
        raise NotImplementedError

    async def tenant(self, given: str | None) -> Tenant:
        raise InvalidApiKeyError("no key")


@pytest.fixture
def client() -> httpx.AsyncClient:
    app = Starlette(routes=[Route(path, answer_page) for path in PAGE_PATHS])
    locked = Authenticated(Identified(app), Locked(), lambda *_: None)
    return httpx.AsyncClient(transport=httpx.ASGITransport(locked), base_url="http://r")


async def test_it_is_served_to_anybody_and_the_api_is_not(client: httpx.AsyncClient) -> None:
    assert {"/", "/page/main.js", "/page/style.css"} <= PAGE_PATHS
    for path in PAGE_PATHS:
        assert (await client.get(path)).status_code == 200
    for path in ("/v1/cluster", "/v1/models", "/page/", "/page/../routes.py", "/page/absent.js"):
        assert (await client.get(path)).status_code in (401, 404)
    assert (await client.get("/v1/cluster")).status_code == 401


async def test_every_file_comes_under_the_policy(client: httpx.AsyncClient) -> None:
    for path in PAGE_PATHS:
        headers = (await client.get(path)).headers
        policy = dict(
            part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";")
        )
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert policy["frame-ancestors"] == policy["base-uri"] == "'none'"
        assert policy["require-trusted-types-for"] == "'script'"
        assert headers["x-content-type-options"] == "nosniff"


async def test_what_a_browser_has_is_not_sent_again(client: httpx.AsyncClient) -> None:
    first = await client.get("/")
    again = await client.get("/", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["content-security-policy"] == first.headers["content-security-policy"]


def test_all_that_it_names_is_there() -> None:
    html = (FOLDER / "index.html").read_text()
    named = set(re.findall(r'(?:href|src)="(page/[^"]+)"', html))
    for script in SCRIPTS:
        named |= {f"page/{name}" for name in re.findall(r'from "\./([^"]+)"', script.read_text())}
    assert {f"/{name}" for name in named} | {"/"} == PAGE_PATHS
    ids = set(re.findall(r'id="([^"]+)"', html))
    for script in SCRIPTS:
        assert set(re.findall(r'byId\("([^"]+)"\)', script.read_text())) <= ids


@pytest.mark.parametrize("path", [*SCRIPTS, FOLDER / "index.html"], ids=lambda path: path.name)
def test_nothing_makes_html_of_text_or_asks_elsewhere(path: Path) -> None:
    text = path.read_text().replace("http://www.w3.org/2000/svg", "")
    for banned in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert banned not in text
    assert not re.search(r"https?://|<script>|\son\w+=\"|style=\"", text)


def colours(text: str) -> dict[str, str]:
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", text))


def luminance(colour: str) -> float:
    """As WCAG defines it."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_on_every_ground(scheme: str) -> None:
    light, _, rest = (FOLDER / "style.css").read_text().partition("@media (prefers-color-scheme")
    used = colours(light)
    if scheme == "dark":
        dark = colours(rest.partition("* { box-sizing")[0])
        assert dark.keys() == used.keys()
        used = dark
    for text in ("ink", "soft", "prefill", "decode", "bad", "good", "warn", "kv"):
        for ground in ("paper", "sheet", "sunk", "prefill-wash", "decode-wash"):
            assert contrast(used[text], used[ground]) >= 4.5, (text, ground)
    assert contrast(used["paper"], used["decode"]) >= 4.5, "a button's name"
