r"""Reads quantities in prose and LaTeX exactly, by a small grammar.

::

    quantity = side { ("=" | "≈") side }
    side     = [sign] term { ("+" | "-") term }     a value
             | names and groups, as in "x" or "f(3)"
    term     = power { [ "*" | "/" ] power }        without a sign before a group only
    power    = factor [ "^" ["-"] factor ]
    factor   = ( number [proper fraction] | "\frac" group group | group ) { unit }
    number   = digits, in groups of three or not, [ "." digits ] [ "e" [sign] digits ]
    group    = "(" side ")" in any brackets

Words end a quantity. Unicode superscripts, fractions and roots are read as LaTeX. Currency signs, emphasis, spacing
commands and GSM8K's ``<<3*4=12>>`` are ignored, and ``\text{}`` is replaced by its content. An equation has the value
of its last side with a value, and the earlier sides must agree with it. Text that holds numbers and does not fit the
grammar (``x^7``, ``(3, 5)``, ``3\sqrt{2}``, ``10:30``) is a quantity without a value.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

MAX_DIGITS = 100
"""Maximum digits of a number. A longer number is never an answer, and exact arithmetic on it is slow."""
MAX_DEPTH = 30
"""Maximum nesting of brackets."""
MAX_POWER = 4
"""Maximum characters of the power of ten of a number such as ``1e-05``, sign included."""
MAX_BITS = 4000

_UNITS = re.compile(
    r"(?:km|cm|mm|kg|mg|ml|lbs?|oz|ft|yd|mi|mph|kph|hrs?|mins?|secs?|am|pm|st|nd|rd|th|[gmk]b|usd|eur|gbp)[\u00b2\u00b3]?",
    re.IGNORECASE,
)
"""Units that may directly follow a number; other letters there are factors of a product."""
_UNIT_LETTERS = frozenset("mghsLlCFKAVW")
"""Letters that are a unit after a number; inside a formula only after a number and a space."""
_SHORT_WORDS = re.compile(r"an|as|at|by|he|if|in|is|it|me|my|of|on|or|per|so|to|us|we|the|dry", re.IGNORECASE)
"""Letters in a formula that are read as a word and not as a product: words of two letters, and a few others."""
_SIGNS = {
    "\u2212": "-", "\u2013": "-", "\u00d7": "*", "\u00b7": "*", "\u22c5": "*", "\u2219": "*", "\\times": "*",
    "\\cdot": "*", "\u00f7": "/", "\u2044": "/", "\\div": "/", "**": "^",
}  # fmt: skip
_CURRENCY = "$\u20ac\u00a3\u00a5\u20b9"
_COMMA = r"(?:\{,\}|,\\!|\\[,;:\ ]|,|[~\u00a0\u2009\u202f])"
_TOKEN = re.compile(
    rf"""
    (?P<number>(?:\d{{1,3}}(?:{_COMMA}\d{{3}}){{1,12}}(?!{_COMMA}?\d)|\d+)(?:\.\d+)?(?:[eE][-+\u2212]?\d+)?
        |\.\d+(?:[eE][-+\u2212]?\d+)?)
    |(?P<stop>=>|->|\\(?:to|Rightarrow|implies|therefore|because|l?dots)(?![A-Za-z]))
    |(?P<op>\\(?:times|cdot|div)(?![A-Za-z])|\*\*|[-+*/^\u2212\u2013\u00d7\u00b7\u22c5\u2219\u00f7\u2044])
    |(?P<equal>\\(?:approx|simeq)(?![A-Za-z])|\u2248|=(?!>))
    |(?P<unit>\\?%|[\u00b0\u00a2]|\\degree(?![A-Za-z]))
    |(?P<space>[^\S\n]+|\\?[{_CURRENCY}]|[~`]|\\[,;:!\ ()\[\]]|\\(?:displaystyle|q?quad|[bB]igg?)(?![A-Za-z]))
    |(?P<frac>\\[dtc]?frac(?![A-Za-z]))
    |(?P<name>(?:\\[A-Za-z]+|[^\W\d_](?![^\W_]|['\u2019]\w))(?:_\{{[^{{}}]*\}}|_\w+)?|[<>\u221a]|(?<=\d):(?=\d))
    |(?P<word>[^\W\d_][\w'\u2019]*)
    |(?P<open>\\?\{{|[(\[])
    |(?P<close>\\?\}}|[)\]])
    |(?P<comma>[,;]|\\\\)
    |(?P<line>\n)
    |(?P<other>.)
    """,
    re.VERBOSE,
)
_DIGITS = str.maketrans(
    "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207a\u207b"
    "\u2080\u2081\u2082\u2083\u2084\u2085\u2086\u2087\u2088\u2089",
    "0123456789+-0123456789",
)
"""Maps superscript and subscript digits and signs to ASCII."""
_SUPER, _SUB = "[\u2070\u00b9\u00b2\u00b3\u2074-\u2079]+", "[\u2080-\u2089]+"
_UNICODE: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], str]], ...] = (
    # fractions: one half, three quarters written with small digits
    (
        re.compile("[\u00bc-\u00be\u2150-\u215e\u2189]"),
        lambda match: f" {unicodedata.normalize('NFKC', match[0]).replace(chr(0x2044), '/')}",
    ),
    (re.compile(f"({_SUPER})[\u2044/]({_SUB})"), lambda match: f" {match[1]}/{match[2]}".translate(_DIGITS)),
    # powers of numbers, groups and single letters; a power of a longer word is part of a unit
    (
        re.compile(rf"(?<=[\d)\]}}]|(?<![^\W\d_])[^\W\d_])[\u207a\u207b]?{_SUPER}"),
        lambda match: f"^{{{match[0].translate(_DIGITS)}}}",
    ),
    (
        re.compile(r"([\u221a-\u221c])\s?(\d+(?:\.\d+)?|[^\W\d_]|\([^()]*\)|\{[^{}]*\})"),
        lambda match: rf"\sqrt{('', '[3]', '[4]')[ord(match[1]) - 0x221A]}{{{match[2]}}}",
    ),
)
_GROUPED = (
    re.compile(r"(?<![\w.,/])\d{1,3}(?: \d{3}){2,}(?![\w/]| ?\d|,\d| /)"),
    re.compile(r"\A\D*(?<!\w)\d{1,3}(?: \d{3})+(?=(?:\.\d+)?[^\d/]*\Z)"),  # the text holds no other digits
)
"""Numbers with spaces between groups of three digits."""
_GAP = re.compile(r"(?<=\d) (?=\d)")
_CHANGES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"<<[^<>]*>>", ""),  # the calculator marks of GSM8K
        (r"\\(?:left|right)(?![A-Za-z])|\\(?:begin|end)\s?\{(?:align|equation|gather|split)(?:ed)?\*?\}", ""),
        (r"</?[A-Za-z]\w*>|\\hspace\s?\{[^{}]*\}", " "),
        # words in formulas, with the exponent of a unit
        (
            r"\\(?:text\w*|mbox|operatorname|math(?:rm|bf|it|sf|tt)|boldsymbol)\s?\{([^{}]*)\}(?:\s?\^\s?\{?[23]\}?)?",
            r" \1 ",
        ),
        # units with an exponent or a divisor, degrees
        (r"(\d\s*(?:km|cm|mm|ft|in|inches|feet)|\d\s+m)\s?\^\s?\{?[23]\}?", r"\1 "),
        (
            r"(\d(?:\\[,;: ]|\s)*(?:[kc]?m|ft|mi|[km]?g|m?[lL]))\s?/\s?(?:s|hr?|min|sec|k?g|m?[lL])\b(?:\^\{?2\}?)?",
            r"\1 ",
        ),
        (r"\^\s?\{?\s?\\circ\s?\}?", "\u00b0"),
        (r"(?<!\\)\bsqrt\s?\(([^()]*)\)", r"\\sqrt{\1}"),
        # a sign in words; "10 minus 5" is a difference
        (r"\b[Nn]egative\s+(?=[\d.$\\])", "-"),
        (r"((?:\A|[:=({*$,\n]|\b(?:is|are|was|be|equals|of|to|answer))\s*)\b[Mm]inus\s+(?=[\d.$\\])", r"\1-"),
        # emphasis
        (r"(?<![\w*\\)])(\*{1,3}|_{1,3})(?=\S)([^*\n]*?\S)\1(?![\w*(])", r" \2 "),
        # \frac12
        (r"(\\[dtc]?frac)\s*(\d)", r"\1{\2}"),
        (r"(\\[dtc]?frac\s?\{[^{}]*\})\s*(\d)", r"\1{\2}"),
        # "3 x 4"
        (r"(?<=[\w)])\s+[xX](?=\s+[$\d(.])|(?<=[\d)])\s+[xX](?=[$\d(.])|(?<=\))[xX](?=\s)|(?<=\d)[xX](?=\d)", " *"),
    )
)


class Quantity(NamedTuple):
    """One quantity of a text."""

    start: int
    end: int
    """``start`` and ``end`` delimit the quantity in the text that :func:`plain` returns."""
    value: Fraction | None
    """The value. None: the quantity has no value, such as ``x^7``."""
    percent: bool = False
    """Whether the value precedes a percent sign."""
    contradicts: bool = False
    """Whether the quantity is an equation whose sides are different numbers."""
    is_calculation: bool = False
    """Whether a calculation remains, as in ``2 + 17`` and ``36/2``, but not in ``3/4``, ``1 3/4`` and ``3 * 10^5``."""


class _Token(NamedTuple):
    kind: str
    text: str
    start: int
    end: int


class _NoValueError(ValueError):
    """Tokens do not form an arithmetic expression."""


def plain(text: str) -> str:
    r"""Return ``text`` as the grammar reads it: without emphasis and calculator marks, ``\text{}`` unwrapped."""
    if not text.isascii():
        for pattern, ascii_of in _UNICODE:
            text = pattern.sub(ascii_of, text)
    for pattern, replacement in _CHANGES:
        text = pattern.sub(replacement, text)
    for grouped in _GROUPED:
        text = grouped.sub(lambda match: _GAP.sub("", match[0]), text)
    return text


def quantities(text: str, *, latex: bool, checked: bool = True) -> list[Quantity]:
    """Return the quantities of ``text`` in their order. ``text`` must be a result of :func:`plain`.

    Args:
        text: Prose with or without formulas, or one formula.
        latex: Whether the text is a formula: adjacent letters are a product unless they look like a word, ``5!`` is a
            factorial.
        checked: True: the sides of an equation must agree, or the equation contradicts itself. False: a wrong
            calculation has the value of its last side, except an ``8 = 7`` in a formula.
    """
    tokens = list(_tokens(text, latex))
    broken = _broken_brackets(tokens)
    result: list[Quantity] = []
    run: list[_Token] = []
    before, depth = None, 0
    for place, token in enumerate(tokens):
        if place in broken or token.kind in {"word", "stop"} or (token.kind == "comma" and not depth):
            if token.kind == "comma" and _between_digits(text, token):
                run.append(token)
                continue
            result += _quantity(text, run, (before, token), latex, checked)
            run, before, depth = [], token, 0
        else:
            depth += (token.kind == "open") - (token.kind == "close")
            run.append(token)
    return result + _quantity(text, run, (before, None), latex, checked)


def reads_as_words(text: str) -> bool:
    """Return whether ``text`` holds letters, but no number and no formula."""
    text = plain(text)
    return any(map(str.isalpha, text)) and not quantities(text, latex=False) and not set("\\=+^<>").intersection(text)


def _tokens(text: str, latex: bool) -> Iterator[_Token]:
    last = _Token("stop", "", 0, 0)
    for match in _TOKEN.finditer(text):
        kind, symbol = match.lastgroup or "other", match[0]
        tight = match.start() == last.end
        if kind == "space" or (kind == "line" and latex):
            continue
        if kind == "name":
            article = symbol == "a" and re.match(r"\s+[A-Za-z]{2}", text[match.end() : match.end() + 9]) is not None
            kind = _kind_of_name(symbol, last, tight, article, latex)
        elif kind == "word":
            kind = _kind_of_word(symbol, tight and last.kind == "number", latex)
        elif kind in {"other", "line"}:
            kind = "name" if latex and symbol in {"|", "!"} else "stop"
        last = _Token(kind, _SIGNS.get(symbol, symbol), match.start(), match.end())
        yield last


def _kind_of_name(symbol: str, last: _Token, tight: bool, article: bool, latex: bool) -> str:
    """Return the token kind of a letter or command: ``unit``, ``word`` or ``name``."""
    behind_number = last.kind == "number"
    if symbol in _UNIT_LETTERS and (last.text == "\u00b0" or (behind_number and not (latex and tight))):
        return "unit"
    if latex:
        return "word" if article else "name"
    is_word = symbol in {"a", "A", "I"} and not (tight and last.kind != "stop")
    return "word" if is_word or (behind_number and not tight and symbol.isupper()) else "name"


def _kind_of_word(word: str, attached: bool, latex: bool) -> str:
    """Return the token kind of several letters: ``word``, ``name`` for a product, or ``unit`` behind a number."""
    if attached:
        is_unit = _UNITS.fullmatch(word) or (_looks_like_a_word(word) and len(word) > 5 * latex)
        return "unit" if is_unit else "name"
    return "name" if latex and not _looks_like_a_word(word) else "word"


def _looks_like_a_word(text: str) -> bool:
    match = _UNITS.fullmatch(text) or _SHORT_WORDS.fullmatch(text)
    return bool(match) or (len(text) > 2 and not set("aeiou").isdisjoint(text.lower()))


def _broken_brackets(tokens: Sequence[_Token]) -> set[int]:
    """Return the places of brackets without a partner, and of brackets around words."""
    opened: list[int] = []
    broken: set[int] = set()
    for place, token in enumerate(tokens):
        if token.kind == "open":
            opened.append(place)
        elif token.kind == "close" and not (opened and opened.pop() not in broken):
            broken.add(place)
        elif token.kind in {"word", "stop"}:
            broken.update(opened)
    return broken.union(opened)


def _between_digits(text: str, token: _Token) -> bool:
    return text[max(token.start - 1, 0) : token.start].isdigit() and text[token.end : token.end + 1].isdigit()


class _Side(NamedTuple):
    """One side of an equation."""

    value: Fraction | None
    percent: bool = False
    decimals: int | None = None
    """Number of decimal places if the side is a single number; None otherwise."""
    is_name: bool = False
    has_letters: bool = False
    is_calculation: bool = False

    @property
    def amount(self) -> Fraction | None:
        """The value; for a percentage a hundredth of it."""
        return self.value / 100 if self.percent and self.value is not None else self.value


def _quantity(
    text: str, run: list[_Token], around: tuple[_Token | None, _Token | None], latex: bool, checked: bool
) -> list[Quantity]:
    """Return the quantity in ``run``, adjacent tokens without words, as a list; an empty list if they are not a
    quantity.
    """
    run, cut = _trimmed(text, run, around, latex)
    kinds = [token.kind for token in run]
    formula = any(token.text.startswith("\\") for token in run if token.kind == "name")
    if not ("number" in kinds or formula or (kinds.count("name") > 1 and "op" in kinds)):
        return []
    signs, sides = _split(run)
    read = [_side(side) for side in sides]
    start, end = (0, len(text)) if any(cut) else (run[0].start, run[-1].end)
    if not any(cut) and read[-1].value is None and not read[-1].is_name and all(side.is_name for side in read[:-1]):
        start = sides[-1][0].start  # "x = 3y" is 3y
    return [_equation(read, signs, cut, checked, latex)._replace(start=start, end=end)]


def _trimmed(
    text: str, run: list[_Token], around: tuple[_Token | None, _Token | None], latex: bool
) -> tuple[list[_Token], tuple[bool, bool]]:
    """Return ``run`` without the operators and equals signs at its ends, except for a sign of the first number. Also
    return whether words cut off the left and the right end, as in "hours * 3" and "3 + tax".
    """
    before, after = (token is not None and token.kind == "word" for token in around)
    is_equation = any(token.kind == "equal" for token in run)
    left = right = False
    while run and run[0].kind in {"op", "equal"} and not _is_sign(text, run, before, latex):
        left |= run[0].kind == "op" and (is_equation or (before and (latex or run[0].text != "-")))
        before &= run[0].kind == "op"
        run = run[1:]
    while run and run[-1].kind in {"op", "equal"}:
        right |= after and (run[-1].text in {"+", "*", "^"} or (latex and run[-1].text == "-"))
        run = run[:-1]
    return run, (left, right)


def _split(run: Sequence[_Token]) -> tuple[list[str], list[list[_Token]]]:
    """Return the sides of an equation, and before each side the equals sign; an empty text before the first side."""
    signs, sides, depth = [""], [list[_Token]()], 0
    for token in run:
        depth += (token.kind == "open") - (token.kind == "close")
        if token.kind == "equal" and not depth:
            signs.append(token.text)
            sides.append([])
        else:
            sides[-1].append(token)
    return signs, sides


def _is_sign(text: str, run: Sequence[_Token], before: bool, latex: bool) -> bool:
    if len(run) < 2 or run[0].text not in {"-", "+"}:
        return False
    attached = not text[run[0].end : run[1].start].strip(_CURRENCY + "\\")
    return (latex and not before) or (attached and not text[max(run[0].start - 1, 0) : run[0].start].isalnum())


def _equation(
    sides: Sequence[_Side], signs: Sequence[str], cut: tuple[bool, bool], checked: bool, latex: bool
) -> Quantity:
    nothing = Quantity(0, 0, None)
    if cut[1] or (cut[0] and len(sides) == 1):
        return nothing
    left_sides = [side for side in sides[:-1] if not side.is_name][int(cut[0] and not sides[0].is_name) :]
    if any(side.value is None and (checked or (latex and side.has_letters)) for side in left_sides):
        return nothing
    valued = [side for side in (*left_sides, sides[-1]) if side.value is not None]
    if not valued or (sides[-1].value is None and not sides[-1].is_name):
        return nothing
    last = valued[-1]
    contradicts = any(
        not _agree(left, right, checked, "=" not in signs) for left, right in itertools.pairwise(valued)
    ) and (checked or latex)
    return Quantity(0, 0, last.value, last.percent, contradicts, all(side.is_calculation for side in valued))


def _agree(left: _Side, right: _Side, checked: bool, about: bool) -> bool:
    """Return whether two sides are the same number; the result of a calculation may be rounded or truncated. A side
    without a value agrees with any side and, unless ``checked``, so does a calculation.
    """
    if left.amount is None or right.amount is None or left.amount == right.amount:
        return True
    if left.decimals is not None and not about:
        return False
    unit = Fraction(1, 10 ** (right.decimals or 0)) / (100 if right.percent else 1)
    return not checked or (right.decimals is not None and abs(left.amount - right.amount) < unit)


def _side(tokens: Sequence[_Token]) -> _Side:
    letters = any(token.kind == "name" for token in tokens)
    arithmetic = _Arithmetic(tokens)
    try:
        value, percent = arithmetic.result()
    except _NoValueError:
        depth, outside = 0, set()
        for token in tokens:
            depth -= token.kind == "close"
            if not depth:
                outside.add(token.kind)
            depth += token.kind == "open"
        is_name = bool(tokens) and not outside.intersection({"number", "op", "comma", "frac"})
        return _Side(None, is_name=is_name, has_letters=letters)
    alone = [token for token in tokens if token.kind == "number"]
    bare = len(alone) == 1 and not any(token.kind == "op" for token in tokens[1:])
    decimals = _decimals(alone[0].text) if bare else None
    return _Side(value, percent, decimals, is_calculation=arithmetic.operations > 0)


class _Arithmetic:
    """Computes a side by recursive descent; each method implements the grammar rule of its name."""

    def __init__(self, tokens: Sequence[_Token]) -> None:
        self._tokens = tokens
        self._place = self._depth = self._factors = self._percents = 0
        self.operations = 0
        """Number of operations that remain to be computed. The line of a fraction and a decimal power do not count."""

    def result(self) -> tuple[Fraction, bool]:
        """Return the value, and whether it is a percentage.

        Raises:
            _NoValueError: The tokens are not a side of numbers, or the value is too large to compute.
        """
        value = self._side()
        if self._kind():
            raise _NoValueError
        percent = self._factors == 1 and self._percents == 1
        return (value * 100 if percent else value), percent

    def _kind(self, ahead: int = 0) -> str:
        place = self._place + ahead
        return self._tokens[place].kind if place < len(self._tokens) else ""

    def _take(self, kind: str, *texts: str) -> str:
        """Consume the next token and return its text if it has this kind and, with ``texts``, one of these texts; else
        "".
        """
        if self._kind() != kind or (texts and self._tokens[self._place].text not in texts):
            return ""
        self._place += 1
        return self._tokens[self._place - 1].text

    def _side(self) -> Fraction:
        minus = self._take("op", "-", "+") == "-"
        value = -self._term() if minus else self._term()
        while sign := self._take("op", "+", "-"):
            value = _bounded(value + self._term() if sign == "+" else value - self._term())
            self.operations += 1
        return value

    def _term(self) -> Fraction:
        value = self._power()
        while (sign := self._take("op", "*", "/")) or self._kind() == "open":
            start = self._place
            operand = self._power()
            if sign == "/" and not operand:
                raise _NoValueError
            value = _bounded(value / operand if sign == "/" else value * operand)
            is_fraction = sign == "/" and value.denominator != 1
            self.operations += not (is_fraction or self._is_decimal_power(start))
        return value

    def _power(self) -> Fraction:
        value = self._factor()
        if not self._take("op", "^"):
            return value
        minus = bool(self._take("op", "-"))
        exponent = -self._factor() if minus else self._factor()
        if exponent.denominator != 1 or _bits(value) * abs(exponent) > MAX_BITS or (not value and exponent <= 0):
            raise _NoValueError
        self.operations += value != 10
        return _bounded(value ** int(exponent))

    def _is_decimal_power(self, start: int) -> bool:
        """Return whether the tokens read since ``start`` begin with ``10^``, as a power of ten does."""
        return [token.text for token in self._tokens[start : min(start + 2, self._place)]] == ["10", "^"]

    def _factor(self) -> Fraction:
        if number := self._take("number"):
            value = _number(number)
            if self._kind() == "frac" or [self._kind(ahead) for ahead in range(3)] == ["number", "op", "number"]:
                part = self._fraction()
                if value.denominator != 1 or not 0 < part < 1:
                    raise _NoValueError
                value += part
        elif self._kind() == "frac":
            value = self._fraction()
        else:
            value = self._group()
        self._factors += 1
        while unit := self._take("unit"):
            if unit.endswith("%"):
                self._percents += 1
                value /= 100
        return value

    def _fraction(self) -> Fraction:
        if self._take("frac"):
            top, bottom = self._group(), self._group()
        else:
            top = _number(self._take("number"))
            if not self._take("op", "/"):
                raise _NoValueError
            bottom = _number(self._take("number"))
        if not bottom:
            raise _NoValueError
        value = _bounded(top / bottom)
        self.operations += value.denominator == 1
        return value

    def _group(self) -> Fraction:
        if self._depth >= MAX_DEPTH or not self._take("open"):
            raise _NoValueError
        self._depth += 1
        factors = self._factors
        value = self._side()
        self._depth -= 1
        self._factors = factors
        if not self._take("close"):
            raise _NoValueError
        return value


def _number(text: str) -> Fraction:
    mantissa, _, power = text.lower().partition("e")
    digits = re.sub(r"[^\d.]", "", mantissa)
    if not digits or len(digits) > MAX_DIGITS or len(power) > MAX_POWER:
        raise _NoValueError
    value = Fraction(digits if digits[0] != "." else f"0{digits}")
    return _bounded(value * Fraction(10) ** int(power.replace("\u2212", "-"))) if power else value


def _decimals(text: str) -> int:
    """Return the number of decimal places of a number that has a value."""
    mantissa, _, power = text.lower().partition("e")
    return max(len(mantissa.partition(".")[2]) - int(power.replace("\u2212", "-") or 0), 0)


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _bounded(value: Fraction) -> Fraction:
    if _bits(value) > MAX_BITS:
        raise _NoValueError
    return value
