r"""Where the answer stands in a completion: pure functions of text, linear in its length, so they may run anywhere.

Left out on purpose: guessing. What is not where it should be is not an answer.
"""

import re
from decimal import Decimal

# \d is any Unicode digit and Decimal reads them all, so an Arabic-Indic 5 is 5. U+2212 is the mathematical minus.
NUMBER = re.compile(
    r"""
    (?P<sign>(?<![\w)\]}.])[-+\u2212])?   # a sign only where no operand stands before it: the last number of 3-5 is 5
    (?<!\w)(?<!\d\.)                      # not in the middle of a word, a name (x2) or another number
    (?P<digits>
        \d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?   # 1,234,567.8; in 12,34 the comma separates two numbers
      | \d+(?:\.\d+)?                        # 12 or 12.5; a full stop that no digit follows ends a sentence
      | \.\d+
    )
    (?P<exponent>[eE][-+]?\d{1,3}(?!\w))?
    """,
    re.VERBOSE,
)


def _value(match: re.Match[str]) -> Decimal:
    sign = "-" if match["sign"] in ("-", "\u2212") else ""
    return Decimal(sign + match["digits"].replace(",", "") + (match["exponent"] or ""))


def last_number(text: str) -> Decimal | None:
    r"""The last integer or decimal in the text, or None: thousands commas (TeX's `{,}` too), signs, exponents.

    What stands around it does not matter: `$18`, `18%`, `\boxed{18}`, `18 apples.` are 18. A fraction is two numbers.
    """
    last = None
    for last in NUMBER.finditer(text.replace("{,}", ",")):  # noqa: B007 (the last one is wanted)
        pass
    return None if last is None else _value(last)


def whole_number(text: str) -> Decimal | None:
    """The number that the text is, apart from space, currency and percent signs; None when it is anything else."""
    match = NUMBER.fullmatch(text.replace("{,}", ",").replace("\\", "").strip(" \n\t$€£%"))
    return None if match is None else _value(match)


def after_last(text: str, marker: str) -> str | None:
    """What follows the last `marker`, or None without one."""
    _, found, rest = text.rpartition(marker)
    return rest if found else None


def last_tag(text: str, tag: str) -> str | None:
    """The content of the last `<tag>...</tag>`; None when there is none, or the last one is not closed."""
    content = after_last(text, f"<{tag}>")
    if content is None or f"</{tag}>" not in content:
        return None
    return content.partition(f"</{tag}>")[0]


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` (braces balanced); None when there is none, or the last is unfinished.

    An earlier box never stands in for an unfinished last one: the policy has not given an answer then.
    """
    content = after_last(text, r"\boxed{")
    if content is None:
        return None
    depth, i = 1, 0
    while i < len(content):
        if content[i] == "\\":
            i += 2  # \{ and \} are characters, not groups
            continue
        depth += (content[i] == "{") - (content[i] == "}")
        if depth == 0:
            return content[:i]
        i += 1
    return None


def find_answer(text: str, *, after: str | None = None, tag: str | None = None, boxed: bool = False) -> str | None:
    """The part of a completion that is its answer: after a marker, in a tag, in the last box, or all of it."""
    if after is not None:
        return after_last(text, after)
    if tag is not None:
        return last_tag(text, tag)
    return last_boxed(text) if boxed else text
