r"""The comparisons of Trinity-RFT's math rewards, with the same results: for users who move a task to this system.

Trinity-RFT has several rules, and each of its rewards and workflows uses its own rule:

* ``parsed``: math-verify reads both texts in full; ``marked``: it reads only marked formulas, a box first.
* ``boxed``: the last ``\boxed{}`` is compared as text, after the normalisation of Qwen2.5-Math.
* ``qwen``: an answer is extracted and compared as in the evaluation of Qwen2.5-Math: numbers to 4 digits (also as
  percentages), intervals and matrices by element, else by sympy.
* ``dapo``: the comparisons of OpenAI's prm800k and of PRIME; ``graded``: of prm800k alone, for an extracted answer.

The code runs in the child process of :class:`trinity_mq.rewards.math.answers.AnswerComparer`, which bounds its time and
memory. :class:`trinity_mq.rewards.trinity_rewards.MathBoxedRewardFn` runs the rule ``boxed`` in its own process. The
code imports no torch. sympy evaluates text as Python, so :func:`_is_formula` lets only text pass that has no
attributes, no quotes and no names of functions other than mathematical functions.

Sources of the rules, which were used as descriptions of results: Trinity-RFT 0.6.0 (Apache-2.0),
https://github.com/QwenLM/Qwen2.5-Math, https://github.com/openai/prm800k, verl's ``prime_math``.
"""

from __future__ import annotations

import builtins
import contextlib
import keyword
import re
from collections.abc import Callable, Iterator
from math import isclose
from typing import Any, Literal, NamedTuple

LONGEST_ANSWER = 2000
"""Maximum characters of an extracted answer that is compared by a rule; a longer answer is wrong."""
SHOWN_UNBOXED = 20
"""Maximum characters of a response without a box that the rule ``dapo`` compares. A longer text is cut and marked as
cut.
"""


class RuleResult(NamedTuple):
    """The result of a rule."""

    right: bool
    answer: str | None = None
    """The extracted answer; for ``graded`` its normal form. None: the rule extracts no text, or found no answer."""


# -- units and words, as data


def _listed(text: str, mark: str = " ") -> list[str]:
    return text.split(mark)


UNITS = _listed(
    "east|degree|mph|kmph|ft|m sqaure| m east|sq m|deg|mile|q .|monkey|prime|ratio|profit of rs|rd|o|gm|p . m|lb|"
    "tile|per|dm|lt|gain|ab|way|west|a .|b .|c .|d .|e .|f .|g .|h .|t|a|h|no change|men|soldier|pie|bc|excess|st|"
    "inches|noon|percent|by|gal|kmh|c|acre|rise|a . m|th|\u03c0 r 2|sq|mark|l|toy|coin|sq . m|gallon|\xb0 f|profit|"
    "minw|yr|women|feet|am|pm|hr|cu cm|square|v \xe2 \u20ac \u2122|are|rupee|rounds|cubic|cc|mtr|s|ohm|number|kmph|"
    "day|hour|minute|min|second|man|woman|sec|cube|mt|sq inch|mp|\u220f cm \xb3|hectare|more|sec|unit|cu . m|cm 2|"
    "rs .|rs|kg|g|month|km|m|cm|mm|apple|liter|loss|yard|pure|year|increase|decrease|d|less|Surface|litre|pi sq m|"
    "s .|metre|meter|inch",
    "|",
)
"""Words that Qwen2.5-Math (Apache-2.0) removes from an answer, in its order. They are patterns: a dot matches any
character.
"""

_UNIT_PATTERNS = [
    re.compile(rf"(^|\W){unit}($|\W)") for unit in [*UNITS, *(f"{unit}s" for unit in UNITS if unit[-1] != "s")]
]
_SMALL = _listed(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
)
_TENS = _listed("twenty thirty forty fifty sixty seventy eighty ninety")
_SCALES = {"billion": 10**9, "million": 10**6, "thousand": 10**3}
_WORDS = {
    **{word: number for number, word in enumerate(_SMALL)},
    **{word: 10 * number for number, word in enumerate(_TENS, 2)},
    "hundred": 100,
    **_SCALES,
}
_POINT = "point"


def number_in_words(text: str) -> int | float:
    """Return the number that a text states in English words, as the package ``word2number`` 1.1 reads it.

    Words that are not parts of numbers are ignored, so "two red apples" is 2. Digits are read only if they are all of
    the text.

    Raises:
        ValueError: The text has no number, or its parts have the wrong order.
        LookupError: A part of the number is missing, such as the factor of "thousand".

    >>> number_in_words("three hundred and five"), number_in_words("two point five")
    (305, 2.5)
    """
    text = text.replace("-", " ").lower()
    if text.isdigit():
        return int(text)
    words = [word for word in text.split() if word in _WORDS or word == _POINT]
    if not words:
        raise ValueError("no number words")
    if any(words.count(word) > 1 for word in (*_SCALES, _POINT)):
        raise ValueError("a scale occurs twice")
    whole, fraction = words, list[str]()
    if _POINT in words:
        place = words.index(_POINT)
        whole, fraction = words[:place], words[place + 1 :]
    return _whole_number(whole) + _fraction(fraction)


def _whole_number(words: list[str]) -> int:
    places = [words.index(scale) if scale in words else -1 for scale in _SCALES]
    billion, million, thousand = places
    if (thousand > -1 and (thousand < million or thousand < billion)) or -1 < million < billion:
        raise ValueError("the scales are out of order")
    if len(words) < 2:
        return _WORDS[words[0]] if words else 0
    total, start = 0, 0
    for place, scale in zip(places, _SCALES.values(), strict=True):
        if place > -1:
            total += _small_number(words[start:place]) * scale
            start = place + 1
    if start == 0:
        return _small_number(words)
    # word2number adds the words after the last scale that does not end the number, even if they hold a scale
    rests = (words[place + 1 :] for place in (thousand, million, billion) if place > -1)
    rest = next(filter(None, rests), None)
    return total + (_small_number(rest) if rest else 0)


def _small_number(words: list[str]) -> int:
    """Return the number below a thousand that up to four words form."""
    numbers = [_WORDS[word] for word in words]
    match numbers:
        case [first, second, third, fourth]:
            return first * second + third + fourth
        case [first, second, third]:
            return first * second + third
        case [first, second]:
            return first * second if 100 in numbers else first + second
    return numbers[0]


def _fraction(words: list[str]) -> float:
    if not words or any(word not in _SMALL[:10] for word in words):
        return 0
    return float("0." + "".join(str(_WORDS[word]) for word in words))


# -- the normalisation of Qwen2.5-Math

_LAYOUT = (
    ("\\!", ""), ("\\$", ""), ("$", ""), ("%", ""),
    (re.compile(r"\\begin\{array\}\{.*?\}"), "\\\\begin{pmatrix}"), ("\\end{array}", "\\end{pmatrix}"),
    ("bmatrix", "pmatrix"), ("tfrac", "frac"), ("dfrac", "frac"), ("\\neq", "\\ne"), ("\\leq", "\\le"),
    ("\\geq", "\\ge"), ("\\left", ""), ("\\right", ""), ("\\{", "{"), ("\\}", "}"), (re.compile(r"\\mbox{.*?}"), ""),
    ("\\mathbf", ""), ("^{\\circ}", ""), ("^\\circ", ""), (re.compile(r"\\text\{(.*?)\}"), r"\1"),
)  # fmt: skip
"""Replacements before units are removed, in order."""
_NUMBERS = (
    (re.compile(r"^[a-zA-Z]\s*=\s*"), ""), ("infinity", "\\infty"), ("inf", "\\infty"),
    (re.compile(r"(\d+)\.0+([^\d]|$)"), r"\1\2"), (" .", " 0."), ("{.", "{0."),
)  # fmt: skip
"""Replacements after number words have become digits, in order."""
_ROOT = re.compile(r"\\sqrt\s*(\w+)")


def _replaced(text: str, replacements: tuple[tuple[str | re.Pattern[str], str], ...]) -> str:
    for old, new in replacements:
        text = text.replace(old, new) if isinstance(old, str) else old.sub(new, text)
    return text


def normalised(answer: str | None) -> str | None:
    """Return the normal form of an answer for Qwen2.5-Math's comparison; None if nothing remains.

    Raises:
        LookupError: The words of a number do not form a number.
    """
    if answer is None:
        return None
    text = _replaced(answer.strip().replace("\n", "").rstrip("."), _LAYOUT)
    for pattern in (*_UNIT_PATTERNS, *_UNIT_PATTERNS):
        text = pattern.sub(r"\1\2", text) or text
    with contextlib.suppress(ValueError):
        text = str(number_in_words(text))
    text = _replaced(text, _NUMBERS)
    text = f"0{text}" if text.startswith(".") else text
    text = _ROOT.sub(r"\\sqrt{\1}", text.replace(" ", ""))
    text = _slash_to_fraction(fix_fracs(text), roots=True)
    if text[:1] + text[-1:] in {"{}", "()"}:
        text = text[1:-1]
    return text.strip() or None if text else None


def fix_fracs(text: str) -> str:
    r"""Return ``text`` with the arguments of ``\frac`` in braces: ``\frac12`` becomes ``\frac{1}{2}``."""
    first, *parts = text.split("\\frac")
    result = first
    for part in parts:
        if part.startswith("{"):
            result += f"\\frac{part}"
        elif len(part) < 2:
            return text
        else:
            second = part[1] if part[1] == "{" else f"{{{part[1]}}}"
            result += f"\\frac{{{part[0]}}}{second}{part[2:]}"
    return result


def _slash_to_fraction(text: str, *, roots: bool) -> str:
    r"""Return ``\frac{a}{b}`` for ``a/b`` of two whole numbers, or of roots if ``roots``; other texts are unchanged."""
    parts = text.split("/")
    if len(parts) != 2:
        return text
    try:
        top, bottom = (part if roots and "sqrt" in part else str(int(part)) for part in parts)
    except ValueError:
        return text
    return f"\\frac{{{top}}}{{{bottom}}}" if text == f"{top}/{bottom}" else text


# -- the rule "boxed"


def boxed_equal(response: str, truth: str) -> RuleResult:
    r"""Return whether the content of the last ``\boxed{}`` has the same normal form as ``truth``, which may itself have
    a box.
    """
    _, answer = _boxed_text(response)
    if answer is None:
        return RuleResult(False)
    is_boxed, wanted = _boxed_text(truth)
    wanted = wanted if is_boxed else truth
    if wanted is None or max(len(answer), len(wanted)) > LONGEST_ANSWER:
        return RuleResult(False, answer)
    try:
        return RuleResult(normalised(answer) == normalised(wanted), answer)
    except LookupError:
        return RuleResult(answer == wanted, answer)


def _boxed_text(text: str) -> tuple[bool, str | None]:
    r"""Return whether a text has a box, and the content of the last ``\boxed{...}``, or the text between ``\boxed ``
    and a dollar sign. For a box of another form the content is None.
    """
    if "\\boxed " in text:
        return True, text.rpartition("\\boxed ")[2].partition("$")[0]
    box = _last_box(text)
    return box is not None, box[len("\\boxed{") : -1] if box is not None and box.startswith("\\boxed{") else None


def _last_box(text: str) -> str | None:
    r"""Return the last ``\boxed{...}``, or without a ``\boxed`` the last ``\fbox{...}``."""
    place = text.rfind("\\boxed")
    place = text.rfind("\\fbox") if place < 0 else place
    end = _closing(text, place) if place >= 0 else None
    return None if end is None else text[place : end + 1]


def _closing(text: str, start: int) -> int | None:
    """Return the place of the brace that closes the first brace after ``start``. None: no brace closes it."""
    depth = 0
    for brace in re.finditer(r"[{}]", text[start:]):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0 and brace.group() == "}":
            return start + brace.start()
    return None


# -- the rule "qwen"

_STATED = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (r"(?:final|the)\s+answer\s+is\s*(?::\s*)?(.+)", "\u7b54\u6848\u662f" + r"\s*(?::\s*)?(.+)")
)
_UNBRACED = re.compile(r"\{?([^$}]+)\}?")
_LAST_NUMBER = re.compile(r"[-+]?\d*\.?\d+")


def qwen_answer(text: str) -> str | None:
    r"""Return the answer that a text states: in its last ``boxed``, else after "the answer is", else its last number.

    Raises:
        LookupError: The words of a number do not form a number.
    """
    if "boxed" in text:
        part = text.rpartition("boxed")[2]
        if not part:
            return None
        end = _closing(part, 0) if part[0] == "{" else None
        if end is not None:
            return normalised(part[1:end][: LONGEST_ANSWER + 1])
        if match := _UNBRACED.search(part):
            return normalised(match.group(1)[: LONGEST_ANSWER + 1])
    for pattern in _STATED:
        if match := pattern.search(text):
            stated = normalised(match.group(1)[: LONGEST_ANSWER + 1])
            return stated.removesuffix(".") if stated else stated
    numbers = _LAST_NUMBER.findall(text.replace(",", ""))
    return numbers[-1] if numbers else None


def qwen_equal(response: str, truth: str) -> RuleResult:
    """Return whether two texts state equal answers by the evaluation of Qwen2.5-Math."""
    try:
        answer, wanted = qwen_answer(response), qwen_answer(truth)
    except LookupError:
        return RuleResult(False)
    if answer is None or wanted is None or len(answer) > LONGEST_ANSWER:
        return RuleResult(False, answer)
    return RuleResult(_qwen_same(answer, wanted), answer)


def _qwen_same(answer: str, wanted: str) -> bool:
    if answer == wanted:
        return True
    if (are_near := _are_near(answer, wanted)) is not None:
        return are_near
    if _is_bracketed(answer) and _is_bracketed(wanted):
        parts, wanted_parts = answer[1:-1].split(","), wanted[1:-1].split(",")
        if len(parts) == len(wanted_parts) and all(map(_qwen_same_stripped, parts, wanted_parts)):
            return True
    if answer.startswith(_MATRIX) and wanted.startswith(_MATRIX) and _same_matrix(answer, wanted):
        return True
    sides = [text.split("=") for text in (answer, wanted)]
    match sides:
        case [[left, right], [left_wanted, right_wanted]]:
            pair = (f"({left.strip()})-({right.strip()})", f"({left_wanted.strip()})-({right_wanted.strip()})")
            if _same_by_sympy(*pair, "sympify"):
                return True
        case [[name, value], [_]] if len(name.strip()) <= 2:
            if _qwen_same(value.strip(), wanted):
                return True
        case [[_], [name, value]] if len(name.strip()) <= 2:
            if _qwen_same(answer, value.strip()):
                return True
    return _same_by_sympy(answer, wanted, "sympify")


def _qwen_same_stripped(answer: str, wanted: str) -> bool:
    return _qwen_same(answer.strip(), wanted.strip())


_MATRIX, _MATRIX_END = "\\begin{pmatrix}", "\\end{pmatrix}"


def _are_near(answer: str, wanted: str) -> bool | None:
    """Return whether two numbers agree to 4 digits; also if one of them is a percentage. None: not two numbers."""
    try:
        number, target = float(answer.replace(",", "")), float(wanted.replace(",", ""))
    except ValueError:
        return None
    return any(isclose(value, number, rel_tol=1e-4) for value in (target, target / 100, target * 100))


def _is_bracketed(text: str) -> bool:
    return text.startswith(("(", "[")) and text.endswith((")", "]"))


def _same_matrix(answer: str, wanted: str) -> bool:
    rows, wanted_rows = (text[len(_MATRIX) : -len(_MATRIX_END)].split("\\\\") for text in (answer, wanted))
    same_shape = len(rows) == len(wanted_rows) and rows[0].count("&") == wanted_rows[0].count("&")
    return same_shape and all(
        all(map(_qwen_same_stripped, row.split("&"), wanted_row.split("&")))
        for row, wanted_row in zip(rows, wanted_rows, strict=True)
    )


# -- sympy

_FUNCTIONS = frozenset(
    _listed(
        "sqrt cbrt root sin cos tan cot sec csc asin acos atan acot asec acsc atan2 sinh cosh tanh exp log ln Abs abs "
        "sign floor ceiling factorial binomial gcd lcm Max Min max min Rational Integer Float pi oo re im conjugate "
        "gamma"
    )
)
"""Names of sympy, of more than one letter, that an answer may use."""
_NAME = re.compile(r"[^\W\d]\w*")
_FOREIGN = re.compile(r"""["'`;@\\#$?]|\.\s*[^\W\d]|__""")
"""Text that is not a part of formulas: quotes, statements, attributes."""


def _is_formula(text: str) -> bool:
    """Return whether sympy may evaluate the text: it uses symbols and mathematical functions alone."""
    import sympy

    if _FOREIGN.search(text):
        return False
    names = {name for name in _NAME.findall(text) if len(name) > 1}
    return all(
        name in _FUNCTIONS or not (hasattr(sympy, name) or hasattr(builtins, name) or keyword.iskeyword(name))
        for name in names
    )


def _same_by_sympy(first: str, second: str, parser: Literal["sympify", "parse_expr"]) -> bool:
    """Return whether two formulas are equal expressions, or have nearly equal values, as sympy's function ``parser``
    reads them.
    """
    import sympy

    if not (_is_formula(first) and _is_formula(second)):
        return False
    try:
        left, right = map(getattr(sympy, parser), (first, second))
    except Exception:  # sympy's parsers raise many kinds of errors for other text
        return False
    checks: tuple[Callable[[], Any], ...] = (
        lambda: left == right,
        lambda: sympy.simplify(left - right) == 0,
        lambda: isclose(float(sympy.N(right)), float(sympy.N(left)), rel_tol=1e-4),
    )
    return any(_holds(check) for check in checks)


def _holds(check: Callable[[], Any]) -> bool:
    try:
        return bool(check())
    except Exception:  # an operation that two objects of sympy do not have
        return False


# -- the rule "dapo"

_MATHD = (
    ("\n", ""), ("\\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac"), ("\\left", ""), ("\\right", ""),
    ("^{\\circ}", ""), ("^\\circ", ""), ("\\$", ""),
)  # fmt: skip
_MULTIPLES = (("million", "*10^6"), ("billion", "*10^9"), ("trillion", "*10^12"))
_DAPO_UNITS = tuple(
    (re.compile(rf"{unit}(es)?(s)? *(\^[0-9]+)?"), "")
    for unit in _listed(
        "degree cm centimeter meter mile second minute hour day week month year foot feet inch yard liter"
    )
)
_DAPO: tuple[tuple[str | re.Pattern[str], str], ...] = (
    ("\\%", "%"), ("\\$", "$"), ("$", ""), ("%", ""), (" or ", " , "), (" and ", " , "), *_MULTIPLES, *_DAPO_UNITS,
    (re.compile("\\^ *\\\\circ"), ""),
)  # fmt: skip
_TEXT = re.compile(r"^\\text\{(?P<text>.+?)\}$")
_THOUSANDS = re.compile(r"(\d),(?=\d\d\d($|\D))")
_SYMBOLS = {
    "pi": "pi", "infty": "inf", "cup": "U", "cdot": "*", "times": "*", "le": "\u2264", "leq": "\u2264", "ge": "\u2265",
    "geq": "\u2265", "ne": "\u2260", "neq": "\u2260", "alpha": "\u03b1", "beta": "\u03b2", "theta": "\u03b8",
    "pm": "\u00b1", "in": "\u2208", "cap": "\u2229", "circ": "\u2218", "quad": "  ", "ldots": "\u2026",
}  # fmt: skip
"""Commands of LaTeX and the text that stands for them in a comparison."""
_FRACTION = re.compile(r"^-?[0-9]+.?/0*[1-9][0-9]*.?$")
_HARD = re.compile(r"\^\{|\^\(|\^[0-9]+\^|\^[0-9][0-9]+")
"""Powers that the rule does not pass to sympy."""
_COMMAND = re.compile(r"\\([a-zA-Z]+)\s*|\\(.)")


def dapo_equal(response: str, truth: str) -> RuleResult:
    r"""Return whether the last box after ``</think>``, or without a box the text there, equals ``truth``."""
    is_boxed, answer = match_answer(response)
    if not is_boxed and len(answer) > SHOWN_UNBOXED:
        answer = f"{answer[:SHOWN_UNBOXED]}(... output is truncated.)"
    if len(answer) > LONGEST_ANSWER:
        return RuleResult(False, answer[:LONGEST_ANSWER])
    right = _mathd(answer) == _mathd(truth) or _graded(answer, truth)
    if not right and "\\pi" not in answer and "\\pi" not in truth:
        try:
            right = _prime_same(answer, truth)
        except (ValueError, LookupError, OverflowError):
            right = False
    return RuleResult(right, answer)


def match_answer(response: str) -> tuple[bool, str]:
    r"""Return whether a box follows the last ``</think>``, and the box's content, or without a box the text there."""
    text = response.rpartition("</think>")[2]
    box = _last_box(text)
    content = "" if box is None else box[box.find("{") + 1 : -1].strip()
    return bool(content), content or text


def graded(answer: str, truth: str) -> RuleResult:
    """Return whether an extracted answer equals ``truth`` by prm800k's comparisons, and the answer's normal form."""
    if len(answer) > LONGEST_ANSWER:
        return RuleResult(False, answer[:LONGEST_ANSWER])
    if (normal := _mathd(answer)) == _mathd(truth):
        return RuleResult(True, normal)
    return RuleResult(_graded(answer, truth), _dapo_form(answer))


def _mathd(answer: str) -> str:
    """Return ``answer`` in the normal form that prm800k's grader compares first."""
    original = answer.strip()
    if match := _TEXT.search(original):
        original = match["text"].strip()
    text = _replaced(original, _MATHD)
    try:
        text = remove_right_units(text)
    except ValueError:
        return original
    text = _replaced(text, (("\\\\%", ""), ("\\%", ""), (" .", " 0."), ("{.", "{0.")))
    text = f"0{text}" if text.startswith(".") else text
    sides = text.split("=")
    text = sides[1] if len(sides) == 2 and len(sides[0]) <= 2 else text
    first, *roots = text.split("\\sqrt")
    if not all(roots):
        return original
    text = first + "".join(f"\\sqrt{root}" if root[0] == "{" else f"\\sqrt{{{root[0]}}}{root[1:]}" for root in roots)
    text = text.replace(" ", "")
    if "" in text.split("\\frac")[1:]:
        return original
    text = fix_fracs(text)
    return _slash_to_fraction("\\frac{1}{2}" if text == "0.5" else text, roots=False)


def remove_right_units(text: str) -> str:
    r"""Return the text before its unit, a ``\text{ ...}``.

    Raises:
        ValueError: The text has several units.
    """
    first, *units = text.split("\\text{ ")
    if len(units) > 1:
        raise ValueError("two units")
    return first


def _graded(answer: str, truth: str) -> bool:
    answered, wanted = _dapo_form(answer), _dapo_form(truth)
    if answered == wanted:
        return True
    if not answered:
        return False
    parts, wanted_parts = _tuple_parts(answered), _tuple_parts(wanted)
    if len(wanted_parts) > 1 and (wanted[0] != answered[0] or wanted[-1] != answered[-1]):
        return False
    return len(parts) == len(wanted_parts) and all(map(_same_element, parts, wanted_parts))


def _same_element(answered: str, wanted: str) -> bool:
    if _FRACTION.search(wanted) and _FRACTION.search(answered):
        return wanted == answered  # a fraction must be reduced as in the truth
    if _is_whole(wanted) != _is_whole(answered):
        return False
    difference = f"({wanted})-({answered})"
    letters = {letter for letter in difference.replace("sqrt", "").replace("frac", "") if letter.isalpha()}
    return len(letters) <= 2 and not _HARD.search(difference) and _is_zero(difference)


def _is_zero(difference: str) -> bool:
    import sympy
    from sympy.parsing import sympy_parser

    if not _is_formula(difference):
        return False
    transformations = (*sympy_parser.standard_transformations, sympy_parser.implicit_multiplication_application)
    text = difference.replace("^", "**")
    return _holds(lambda: sympy.simplify(sympy_parser.parse_expr(text, transformations=transformations)) == 0)


def _dapo_form(answer: str) -> str:
    """Return ``answer`` in the normal form that prm800k's grader compares second."""
    text = answer
    if match := _TEXT.search(text):
        text = match["text"]
    text = _replaced(text, _DAPO)
    if text[:1] + text[-1:] == "{}":
        text = text[1:-1]
    text = re.sub(",\\\\! *", "", text)
    if (number := _whole_number_of(text)) is not None:
        text = str(number)
    if "\\" in text:
        text = _without_commands(text)
    text = re.sub("- *", "-", text)
    text = re.sub("([0-9]) +([0-9])", "\\1+\\2", text).lower()
    return str(int(float(text.replace(",", "")))) if _is_whole(text) else text


def _whole_number_of(text: str) -> int | None:
    """Return the whole number that differs by at most 1e-7 from the number in a text, or None."""
    try:
        number = float(text)
    except ValueError:
        return None
    return round(number) if abs(number) < 1e300 and abs(number - round(number)) <= 1e-7 else None


def _is_whole(text: str) -> bool:
    return _whole_number_of(_THOUSANDS.sub(r"\1", text)) is not None


def _tuple_parts(text: str) -> list[str]:
    text = _THOUSANDS.sub(r"\1", text)
    if len(text) > 2 and text[0] in "()[]" and text[-1] in "()[]" and not re.search(r"[()\[\]]", text[1:-1]):
        return [part.strip() for part in text[1:-1].split(",")]
    return [text] if text else []


def _without_commands(text: str) -> str:
    r"""Return LaTeX as text that sympy reads: ``\frac{1}{2}`` as ``1/2``, ``\sqrt{2}`` as ``sqrt(2)``."""
    text = text.replace("\\tfrac", "\\frac").replace("\\dfrac", "\\frac").replace("\\frac", " \\frac")
    for command, form in (("\\frac", "{}/{}"), ("\\sqrt", "sqrt({})")):
        for _ in range(text.count(command)):
            place = text.rfind(command)
            end, arguments = place + len(command), list[str]()
            for _ in range(form.count("{}")):
                argument, end = _argument(text, end)
                arguments.append(argument)
            text = text[:place] + form.format(*arguments) + text[end:]
    text = _COMMAND.sub(lambda match: _SYMBOLS.get(match[1] or "", "" if match[1] else match[2]), text)
    return re.sub(r"[{}]", "", text).strip()


def _argument(text: str, start: int) -> tuple[str, int]:
    """Return the argument of a command, which is a group in braces or one character, and the place of its end."""
    while start < len(text) and text[start].isspace():
        start += 1
    if text[start : start + 1] == "{" and (end := _closing(text, start)) is not None:
        return text[start + 1 : end], end + 1
    return text[start : start + 1], start + 1


# PRIME's comparison, which is used if prm800k's finds no equality

_INTERVAL = re.compile(r"^Interval(\.Ropen|\.Lopen|\.open|)\((.*)\)$")
_BRACKETS = {"": "[]", ".Ropen": "[)", ".Lopen": "(]", ".open": "()"}
"""Brackets of an interval by the method of sympy's ``Interval`` that makes it."""
_PERCENT = re.compile(r"^\d+(\.\d+)?\\?%$")
_DOLLARS = re.compile(r"\$\d+(\.\d+)?")


def _prime_same(answer: str, truth: str) -> bool:
    """Return whether two answers are equal by PRIME's comparison.

    Raises:
        ValueError, OverflowError: An answer with ``_``, as in ``101_2``, does not begin with a number.
    """
    answered, wanted = _prime_form(answer)[:1000], _prime_form(truth)
    if answered.strip().lower() == wanted.strip().lower() or answered.replace(" ", "") == wanted.replace(" ", ""):
        return True
    if (are_near := _are_near(answered.replace("{,}", ""), wanted.replace("{,}", ""))) is not None:
        return are_near
    if not answered:
        return False
    answered, wanted = answered.strip(), wanted.strip()
    if match := _INTERVAL.match(answered):
        brackets = _BRACKETS[match[1]]
        answered = f"{brackets[0]}{match[2]}{brackets[1]}"
    ends, wanted_ends = answered[:1] + answered[-1:], wanted[:1] + wanted[-1:]
    is_list = (ends == "[]" and wanted_ends[:1] != "(") or (ends == "()" and wanted_ends[:1] != "[")
    forms = [re.sub(r"[{}()]", "", text.strip("[]()") if is_list else text) for text in (answered, wanted)]
    if forms[0] == forms[1]:
        return True
    parts, wanted_parts = answered[1:-1].split(","), wanted[1:-1].split(",")
    same_ends = ends == wanted_ends and ends in _BRACKETS.values()
    if same_ends and len(parts) == len(wanted_parts) and all(map(_prime_same, parts, wanted_parts)):
        return True
    if "," in answered and "," in wanted:
        parts, wanted_parts = ([part.strip() for part in text.split(",")] for text in (answered, wanted))
        if len(parts) == len(wanted_parts):
            return all(map(_prime_same, parts, wanted_parts))
    return _same_by_sympy(answered, wanted, "parse_expr")


def _prime_form(answer: str) -> str:
    if _DOLLARS.match(answer):
        return answer[1:]
    if _PERCENT.match(answer):
        return answer.replace("\\%", "").replace("%", "")
    return str(int(float(answer.partition("_")[0]))) if "_" in answer else answer


# -- the rules of math-verify


def tagged_answers(text: str) -> Iterator[str]:
    """Yield each text between ``<answer>`` and the next ``</answer>`` of the same line, in linear time."""
    for line in text.split("\n") if "</answer>" in text else ():
        yield from tagged_texts(line, "answer")


def tagged_texts(text: str, tag: str) -> Iterator[str]:
    """Yield each text between an opening tag and the next closing tag, in linear time."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    place = text.find(opening)
    while place >= 0 and (end := text.find(closing, place)) >= 0:
        yield text[place + len(opening) : end]
        place = text.find(opening, end)


def parsed_equal(response: str, truth: str) -> RuleResult:
    """Return whether math-verify reads equal answers in two texts. If a line of a text has ``<answer></answer>``, only
    the first such content is read.
    """
    from math_verify import parse, verify

    texts = [next(tagged_answers(text), text) for text in (response, truth)]
    answers = [parse(text, parsing_timeout=None) for text in texts]
    return RuleResult(bool(verify(*answers, timeout_seconds=None)))


def marked_equal(response: str, truth: str) -> RuleResult:
    """Return whether math-verify reads equal answers in the marked formulas of two texts, a box before others. A truth
    without a formula is compared as text.
    """
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    wanted = parse(truth, [LatexExtractionConfig()], extraction_mode="first_match", parsing_timeout=None)
    form = NormalizationConfig(
        nits=False, malformed_operators=False, basic_latex=True, equations=True, boxed="all", units=True
    )
    reader = LatexExtractionConfig(normalization_config=form, boxed_match_priority=0, try_extract_without_anchor=False)
    answer = parse(response, [reader], extraction_mode="first_match", parsing_timeout=None)
    return RuleResult(bool(verify(answer, wanted or truth, timeout_seconds=None)))


RULES: dict[str, Callable[[str, str], RuleResult]] = {
    "boxed": boxed_equal,
    "dapo": dapo_equal,
    "graded": graded,
    "marked": marked_equal,
    "parsed": parsed_equal,
    "qwen": qwen_equal,
}
"""The rules by name; each compares a response with the truth."""
