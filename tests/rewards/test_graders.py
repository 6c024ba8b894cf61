# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Real-looking responses get the verdict that a careful person gives, under the rule of each suite."""

import contextlib

import pytest

from qarl_jax.data.suites import REWARDS
from qarl_jax.rewards import Sample, exact, math_verify
from qarl_jax.types import Prompt

# (response, reference): right ones above, wrong ones below.
NUMBER = (
    [
        (r"\boxed{1{,}234}", "1234"),
        (r"\boxed{1\,234}", "1234"),
        ("It is 1\u202f234.", "1234"),
        (r"\boxed{\frac{1}{2}}", "0.5"),
        (r"\boxed{2\frac12}", "2.5"),
        ("He walks 2 1/2 miles.", "2.5"),
        (r"\boxed{- 5}", "-5"),
        ("#### - 5", "-5"),
        ("It is .5", "0.5"),
        ("He owes -$5.", "-5"),
        ("He reads pages 10-12.", "12"),
        (r"\boxed{42 \text{ m}^2}", "42"),
        (r"\boxed {42}", "42"),
        ("The numbers are 1,2,3", "3"),
        ("#### **42**", "42"),
        ("#### 42.", "42"),
        ("#### $1,080 a day", "1080"),
        (r"\boxed{6 \times 7 = 42}", "42"),
        (r"\textbf{Answer: }\boxed{\textbf{(C)}\ 42}", "42"),
    ],
    [
        ("forty-two", "42"),
        (r"\boxed{\text{forty-two}}", "42"),
        (r"\boxed{1,2}", "12"),
        ("42%", "0.42"),
        (r"\boxed{42}, no: \boxed{41}", "42"),
    ],
)
CHOICE = (
    [
        ("(C)", "C"),
        ("C.", "C"),
        ("c", "C"),
        ("(c)", "C"),
        ("The answer is C", "C"),
        ("the answer is c.", "C"),
        ("The answer is a bit tricky. Since 2 > 1, the answer is (C).", "C"),
        ("Answer: a triangle, so C", "C"),
        ("**Answer:** C", "C"),
        ("The answer is: **(C)**", "C"),
        (r"\boxed{c}", "C"),
        (r"\boxed{\text{(c)}}", "C"),
        (r"\boxed{\textbf{(C)}\ 42}", "C"),
        (r"\boxed{\text{C. Vitamin A}}", "C"),
        (r"\boxed{\text{a}}", "A"),
    ],
    [
        (r"\boxed{A, C}", "A"),
        (r"\boxed{\text{A and C}}", "A"),
        (r"\boxed{\text{a triangle}}", "A"),
        (r"\boxed{\text{Calcium}}", "C"),
        ("The answer is Calcium", "C"),
        ("C, or rather D", "C"),
    ],
)
AUTO = (
    [
        ("so\n**42**", "42"),
        ("**The answer is 42**", "42"),
        ("I think the answer is: **B**.", "B"),
        ("**Final Answer**: 42", "42"),
        (r"Final answer: \(42\)", "42"),
        ("Answer: $$x$$", "x"),
        ('Answer: "yes".', "yes"),
        ("Answer: “yes”", "yes"),
        (r"\boxed{\text{Yes}}", "yes"),
        (r"\boxed{\$5}", "5"),
        ("€5", "5"),
        ("<answer>**42**</answer>", "42"),
        (r"\boxed{\dfrac{1}{2}}", "0.5"),
        ("\u20133", "-3"),
        ("Answer: 42 apples", "42"),
    ],
    [
        ("Answer: 42 thousand", "42"),
        ("forty-two", "42"),
        ("1,2", "12"),
        ("4 2", "42"),
        ("4!", "4"),
        ("The answer is 41, not 42", "42"),
        ("__", ""),
    ],
)
MATH = (
    [
        ("<answer>42</answer>", "42"),
        (r"<answer>$\frac{1}{2}$</answer>", "0.5"),
        (r"\boxed {42}", "42"),
        (r"\boxed{1\,234}", "1234"),
        (r"\boxed{1 000 000}", "1000000"),
        (r"\boxed{42\degree}", "42"),
        (r"\boxed{\varnothing}", r"\emptyset"),
        (r"\boxed{0.1\overline{6}}", "1/6"),
        (r"\boxed{\text{2516}_8}", "2516_8"),
        (r"\boxed{\text{18 square units}}", "18"),
        (r"\boxed{5^{\text{th}}}", "5"),
        (r"\boxed{\textbf{(A)}\ 5}", "A"),
        (r"\boxed{(A)\ 5}", "5"),
        (r"\boxed{\text{(A) }\frac{1}{2}}", "0.5"),
        (r"\boxed{\text{Evelyn}}", "Evelyn"),
        (r"\boxed{3\text{ and }5}", "3,5"),
        (r"\boxed{\{2, 1\}}", r"\{1,2\}"),
        (r"\boxed{(-\infty,2)\cup(3,\infty)}", r"(-\infty, 2) \cup (3, \infty)"),
        ("The final answer is: $\\boxed{\n  42\n}$. I hope it is correct.", "42"),
    ],
    [
        (r"\boxed{1,2}", "12"),
        (r"\boxed{5\text{ hours }30\text{ minutes}}", "5"),
        (r"\boxed{\ge 5}", "5"),
        (r"\boxed{1,\ldots,5}", "5"),
        (r"\boxed{5\text{ or }6}", "5"),
        (r"\boxed{4!}", "4"),
        (r"\boxed{(1,2]}", "[1,2)"),
        (r"\boxed{\text{forty-two}}", "42"),
        (r"\boxed{\text{(A) }5}", "B"),
        (r"\boxed{0.333}", r"\frac{1}{3}"),
    ],
)


@pytest.fixture(scope="module")
def rewards():
    auto = exact.Config()
    number, choice = (exact.Config(extract=REWARDS[rule]["extract"]) for rule in ("number", "choice"))
    made = {name: exact.Reward(cfg, 64) for name, cfg in (("auto", auto), ("number", number), ("choice", choice))}
    with contextlib.closing(math_verify.Reward(math_verify.Config(workers=1, timeout_s=60.0), 64)) as math:
        yield made | {"math": math}


@pytest.mark.parametrize(
    ("rule", "right"), [("number", NUMBER[0]), ("choice", CHOICE[0]), ("auto", AUTO[0]), ("math", MATH[0])]
)
def test_a_right_answer_gets_one(rewards, rule, right):
    assert {pair: score for pair, score in graded(rewards[rule], right) if score != 1} == {}


@pytest.mark.parametrize(
    ("rule", "wrong"), [("number", NUMBER[1]), ("choice", CHOICE[1]), ("auto", AUTO[1]), ("math", MATH[1])]
)
def test_a_wrong_answer_gets_nothing(rewards, rule, wrong):
    assert {pair: score for pair, score in graded(rewards[rule], wrong) if score != 0} == {}


def graded(reward, pairs):
    def sample(text, answer):
        return Sample(prompt=Prompt(uid="p", tokens=(1,), text="", answer=answer, meta={}), text=text, num_tokens=9)

    return zip(pairs, reward.score([sample(*pair) for pair in pairs]).tolist(), strict=True)


# ---- the errors that two benchmarks' judges allow --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tolerance", "given", "expected", "error", "right"),
    [
        ("none", "4.5001", "4.5", "", False),
        ("minerva", "4.5004", "4.5", "", True),  # 9e-5 of it
        ("minerva", "4.5006", "4.5", "", False),
        ("minerva", "4.5001e33", "4.5 \\times 10^{33}", "", True),
        ("minerva", "0.5", "50", "", True),  # as a percentage
        ("minerva", "500", "50", "", False),
        ("minerva", "4,5", "4.5", "", False),
        ("olympiadbench", "3.1", "3.0", "1e-1", True),
        ("olympiadbench", "3.2", "3.0", "1e-1", False),
        ("olympiadbench", "3.00001", "3", "", False),  # 1e-8 where a row says nothing
        ("olympiadbench", "5.2, 2.05", "2, 5", "1e-1,3e-1", True),  # each with an error of its own, in any order
        ("olympiadbench", "2.2, 5", "2, 5", "1e-1,3e-1", False),
        ("olympiadbench", "2, 5, 7", "2, 5", "1", False),
        ("olympiadbench", "1,000", "1000", "", True),
    ],
)
def test_a_benchmarks_judge_allows_its_own_error(tolerance, given, expected, error, right):
    config = math_verify.Config(workers=1, timeout_s=60.0, tolerance=tolerance)
    with contextlib.closing(math_verify.Reward(config, 64)) as reward:
        prompt = Prompt(uid="p", tokens=(1,), text="", answer=expected, meta={"error": error} if error else {})
        allowed = reward._allowed(Sample(prompt=prompt, text="", num_tokens=1))
    exact_already = math_verify.settled(given, expected)
    assert bool(exact_already or (allowed and math_verify.near(given, expected, allowed))) is right


@pytest.mark.slow
def test_expressions_are_near_where_a_judge_evaluates_them():
    for tolerance, given, right in (
        ("olympiadbench", "4.24", 1.0),
        ("olympiadbench", "4.3", 0.0),
        ("none", "4.24", 0.0),
    ):
        config = math_verify.Config(workers=1, timeout_s=60.0, tolerance=tolerance)
        prompt = Prompt(uid="p", tokens=(1,), text="", answer="3\\sqrt{2}", meta={"error": "1e-2"})
        with contextlib.closing(math_verify.Reward(config, 64)) as reward:
            (found,) = reward.score([Sample(prompt=prompt, text=f"\\boxed{{{given}}}", num_tokens=1)])
        assert found == right, (tolerance, given)
