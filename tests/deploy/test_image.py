"""The image: built from its recipe, run without rights on a file system that cannot be written.

`make image`; minutes, and gigabytes of .cache/, which are freed at the end.
"""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from diptych.models.demo import demo_folder
from diptych.models.source import DEFAULT_CACHE_DIR
from diptych.progress import silent
from tests.deploy import image
from tests.deploy.image import Image, NoBuilderError
from tests.notes import Note

pytestmark = pytest.mark.timeout(4000)

# Some 2 GB: 1.8 of packages, most of them torch (CPUs) and nixl, the rest Debian and Python.
MAX_BYTES = 2_500_000_000

# A whole cluster in the image; what fails ends the script with its exit code.
DEMO = """
diptych up --model demo 2>/tmp/log & up=$!
trap 'cat /tmp/log >&2' EXIT
until diptych health --service diptych.v1.Inference 2>/dev/null; do kill -0 $up; sleep 1; done
diptych health
prompt=$(for i in $(seq 40); do echo "A prompt is computed here and continued there."; done)
diptych generate --timing --expect-handoff --max-tokens 8 --timeout-s 120 "$prompt"
grep -E "transport (refused|not available)" /tmp/log >&2 || true
kill -INT $up
wait $up
trap - EXIT
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    try:
        yield image.build(tmp_path_factory.mktemp("image"))
    except NoBuilderError as error:
        pytest.skip(str(error))
    finally:
        image.remove()


@pytest.fixture
def cache(tmp_path: Path, built: Image) -> Path:
    """The image's /cache, which is its HOME, with the demo model."""
    model, folder = demo_folder(DEFAULT_CACHE_DIR.expanduser(), silent), tmp_path / "cache"
    place = folder / DEFAULT_CACHE_DIR.relative_to("~") / "models" / model.name
    shutil.copytree(model, place)
    uid, gid = (int(part) for part in built.user.split(":"))
    for path in (folder, *folder.rglob("*")):
        shutil.chown(path, uid, gid)
    return folder


def test_it_says_whom_it_runs_as_and_how_it_is(built: Image, note: Note) -> None:
    note(f"the image was built on {built.base}")
    assert built.user == "10001:10001"
    assert built.entrypoint == ("diptych",)
    assert built.health == ("CMD", "diptych", "health")


def test_it_is_no_larger_than_it_has_to_be(built: Image, note: Note) -> None:
    """Were CUDA's torch to slip in, it would be thrice that."""
    sizes = {(at := path.lstat()).st_ino: at.st_size for path in built.root.rglob("*")}
    note(f"the image has {sum(sizes.values()) / 1e9:.2f} GB of files")
    assert sum(sizes.values()) < MAX_BYTES


def test_nothing_but_its_own_folders_is_written(built: Image, cache: Path) -> None:
    script = """
    test "$(id -u)" = 10001
    touch /cache/a /tmp/a
    for folder in / /opt/diptych /etc /usr /var /home; do
      if touch $folder/a 2>/dev/null; then echo "$folder can be written" >&2; exit 1; fi
    done
    """
    done = built.run(script, cache, 60)
    assert done.returncode == 0, done.stderr


def test_the_demo_works_in_it(built: Image, cache: Path, note: Note) -> None:
    """Over nixl, which needs no rights beyond a user's; or somebody says why not."""
    done = built.run(DEMO, cache, 600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "KV pulled" in done.stderr
    moved = re.search(r"^transfer .* over (\w+),", done.stderr, re.MULTILINE)
    assert moved, done.stderr
    passed_over = [line for line in done.stderr.splitlines() if "| transport " in line]
    note("; ".join([f"KV moved over {moved[1]}", *passed_over]))
    assert moved[1] == "nixl" or passed_over
