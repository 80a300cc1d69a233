"""The page's scripts that need no screen, run by Node where there is one."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

from router.frontend.http import static_page

FOLDER: Final = Path(static_page.__file__).parent / "page"
NODE: Final = shutil.which("node")
# What the scripts ask of a browser: elements are lists of a name and what is in them.
BROWSER: Final = """
class Element {
  constructor(name) { this.told = [name]; }
  append(...children) { this.told.push(...children.filter((each) => each !== "")); }
  setAttribute() {}
  addEventListener() {}
  toJSON() { return this.told; }
}
globalThis.document = { createElement: (name) => new Element(name) };
const storage = (members) => Object.defineProperties(members, {
  getItem: { value: (name) => members[name] ?? null },
  setItem: { value: (name, text) => { members[name] = text; } },
  removeItem: { value: (name) => { delete members[name]; } },
});
globalThis.localStorage = storage({});
globalThis.sessionStorage = storage({});
const tell = (told) => console.log(JSON.stringify(told));
"""

pytestmark = pytest.mark.skipif(NODE is None, reason="no node: apt-get install nodejs")


def told_by(folder: Path, script: str) -> object:
    """What ``script`` tells, which imports from ./page/."""
    (folder / "package.json").write_text('{"type": "module"}')
    shutil.copytree(FOLDER, folder / "page", dirs_exist_ok=True)
    (folder / "script.js").write_text(BROWSER + script)
    assert NODE is not None
    done = subprocess.run(
        [NODE, "script.js"], cwd=folder, check=True, capture_output=True, text=True, timeout=120
    )
    told: object = json.loads(done.stdout)
    return told


def test_a_line_ends_wherever_one_can_end_however_much_space_there_is(tmp_path: Path) -> None:
    script = """
    const { elements } = await import("./page/markdown.js");
    const space = " ".repeat(100_000);
    const texts = [`- ${space}x\\ry`, `# ${space}x\\u2028y`, `1.${space}`, `# ${space}`];
    tell([...texts, "- a\\r\\n- **b**"].map(elements));
    """
    assert told_by(tmp_path, script) == [
        [["ul", ["li", "x"]], ["p", "y"]],
        [["h3", "x"], ["p", "y"]],
        [["ol", ["li"]]],
        [["h3"]],
        [["ul", ["li", "a"], ["li", ["strong", "b"]]]],
    ]


def test_a_number_and_its_unit_stand_on_one_line(tmp_path: Path) -> None:
    script = """
    const { size, time } = await import("./page/dom.js");
    tell([time(0.2431), time(0.0142), time(2), size(2.21e6)]);
    """
    expected = ["243 ms", "14.2 ms", "2.00 s", "2.21 MB"]
    assert told_by(tmp_path, script) == [each.replace(" ", "\xa0") for each in expected]


def test_a_question_without_an_answer_is_not_sent_with_the_next(tmp_path: Path) -> None:
    script = """
    const { messages } = await import("./page/chats.js");
    const user = (content) => ({ role: "user", content });
    const answer = (content, more) => ({ role: "assistant", content, ...more });
    const failed = answer("", { error: "busy" });
    const thought = answer("", { reasoning: "well" });
    const turns = [user("1"), failed, user("2"), answer("b"), user("3"), thought, user("4")];
    const sent = (turns) => messages(turns).map(({ role, content }) => [role, content]);
    tell([sent(turns), sent([user("1")]), sent([user("1"), failed, user("2")])]);
    """
    assert told_by(tmp_path, script) == [
        [["user", "2"], ["assistant", "b"], ["user", "4"]],
        [["user", "1"]],
        [["user", "2"]],
    ]


def test_two_tabs_write_over_no_chats_of_each_other(tmp_path: Path) -> None:
    script = """
    const { Chats, titleOf } = await import("./page/chats.js");
    let now = 0;
    Date.now = () => (now += 1);
    const say = (tab, text) => {
      tab.add().turns.push({ role: "user", content: text });
      tab.save(tab.open);
    };
    const [one, other] = [new Chats(), new Chats()];
    say(one, "first");
    say(other, "second");
    one.save(one.open);
    const all = (tab) => tab.all.map(titleOf);
    const kept = () => all(new Chats());
    const told = [kept(), all(one)];
    const [mine, theirs] = [one, other].map((tab) => `diptych.chat.${tab.open.id}`);
    told.push(one.follow(theirs, localStorage[theirs]), all(one), titleOf(one.open));
    other.follow(mine, localStorage[mine]);
    const answered = one.open;
    told.push(one.follow(mine, localStorage[mine], answered), one.open === answered);
    other.remove(answered.id);
    told.push(kept(), one.follow(mine, null, answered), all(one), titleOf(one.open));
    one.save(answered);
    told.push(kept(), one.follow("diptych.settings", "{}"), one.follow(mine, '{"turns": 1}'));
    one.clear();
    tell([...told, kept()]);
    """
    assert told_by(tmp_path, script) == [
        *(["second", "first"], ["first"]),
        *(True, ["second", "first"], "first"),
        *(False, True),
        *(["second"], True, ["second"], "second"),
        *(["second"], False, False),
        ["New chat"],
    ]


def test_a_stream_that_says_that_more_will_come_is_read_on(tmp_path: Path) -> None:
    script = """
    const { stream } = await import("./page/api.js");
    const encoder = new TextEncoder();
    const answers = (pieces, ended) => async () => new Response(new ReadableStream({
      pull(controller) {
        if (pieces.length) controller.enqueue(encoder.encode(pieces.shift()));
      },
      cancel() { ended.push("left"); },
    }));
    const read = async (...pieces) => {
      const told = [];
      globalThis.fetch = answers(pieces, told);
      try {
        for await (const each of stream("v1/chat/completions", {})) told.push(each);
      } catch (error) {
        told.push(error.message);
      }
      await new Promise((done) => setTimeout(done, 0));
      return told;
    };
    const [one, end] = ['data: {"n":1}\\n\\n', "data: [DONE]\\n\\n"];
    const comment = ": the model is still at it\\n\\n";
    tell([
      await read(comment, one + comment, comment.slice(0, 5), comment.slice(5) + end),
      await read(one, 'data: {"error":{"message":"lost"}}\\n\\n', one),
    ]);
    """
    assert told_by(tmp_path, script) == [[{"n": 1}, "left"], [{"n": 1}, "lost", "left"]]


def test_a_page_that_outlives_the_model_it_knew_asks_the_one_that_is_served(
    tmp_path: Path,
) -> None:
    """Once, and not where the router has its model and lacks something else."""
    script = """
    const { Served } = await import("./page/served.js");
    const { ApiError } = await import("./page/api.js");
    let serves = "old";
    globalThis.fetch = async () => new Response(JSON.stringify({ data: [{ id: serves }] }));
    const shown = [];
    const served = new Served((model) => shown.push(model.id));
    const asked = [];
    async function* ask(model) {
      asked.push(model);
      if (model !== serves) throw new ApiError(404, `no model ${model}`);
      yield "a";
      yield "b";
    }
    async function read(ask) {
      const told = [];
      try {
        for await (const each of served.events(ask)) told.push(each);
      } catch (error) {
        told.push(error.message);
      }
      return told;
    }
    const told = [await read(ask)];
    serves = "new";
    told.push(await read(ask), await read(ask));
    async function* lacking(model) {
      asked.push(model);
      throw new ApiError(404, "no such path");
    }
    told.push(await read(lacking));
    tell([told, asked, shown]);
    """
    assert told_by(tmp_path, script) == [
        [["a", "b"], ["a", "b"], ["a", "b"], ["no such path"]],
        ["old", "old", "new", "new", "new"],
        ["old", "new", "new"],
    ]
