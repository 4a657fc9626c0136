"""What training and evaluation share is found where it was planted, and nowhere else."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.data.prepare.decontamination import EvaluationIndex, words_of

PROBLEM = "Natalia sold 48 clips to her friends in April and then half as many clips in May"
SOLUTION = "A train leaves at noon and another one an hour later on the same track to the north"


def words(prefix: str, num_words: int) -> list[str]:
    return [f"{prefix}{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(num_words)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello,  WORLD!\n", "hello world"),
        ("It's x_1 (really).", "it s x 1 really"),
        # An operator before a number and the point inside it tell problems apart.
        ("3 + 4", "3 + 4"),
        ("3*4 = 12.50.", "3 * 4 = 12.50"),
        ("well-known - a dash", "well known a dash"),
        ("(3,4) and 1,000", "3 4 and 1 000"),
        # Width, ligatures, sharp s and dotted capital I: Unicode's own folding.
        ("ＡＢＣ　１２", "abc 12"),
        ("ﬁne STRASSE straße", "fine strasse strasse"),
        # One letter or a letter and its mark.
        ("Th\u00e9 The\u0301", "th\u00e9 th\u00e9"),
        ("一共有5个苹果。", "一 共 有 5 个 苹 果"),
        ("Сколько ЯБЛОК?", "сколько яблок"),
        ("?!…", ""),
        # What is written for one operator is one.
        ("12 − 5 – 3", "12 - 5 - 3"),
        ("3 × 4 · 5 ÷ 6", "3 * 4 * 5 / 6"),
        ("3 ∗ 4 ⋅ 5 ∕ 6 ‐ 7", "3 * 4 * 5 / 6 - 7"),
        ("½ 10⁻³", "1 / 2 10 - 3"),
        ("a – b · c × d", "a b c d"),
        # What is not seen is no part of a word, nor its end.
        ("pro\u00adblem wo\u200brd\ufeff e\u00ad\u0301", "problem word \u00e9"),
    ],
)
def test_words_by_hand(text: str, expected: str) -> None:
    assert words_of(text) == expected.split()


def test_what_is_shared_by_hand() -> None:
    index = EvaluationIndex({"gsm8k": [SOLUTION, PROBLEM], "clean": ["something else"]})
    first_run = " ".join(PROBLEM.lower().split()[:13])
    place = (("gsm8k", 1),)
    assert not list(index.shared("nothing of it"))
    assert next(index.shared(f"So: {PROBLEM}, she said.")) == ("run", first_run, place)
    assert next(index.shared(PROBLEM.upper() + ".")) == ("exact", PROBLEM.lower(), place)


def test_all_evaluation_texts_that_share_are_named() -> None:
    index = EvaluationIndex({"all": [PROBLEM, PROBLEM]})
    assert {places for _, _, places in index.shared(PROBLEM)} == {(("all", 0), ("all", 1))}


def test_texts_shorter_than_a_run_count_by_all_of_their_words() -> None:
    nine, three = words("w", 9), words("v", 3)
    index = EvaluationIndex({"short": [" ".join(nine), " ".join(three)]})

    def kinds(*text: str) -> list[str]:
        return [kind for kind, _, _ in index.shared(" ".join(text))]

    assert kinds("so", *nine, "then") == ["run"]
    assert kinds(*nine) == ["exact", "run"]
    assert kinds("so", *nine[:8], "then") == []
    # Fewer than 8 words: only the same text.
    assert kinds("so", *three, "then") == []
    assert kinds(*three) == ["exact"]


def test_same_words_with_another_operator_do_not_match() -> None:
    index = EvaluationIndex({"sums": ["What is 31 + 44?"]})
    assert list(index.shared("what is 31+44"))
    for other in ("What is 31 * 44?", "What is 31 - 44?", "What is 31 + 4.4?"):
        assert not list(index.shared(other))


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("-", "\u2212").replace("*", "\u00d7").replace("/", "\u00f7"),
        lambda text: text.replace("-", "\u2013").replace("*", "\u00b7"),
        lambda text: text.replace("apples", "ap\u00adples"),
        lambda text: text.replace("apples", "apples\u200b"),
        lambda text: "\ufeff" + "\u2060".join(text),
    ],
)
def test_signs_for_one_operator_and_unseen_ones_hide_no_problem(
    change: Callable[[str], str],
) -> None:
    problem = "Tom has 12 - 5 apples and 3 * 4 pears in 8 / 2 bags how many has he of each kind"
    index = EvaluationIndex({"sums": [problem]})
    assert change(problem) != problem
    for asked, looked in (
        (index, change(problem)),
        (EvaluationIndex({"s": [change(problem)]}), problem),
    ):
        assert [kind for kind, _, _ in asked.shared(looked)][:2] == ["exact", "run"]


def test_runs_of_a_script_without_spaces() -> None:
    text = "娜塔莉亚四月份卖给了她的朋友四十八个夹子"
    index = EvaluationIndex({"chinese": [text]})
    assert [kind for kind, _, _ in index.shared(f"问题：{text[2:15]}吗")] == ["run"]
    assert not list(index.shared(f"问题：{text[2:14]}吗"))


def test_texts_without_words_are_never_found() -> None:
    index = EvaluationIndex({"none": ["...", ""]})
    assert not any(list(index.shared(text)) for text in ("", "?!", PROBLEM))


def test_refuses_runs_of_no_word() -> None:
    with pytest.raises(ValueError, match="num_words: got 0; need >= 1"):
        EvaluationIndex({}, num_words=0)


@settings(max_examples=60)
@given(st.data())
def test_a_planted_run_is_always_found_and_a_shorter_one_never(data) -> None:
    """Evaluation and training have no word in common but those of the planted run."""
    num_words = data.draw(st.integers(1, 15))
    length = data.draw(st.integers(num_words, 25))
    evaluation = words("e", length)
    start = data.draw(st.integers(0, length - num_words))
    before, after = (words(p, data.draw(st.integers(1, 12))) for p in "xy")
    noise = data.draw(st.sampled_from([" ", "  ", ", ", ".\n", " — ", "\u3000"]))
    run = evaluation[start : start + num_words]
    index = EvaluationIndex({"noise": ["zz"], "planted": [" ".join(evaluation)]}, num_words)
    planted = noise.join([*before, *(word.upper() for word in run), *after])
    assert list(index.shared(planted)) == [("run", " ".join(run), (("planted", 0),))]
    assert not list(index.shared(noise.join([*before, *run[1:], *after])))
    # The words in another place of the text are no run.
    assert num_words == 1 or not list(index.shared(noise.join([*run[1:], *before, run[0]])))


@settings(max_examples=40)
@given(st.lists(st.text(max_size=40), max_size=6))
def test_any_text_equal_but_for_case_and_space_is_found(evaluation: list[str]) -> None:
    index = EvaluationIndex({"any": evaluation})
    for row, text in enumerate(evaluation):
        if words_of(text):
            found = [places for kind, _, places in index.shared(f" {text}\n") if kind == "exact"]
            assert ("any", row) in found[0]


@settings(max_examples=40)
@given(st.lists(st.sampled_from("abc"), max_size=20), st.lists(st.sampled_from("abc"), max_size=20))
def test_a_run_is_found_where_a_search_of_all_pairs_finds_it(
    evaluation: list[str], training: list[str]
) -> None:
    index = EvaluationIndex({"only": [" ".join(evaluation)]}, 4)
    expected = any(
        evaluation[i : i + 4] == training[j : j + 4]
        for i in range(len(evaluation) - 3)
        for j in range(len(training) - 3)
    )
    found = [kind for kind, _, _ in index.shared(" ".join(training))]
    assert ("run" in found) == expected
