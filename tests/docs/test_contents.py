"""docs/_ext/repository.py: where pages stand, and where their links lead."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_SPEC = importlib.util.spec_from_file_location("repository", ROOT / "docs" / "_ext" / "repository.py")
assert _SPEC is not None and _SPEC.loader is not None
repository = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(repository)


def test_named_pages_that_are_missing_are_left_out_and_others_stand_at_the_end() -> None:
    found = {"index", "cli", "quickstart/sdk", "something-new", "project/changelog"}
    assert repository.contents(found) == "\n\n".join(
        f"```{{toctree}}\n:caption: {caption}\n:maxdepth: 1\n\n{pages}\n```"
        for caption, pages in (
            ("Tutorials", "quickstart/sdk"),
            ("Reference", "cli"),
            ("Project", "project/changelog\nsomething-new"),
        )
    )


def test_links_out_of_docs_lead_to_a_page_a_file_or_a_name() -> None:
    text = (
        "[a](../SECURITY.md#trust) [b](cli.md) [c](../docker) [`d`](../LICENSE) [e](https://x.y/z.md)\n"
        "[decisions](decisions/README.md) [docker](../docker)\n"
        "[decision 0001](decisions/0001-three-packages-one-distribution.md)\n"
        "```\n[kept](../SECURITY.md)\n```\n"
    )
    assert repository.relinked(text, ROOT / "docs" / "operations.md", "operations") == (
        "[a](project/security-policy.md#trust) [b](cli.md) c (`docker`) [`d`](../LICENSE) [e](https://x.y/z.md)\n"
        "decisions (`docs/decisions/README.md`) `docker`\n"
        "decision 0001\n"
        "```\n[kept](../SECURITY.md)\n```\n"
    )


def test_a_borrowed_file_links_from_where_it_is_shown() -> None:
    text = "[a](docs/data.md) [b](gridtrain/network/wire/PROTOCOL.md) ![c](docs/images/demo-loss.svg)"
    assert repository.relinked(text, ROOT / "CHANGELOG.md", "project/changelog") == (
        "[a](../data.md) [b](protocol.md) ![c](../images/demo-loss.svg)"
    )


def test_what_pages_borrow_is_there() -> None:
    for page, file in repository.BORROWED.items():
        assert (ROOT / file).is_file() and (ROOT / "docs" / f"{page}.md").is_file(), page


def test_every_public_name_is_in_the_reference() -> None:
    import gridtrain
    import gridtrain.pipeline

    text = (ROOT / "docs" / "api.md").read_text()
    errors = {name for name in gridtrain.__all__ if name in vars(gridtrain.errors)}  # by automodule
    names = (set(gridtrain.__all__) - errors - {"__version__"}) | set(gridtrain.pipeline.__all__)
    assert "automodule:: gridtrain.errors" in text
    assert sorted(name for name in names if not re.search(rf"\.{name}\b", text)) == []


def test_the_list_of_names_is_that_of_the_package() -> None:
    import gridtrain

    text = (ROOT / "docs" / "api.md").read_text()
    listed = re.findall(r"^- ((?:`\w+`(?:, )?)+): ", text, flags=re.MULTILINE)
    names = [name for line in listed for name in re.findall(r"`(\w+)`", line)]
    assert sorted(names) == sorted(gridtrain.__all__)


def test_every_member_that_the_reference_lists_exists() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    listed = re.findall(
        r"^\.\. autoclass:: ([\w.]+)\.(\w+)(?:\(\))?\n +:members: (\w.*)$", text, flags=re.MULTILINE
    )
    assert listed
    missing = [
        f"{module}.{name}.{member}"
        for module, name, members in listed
        for member in members.split(", ")
        if not hasattr(getattr(importlib.import_module(module), name), member)
    ]
    assert missing == []
