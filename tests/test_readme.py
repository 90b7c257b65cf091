"""What the README says is what the library does."""

import re

from tests.benchmarks import readme

TEXT = readme.README.read_text()


def test_the_example_prints_what_the_readme_shows():
    shown = re.search(r"<!-- output -->\n```text\n(.*?)```", TEXT, re.DOTALL)
    assert shown is not None
    names = re.findall(r"'(\w+)': '\d+ MiB'", shown[1])
    printed = readme.output_of(readme.example(TEXT))
    assert names == re.findall(r"'(\w+)': '\d+ MiB'", printed)
    assert len(names) == 3


def test_the_policy_table_is_the_catalogues():
    assert readme.policy_table() in TEXT


def test_links_lead_somewhere():
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", TEXT):
        assert (readme.ROOT / link).exists(), link
