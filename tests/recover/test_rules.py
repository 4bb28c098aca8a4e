"""A user's own rules and function come first, and errors in them are told as such."""

from pathlib import Path

import pytest

from headway.errors import InputError
from headway.recover import Classifier, Evidence, Verdict, load_rules
from headway.recover.categories import Action, Klass
from headway.recover.classify import load_callable
from headway.recover.rules import needed_words

OWN = """
[[rule]]
name = "our_filer"
category = "storage_io"
pattern = 'FILER-\\d+ went away'

[[rule]]
name = "license"
category = "license_server"
class = "infra"
action = "retry_backoff"
pattern = "no licence left"
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "rules.toml"
    path.write_text(text)
    return path


def test_a_users_rule_wins_over_all_that_headway_knows(tmp_path: Path) -> None:
    classifier = Classifier(load_rules(written(tmp_path, OWN)))
    verdict = classifier.explain("NVRM: Xid (PCI:0000:1b:00): 79\nFILER-7 went away\n")
    assert (verdict.category, verdict.rule, verdict.action) == ("storage_io", "our_filer", "retry_backoff")


def test_a_user_may_have_categories_of_their_own(tmp_path: Path) -> None:
    classifier = Classifier(load_rules(written(tmp_path, OWN)))
    verdict = classifier.explain("INFO: no licence left, retrying")
    assert (verdict.category, verdict.klass, verdict.action) == ("license_server", Klass.INFRA, Action.RETRY_BACKOFF)


def test_a_rule_may_change_what_is_done_about_a_known_category(tmp_path: Path) -> None:
    text = '[[rule]]\nname="x"\ncategory="cuda_oom"\npattern="out of memory"\naction="fail_fast"\n'
    verdict = Classifier(load_rules(written(tmp_path, text))).explain("CUDA out of memory")
    assert (verdict.category, verdict.klass, verdict.action) == ("cuda_oom", "user", "fail_fast")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[[rule]]\nname="a"\ncategory="cuda_om"\npattern="x"\n', "did you mean cuda_oom?"),
        ('[[rule]]\nname="a"\ncategory="cuda_oom"\npattern="("\n', "no regular expression"),
        ('[[rule]]\nname="a"\ncategory="n"\nclass="infra"\naction="retry_backof"\npattern="x"\n', "retry_backoff?"),
        ('[[rule]]\nname="a"\ncategory="new"\nclass="infr"\naction="fail_fast"\npattern="x"\n', "did you mean infra?"),
        ('[[rule]]\nname="a"\ncategory="cuda_oom"\npatern="x"\n', "did you mean pattern?"),
        ('[[rule]]\nname="a"\ncategory="cuda_oom"\n', "has no pattern"),
        ('[[rule]]\nname="a"\ncategory="cuda_oom"\npattern=7\n', "a text in quotes"),
        ('[[rules]]\nname="a"\n', "[[rule]] tables"),
        ("rule = 7\n", "[[rule]] tables"),
        ("nonsense", "not TOML"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_rules_file_is_named(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(InputError) as error:
        load_rules(written(tmp_path, text))
    assert told in str(error.value)
    assert "rules.toml" in str(error.value)


def test_a_rules_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere\.toml cannot be read"):
        load_rules(tmp_path / "nowhere.toml")


def test_a_users_function_is_asked_first_and_may_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ours.py").write_text(
        "from headway.recover import Verdict\n"
        "def judge(evidence):\n"
        "    return Verdict('ours', 'infra', 'fail_fast', 'judge') if evidence.rank == 1 else None\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    classifier = Classifier(ask=load_callable("ours:judge"))
    assert classifier.classify(Evidence(rank=1, exit_code=-11)) == Verdict("ours", "infra", "fail_fast", "judge")
    assert classifier.classify(Evidence(rank=0, exit_code=-11)).category == "segfault"


@pytest.mark.parametrize(
    "name", ["nowhere:f", "headway.recover:nothing", "headway.recover", "", "headway.recover:__all__"]
)
def test_a_name_that_is_no_function_is_refused(name: str) -> None:
    with pytest.raises(InputError):
        load_callable(name)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("abc", ("abc",)),
        ("ab|Xyz", ()),
        ("abc|Xyz", ("abc", "xyz")),
        (r"ab?cde\d+fg", ("cde",)),
        (r"\bnode_fail\b", ("node_fail",)),
        (r"(?:disk|tape) full", (" full",)),
        (r"(?:long word|other) x", ("long word", "other")),
        (r"(?!not here)out", ("out",)),
        (r"[abc]def{0,3}ghi", ("ghi",)),
        (r"(?:maybe)?", ()),
    ],
)  # fmt: skip
def test_the_words_a_pattern_needs_are_read_off_it(pattern: str, words: tuple[str, ...]) -> None:
    assert needed_words(pattern) == words
