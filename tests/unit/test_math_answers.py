"""Answers of mathematics as MATH and its kin write them: which are the same, and which only look so."""

from __future__ import annotations

import pytest

from open_instruct.verifiers.math_answers import MAX_CHARACTERS, are_equal

SAME = [
    ("(0,1)", "(0, 1)"),
    (r"\{1,2\}", r"\{2,1\}"),
    ("[0,1]", "[0, 1]"),
    (r"(-\infty, 0.5)", r"(-\infty, \frac{1}{2})"),
    ("(0,100)", "(0, 100)"),
    (r"2\frac{1}{2}", "5/2"),
    (r"2\frac12", "2.5"),
    ("2 1/2", r"\frac52"),
    (r"-1\frac{1}{3}", "-4/3"),
    (r"\frac{1}2", "0.5"),
    (r"-\frac{1}{2}", r"\frac{-1}{2}"),
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"),
    (r"\sqrt[3]{8}", "2"),
    ("0.3", r"\frac{3}{10}"),
    (r"x\frac{1}{2}", "x/2"),
    (r"5\text{ cm}^2", "5"),
    ("5 cm", "5"),
    ("10 square units", "10"),
    (r"90^\circ", "90"),
    (r"90\degree", "90"),
    ("90 degrees", "90"),
    (r"50\%", "50"),
    ("50%", "50 percent"),
    (r"\$5.00", "5"),
    (r"5 \mathrm{~cm}", "5"),
    (r"\text{Even}", "even"),
    (r"\text{(A)}", "A"),
    (r"\textbf{(B)}", r"\text{B}"),
    ("(C)", "C"),
    ("1,2", "2, 1"),
    ("1 and 2", "1, 2"),
    (r"1\text{ or }2", "1,2"),
    (r"\pm 2", "2,-2"),
    (r"1 \pm \sqrt{2}", r"1+\sqrt{2}, 1-\sqrt{2}"),
    (r"x = \pm 3", r"\pm 3"),
    (r"\{\pm 1\}", "1,-1"),
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    (r"\begin{pmatrix} 1/2 \\ 3 \end{pmatrix}", r"\begin{bmatrix}\frac{1}{2}\\ 3\end{bmatrix}"),
    (r"x \le 3", "x<=3"),
    (r"3 \geq x", r"x \leq 3"),
    (r"1 < x < \frac{3}{2}", "1.5 > x > 1"),
    (r"x \in [0, 1]", "[0,1]"),
    (r"(-\infty,2)\cup(3,\infty)", r"(3,\infty) \cup (-\infty,2)"),
    ("y = 2x + 3", "y=3+2x"),
    ("f(x) = 2x", "2x"),
    ("x^2+y^2=1", "y^2+x^2=1"),
    ("1,000", "1000"),
    ("1,234,567", "1234567"),
    ("1{,}000", "1000"),
    ("05", "5"),
    ("1011_2", "1011_{2}"),
    ("3:2", "3 : 2"),
    ("e^{2}", "e^2"),
    ("3+4i", "4i + 3"),
    (r"10\pi \text{ cm}", r"10\pi"),
    ("2pi", r"2\pi"),
    (r"\frac{1}{2}x", "x/2"),
    (r"\infty", r"\infty"),
    (r"\mathbb{R}", r"\mathbb{R}"),
    ("6 or 7", "6, 7"),
    ("2xy", "2yx"),
    ("3ab+b^2", "b^2+3ba"),
    ("5cm", "5"),
    ("60 mph", "60"),
    ("xy^2", "y^2 x"),
    ("6 in", "6"),
    ("2 sin(x)", r"2\sin(x)"),
    ("x = 5 or x = -3", "-3,5"),
    ("f(1,2)", "f(1, 2)"),
    ("(", "("),
    ("1,000,000", "10^6"),
    (r"\text{Alice and Bob}", r"\text{Alice} and \text{Bob}"),
    (r"4\frac{3}{4} \text{ inches}", "19/4"),
    (r"3\frac{x}{2}", r"\frac{3x}{2}"),
    (r"x^2\frac{1}{2}", r"\frac{x^2}{2}"),
    (r"\frac{3}{4}\text{ of the cake}", "0.75"),
    (r"10:30 \text{ a.m.}", "10:30"),
    (r"-\frac12", "-0.5"),
    ("2,3,5", "5,3,2"),
    (r"(2,\infty)", r"(2, \infty)"),
    (r"\left[\frac12,1\right)", "[0.5,1)"),
    (r"a \pm b", "a-b, a+b"),
    ("x=5 cm", "5"),
    ("2^{10}", "1024"),
    (r"(3, \frac{\pi}{2})", r"\left( 3, \frac{\pi}{2} \right)"),
    ("(1,2),(3,4)", "(3,4),(1,2)"),
    (r"\frac{a}{b}", "a/b"),
]
DIFFERENT = [
    ("[0,1]", "(0,1)"),
    ("[0,1)", "(0,1]"),
    ("[0,100]", "[0100]"),
    (r"\{1,2\}", "(1,2)"),
    (r"\{1,2\}", r"\{1,2,3\}"),
    (r"2\frac{1}{2}", "1"),
    (r"25\text{ cm}^2", "625"),
    ("Monday", "Tuesday"),
    ("a", "A"),
    (r"\text{odd}", "even"),
    (r"1\text{ or }2", "12"),
    (r"\pm 2", "2"),
    ("1,1", "1,2"),
    (r"\begin{pmatrix} 1 \\ 3 \end{pmatrix}", r"\begin{pmatrix} 1 & 3 \end{pmatrix}"),
    (r"\begin{pmatrix} 1 \\ 3 \end{pmatrix}", r"\begin{pmatrix} 3 \\ 1 \end{pmatrix}"),
    ("x<3", r"x \le 3"),
    (r"(-\infty,2)\cup(3,\infty)", r"(-\infty,2]\cup(3,\infty)"),
    ("3:2", "2:3"),
    ("2xy", "2"),
    ("2xyz", "2"),
    ("no", "on"),
    ("5 mod 7", "5"),
    (r"2\sin(x)", "2"),
    ("3x", "3"),
    ("x=2,y=3", "x=3,y=2"),
    (r"\{5\}", "6"),
    (r"\pm", "-"),
    ("(1,2]", "(1,2)"),
    ("1/3", "0.333"),
    (r"(2,\infty)", r"[2,\infty)"),
    ("z^2=4", "4=z^2"),
    ("12!", "12"),
    ("(1,2),(3,4)", "(1,2),(4,3)"),
    ("no solution", "none"),
    ("[1,2]", "[1,2],[3,4]"),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_the_same_answer_written_in_two_ways(one: str, other: str) -> None:
    assert are_equal(one, other)
    assert are_equal(other, one)


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_different_answers(one: str, other: str) -> None:
    assert not are_equal(one, other)
    assert not are_equal(other, one)


@pytest.mark.parametrize("text", ["", " ", "$$"])
def test_nothing_is_no_answer(text: str) -> None:
    assert not are_equal(text, text)


def test_long_answers_are_compared_as_text() -> None:
    terms = " + ".join(["x"] * MAX_CHARACTERS)
    assert are_equal(terms, terms.replace(" + ", "  +  "))
    assert not are_equal(terms, f"{MAX_CHARACTERS}x")
