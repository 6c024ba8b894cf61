# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Finding and comparing final answers, hostile text included."""

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qarl_jax.rewards.extract import extract, number, same


@pytest.mark.parametrize(
    ("text", "how", "expected"),
    [
        ("  42 \n", "whole", "42"),
        ("", "whole", None),
        ("so\n\n 42 \n \n", "last_line", "42"),
        ("\n\n", "last_line", None),
        ("1 and 2,500.5 apples", "last_number", "2,500.5"),
        ("none", "last_number", None),
        (r"7 eggs, so \boxed{\$1,080 \text{ a day}}, not 9", "number", "1,080"),
        (r"\boxed{x} and 5 hours, 6", "number", "6"),
        ("so 3 * 4 = 12.\n#### 12 eggs of 30", "number", "12"),
        ("#### 5\nNo, #### 6.", "number", "6"),
        ("#### none\nThat makes 1,234, or so", "number", "1,234"),
        ("it costs $18.50.", "number", "18.50"),
        ("none", "number", None),
        (r"A is wrong, \boxed{\text{C}}", "choice", "C"),
        ("The answer is (B). No, the answer is (C).", "choice", "B"),  # MMLU-Pro's: the first
        ("Answer: A\nAnswer: **D**", "choice", "D"),
        ("Neither A nor B, so D.", "choice", "D"),
        ("I am not sure", "choice", "I"),  # MMLU-Pro's own last resort
        ("not sure", "choice", None),
        (r"\boxed{42}", "choice", None),
        ("<answer> 4 </answer> no <answer>5</answer>", "tag", "5"),
        ("<answer>5", "tag", None),
        ("</answer>5<answer>", "tag", None),
        ("<answer></answer>", "tag", None),
        (r"\boxed{1} then \boxed{\frac{1}{2}}.", "boxed", r"\frac{1}{2}"),
        (r"\boxed{1", "boxed", None),
        (r"\boxed{1} then \fbox{2}", "boxed", "2"),  # MATH's own code reads both
        ("so\n#### \u22125", "number", "\u22125"),  # a typographic minus
        (r"x = \boxed{3} <answer>4</answer>", "auto", "3"),
        ("<answer>4</answer> 5", "auto", "4"),
        ("12 + 30 = 42\n#### 42\n", "auto", "42"),
        ("Hence the answer is: 7.", "auto", "7."),
        ("**Answer:** 7", "auto", "7"),
        ("3 + 4 =\n7", "auto", "7"),
        ("", "auto", None),
        ("   \n\t", "auto", None),
        ("the answer is", "auto", "the answer is"),
        ("İ" * 3 + "answer: 7", "auto", "İ" * 3 + "answer: 7"),  # lower case is longer here: offsets would be wrong
    ],
)
def test_extraction_table(text, how, expected):
    assert extract(text, how) == expected


@pytest.mark.parametrize(
    ("given_text", "expected", "equal"),
    [
        ("42", "42", True),
        ("42.0", "42", True),
        ("42.", "42", True),
        ("1,234", "1234", True),
        ("$5.50", "5.5", True),
        ("1/2", "0.5", True),
        ("-3", "3", False),
        ("\u22123", "-3", True),  # a typographic minus
        ("12%", "12", True),
        ("  Yes ", "yes", True),
        ('"yes"', "yes", True),
        ("a  b", "a b", True),
        ("42 apples", "42", True),
        ("1,234.5 km per hour.", "1234.5", True),
        ("$18 a day", "18", True),
        ("42 apples", "42 pears", False),
        ("42 thousand", "42", False),
        ("42 or more", "42", False),
        ("42 apples and 3 pears", "42", False),
        ("less than 42", "42", False),
        ("4 2", "42", False),
        ("1e2", "100", False),  # no exponents: see number()
        ("1/0", "1/0", True),
        ("1/0", "0", False),
        ("", "0", False),
        ("nan", "0", False),
        ("AbC", "abc", True),
        ("٤", "4", False),  # digits of another script are text
    ],
)
def test_comparison_table(given_text, expected, equal):
    assert same(given_text, expected) is equal


UNITS = """apples|dollars|hours|seconds|minutes|months|points|percent|square meters|cubic feet|meters squared
km per hour|cents each|K|m|Dollars a Day|sixth graders|canteens|degrees|parties|pairwise products|people total"""
OTHER_VALUES = """thirds|third|third of it|halves|half cups|quarters|fifths|twentieths|thousandths|hundredth|squared
Cubed meters|factorial|point five|point one|k|bn|Millions|millionths|dozens|pairs|pi|x|i|negative|degrees below zero
wrong|is not right|incorrect|hours twenty minutes|but maybe four|doubled"""


@pytest.mark.parametrize("unit", UNITS.replace("\n", "|").split("|"))
def test_a_unit_behind_a_number_leaves_it(unit):
    assert same(f"3 {unit}", "3")
    assert not same(f"3 {unit}", "4")


@pytest.mark.parametrize("words", OTHER_VALUES.replace("\n", "|").split("|"))
def test_a_word_that_makes_another_number_is_no_unit(words):
    assert not same(f"3 {words}", "3")


@given(numerator=st.integers(-(10**12), 10**12), denominator=st.integers(1, 10**6))
def test_a_written_fraction_is_read_exactly(numerator, denominator):
    assert number(f"{numerator}/{denominator}") == Fraction(numerator, denominator)


@pytest.mark.parametrize(
    "text",
    [
        "9" * 100_000,
        "1e999999999",
        "1/" + "0" * 1000,
        "\\boxed{" * 50_000,
        "<answer>" * 50_000,
        "{" * 100_000,
        "answer is " * 20_000,
        "1," * 50_000,
        "-" * 100_000,
        "\x00\ud800",
        "\r" * 100_000,
    ],
    ids=lambda text: repr(text[:12]),
)
def test_hostile_text_is_read_quickly_and_without_error(text):
    start = time.monotonic()
    for how in ("auto", "whole", "last_line", "last_number", "number", "choice", "tag", "boxed"):
        found = extract(text, how)
        if found is not None:
            same(found, "42")
    assert time.monotonic() - start < 20  # milliseconds; what is quadratic in 100,000 characters takes minutes


@given(text=st.text(max_size=200), answer=st.text(max_size=20))
def test_any_text_has_an_answer_or_none(text, answer):
    for how in ("auto", "whole", "last_line", "last_number", "number", "choice", "tag", "boxed"):
        found = extract(text, how)
        assert found is None or (found and found == found.strip())
        assert same(found or "", answer) in (True, False)
