"""Personal data: e-mail addresses, phone numbers and card numbers, redacted or dropped."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Literal

Action = Literal["keep", "redact", "drop"]

_EMAIL = re.compile(r"(?<![\w.+-])[\w.+-]{1,64}@(?:[A-Za-z0-9-]{1,63}\.)+[A-Za-z]{2,24}(?![\w@])")
# International with a plus sign, or North American with separators: bare runs of digits are
# far more often ids, sizes and dates than phone numbers.
_PHONE = re.compile(
    r"(?<![\w+.-])(?:"
    r"\+[1-9]\d{0,2}[ .-]?(?:\(\d{1,4}\)[ .-]?)?\d{2,4}(?:[ .-]?\d{2,4}){1,4}"
    r"|(?:1[ .-])?(?:\([2-9]\d{2}\) ?|[2-9]\d{2}[.-])[2-9]\d{2}[.-]\d{4}"
    r")(?![\w-])"
)
_CARD = re.compile(
    r"(?<![\w.-])[2-6]\d{3}[ -]?(?:\d{4}[ -]?){2}\d{1,7}(?!\w|[.-]\d)"
    r"|(?<![\w.-])3[47]\d{2}[ -]?\d{6}[ -]?\d{5}(?!\w|[.-]\d)"
)
_PLACEHOLDERS = re.compile(
    r"@(?:[\w-]+\.)*(?:example\.(?:com|org|net|edu)|localhost|invalid|test)$"
)


@dataclasses.dataclass(frozen=True)
class PersonalConfig:
    """What happens to a document with personal data, by kind: keep, redact or drop.

    Attributes:
      email: addresses, save those of example.com and the like, which stand for no one.
      phone: numbers with a country code, and North American ones with separators.
      card: 13 to 19 digits with a major issuer's prefix and a right Luhn checksum.
      exempt: sources that these rules do not apply to.
    """

    email: Action = "redact"
    phone: Action = "redact"
    card: Action = "redact"
    exempt: tuple[str, ...] = ()


def luhn_valid(digits: str) -> bool:
    """The checksum of payment cards: doubled from the right, every second digit (ISO 7812).

    >>> luhn_valid("4111111111111111"), luhn_valid("4111111111111112")
    (True, False)
    """
    total = 0
    for place, digit in enumerate(reversed(digits)):
        value = int(digit) * (1 + place % 2)
        total += value - 9 if value > 9 else value
    return total % 10 == 0


def _is_email(found: str) -> bool:
    return not _PLACEHOLDERS.search(found.lower())


def _is_phone(found: str) -> bool:
    return 8 <= sum(map(str.isdigit, found)) <= 15


def _is_card(found: str) -> bool:
    digits = "".join(filter(str.isdigit, found))
    return 13 <= len(digits) <= 19 and len(set(digits)) > 1 and luhn_valid(digits)


# Cards before phones: a card number must not be read as a phone number in part.
_KINDS: tuple[tuple[str, str, re.Pattern[str], Callable[[str], bool]], ...] = (
    ("email", "@", _EMAIL, _is_email),
    ("card", "", _CARD, _is_card),
    ("phone", "", _PHONE, _is_phone),
)


def redact_personal(text: str, config: PersonalConfig) -> tuple[str, dict[str, int], str | None]:
    """Replaces personal data by ``[email]``, ``[phone]``, ``[card]``.

    Returns:
      The text, how many of each kind were redacted, and the kind for which the document is
      to be dropped (or None).

    >>> redact_personal("Mail ann@mail.org or call +49 30 1234567.", PersonalConfig())
    ('Mail [email] or call [phone].', {'email': 1, 'phone': 1}, None)
    """
    counts: dict[str, int] = {}
    for kind, mark, pattern, check in _KINDS:
        action = getattr(config, kind)
        if action == "keep" or mark not in text:
            continue
        found = 0

        def replace(match: re.Match[str], kind: str = kind, check: Callable[[str], bool] = check):
            nonlocal found
            if not check(match.group()):
                return match.group()
            found += 1
            return f"[{kind}]"

        redacted = pattern.sub(replace, text)
        if found and action == "drop":
            return text, {}, kind
        if found:
            text, counts[kind] = redacted, found
    return text, counts, None
