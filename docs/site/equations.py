"""Makes pages of docstrings: their lists and paragraphs as Markdown, their equations as MathML.

Docstrings have equations in plain text, such as ``θ ← Σ_k (N_k/ΣN) θ_k``. Browsers set MathML by themselves, so the
site needs no script and works without a network.
"""

from __future__ import annotations

import re
import unicodedata
from html import escape

LEADS = ("Setting", "Wire", "Where ", "Should reproduce", "Equal work", "No setting changes")
FUNCTIONS = frozenset(
    {
        "min",
        "max",
        "argmin",
        "argmax",
        "log",
        "exp",
        "sqrt",
        "softmax",
        "mean",
        "diag",
        "sim",
        "dec",
        "enc",
        "cls",
        "cos",
    }
)
ACCENTS = {"\u0302": "^", "\u0303": "~", "\u0304": "¯"}
RAISED = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ᵀ", "0123456789+−T", strict=True))
LOWERED = dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True))
INFIX = "+−·=≥≤<>∈∝←→≠~⊗⊙/,;"
EMPHASIS = re.compile(r"(\*\*\S.*?\S\*\*|(?<!\w)\*\w[^*]*\w\*(?!\w))")
CODE = re.compile(r"(``.+?``|`[^`]+`)", re.S)
TOKEN = re.compile(
    r"(?P<code>``.+?``)|(?P<space>\s+)|(?P<number>\d+(?:[.,]\d+)*(?:e-\d+)?)"
    r"|(?P<word>'s\b|[A-Za-z]-[a-z]{2,}|[A-Za-z]{2,}(?:-[A-Za-z]{2,})*(?:'s\b|(?<=[a-z]{3}s)')?)"
    r"|(?P<letter>[^\W\d_ᵀ⁰¹²³⁴-⁹₀-₉½][\u0300-\u036f]*)|(?P<sign>.)"
)
ITEM = re.compile(r" {0,2}(\d+\.|\*) +(.*)")
LETTER = r"[^\W\d_ᵀ⁰¹²³⁴-⁹₀-₉½][\u0300-\u036f]*"
GROUP = r"(?:\([^()]*\)|\{[^{}]*\})"
# In prose: a letter or up to three capitals with an index or a power and what is attached; or a power of brackets.
SYMBOL = re.compile(
    rf"(?:(?<![\w`/.])(?:{LETTER}|[A-Z]{{2,3}})'?|\))[_^](?:{GROUP}|(?:{LETTER}|[\d.−+·/^_]|'(?!s\b))*(?:{LETTER}|[\d']))"
)


def described(docstring: str) -> str:
    """A docstring as Markdown. Lines that are indented and belong to no list are equations."""
    blocks: list[tuple[str, list[str]]] = [("blank", [])]
    for line in docstring.strip().splitlines():
        before = blocks[-1][0]
        kind = _kind(line, in_item=before == "item")
        if kind in ("item", "blank") or kind not in (before, "more") or line.startswith(LEADS):
            blocks.append((kind, []))
        blocks[-1][1].append(line)
    return "\n\n".join(_shown(kind, lines) for kind, lines in blocks if kind != "blank")


def _kind(line: str, *, in_item: bool) -> str:
    """What a line is: the beginning of an item, more of it, blank, an equation or prose."""
    if ITEM.match(line):
        return "item"
    if not line.strip():
        return "blank"
    if line.startswith("  "):
        return "more" if in_item else "equation"
    return "prose"


def _shown(kind: str, lines: list[str]) -> str:
    """The lines of a paragraph, an item or a display of equations as Markdown."""
    if kind == "equation":
        return display(lines)
    if (item := ITEM.match(lines[0])) is not None:
        lines = [f"{item[1]} {item[2]}", *lines[1:]]
    return paragraph(" ".join(line.strip() for line in lines))


def paragraph(text: str) -> str:
    """A paragraph or an item of a list. What it is about stands out, and symbols with an index are set."""
    marker = ""
    if found := re.match(r"(\d+\.|\*) ", text):
        marker, text = found[0], text[found.end() :]
    elif text.startswith(LEADS):
        lead, mark, rest = re.match(r"([^.:]*)([.:]?)(.*)", text, re.S).groups()  # type: ignore[union-attr]
        return f"**{prose_of(lead)}{mark}**{prose_of(rest)}"
    return marker + prose_of(text)


def prose_of(text: str) -> str:
    """Text of a docstring as Markdown; ``code`` and *emphasis* keep their meaning."""
    return "".join(part if part.startswith("`") else _with_symbols(part) for part in CODE.split(text))


def _with_symbols(text: str) -> str:
    parts: list[str] = []
    end = 0
    for found in SYMBOL.finditer(text):
        parts += [_plain(text[end : found.start()]), inline(found[0])]
        end = found.end()
    return "".join([*parts, _plain(text[end:])])


def _plain(text: str) -> str:
    """``text`` without a meaning as Markdown, except for its emphasis."""
    parts = EMPHASIS.split(text)
    escaped = (re.sub(r"([\\_\[\]<>|#$])", r"\\\1", part) for part in parts)
    return "".join(part if place % 2 else part.replace("*", "\\*") for place, part in enumerate(escaped))


def display(lines: list[str]) -> str:
    """Equations, a line each. Columns, and the number at the end, are apart by two spaces or more."""
    least = min(len(line) - len(line.lstrip()) for line in lines)
    rows = []
    for line in lines:
        step = (len(line) - len(line.lstrip()) - least) // 4
        joined = re.sub(r" {2,}(?=[=←] )", " ", re.sub(r"(\bmin(?:_\S+)?|\bof|\() {2,}", r"\1 ", line.strip()))
        chunks = re.split(r" {2,}", joined)
        number = f'<span class="number">{escape(chunks.pop())}</span>' if _is_number(chunks) else ""
        cells = "".join(f"<span>{inline(chunk)}</span>" for chunk in chunks)
        rows.append(f'<div class="equation step{step}"><div>{cells}</div>{number}</div>')
    return '<div class="equations">' + "".join(rows) + "</div>"


def _is_number(chunks: list[str]) -> bool:
    marks = r"\((\d[\d, –]*(, appendix \w)?|[a-z]|Algorithm \d+|equation \d+|theorem \d+)\)"
    return len(chunks) > 1 and re.fullmatch(marks, chunks[-1]) is not None


def inline(text: str) -> str:
    """A line of symbols and words as HTML: what is mathematics is in ``<math>``, words are text, so lines can break."""
    tokens = [(str(found.lastgroup), found[0]) for found in TOKEN.finditer(text)]
    out: list[str] = []
    formula: list[str] = []

    def close() -> None:
        if formula:
            out.append(f"<math>{''.join(formula)}</math>")
            formula.clear()

    place = 0
    while place < len(tokens):
        kind, token = tokens[place]
        if kind == "code":
            close()
            out.append(f"<code>{escape(token.strip('`'))}</code>")
        elif _is_text(tokens, place):
            close()
            out.append(_entities(token))
        elif kind == "space":
            around = [tokens[at][1] for at in (place - 1, place + 1) if 0 <= at < len(tokens)]
            texts = [_is_text(tokens, at) for at in (place - 1, place + 1) if 0 <= at < len(tokens)]
            if any(texts) or token == "\n":
                close()
                out.append(" ")
            elif not any(one in INFIX for one in around):
                formula.append('<mspace width="0.25em"/>')
        else:
            text_of, place = _atom(tokens, place)
            formula.append(text_of)
            continue
        place += 1
    close()
    return "".join(out)


def _is_text(tokens: list[tuple[str, str]], place: int) -> bool:
    kind, token = tokens[place]
    after = tokens[place + 1][1] if place + 1 < len(tokens) else ""
    if kind == "word":
        if token in FUNCTIONS:  # such as "the mean of all"
            return after not in ("_", "^", "(", "[") and any(_is_prose(tokens, at) for at in (place - 2, place + 2))
        return after not in ("_", "^", "(", "[") and not token.isupper()
    if kind == "letter" and token in "aA":  # the article
        word = tokens[place + 2] if place + 2 < len(tokens) else ("", "")
        return after.isspace() and word[0] == "word" and word[1] not in FUNCTIONS
    return token in (":", ".", '"', "%")


def _is_prose(tokens: list[tuple[str, str]], place: int) -> bool:
    """Whether a word stands there that is neither a function nor a name such as CE."""
    kind, token = tokens[place] if 0 <= place < len(tokens) else ("", "")
    return kind == "word" and token not in FUNCTIONS and token.islower()


def _atom(tokens: list[tuple[str, str]], place: int) -> tuple[str, int]:
    """The MathML of the symbol at ``place`` with its indices and powers, and the place after it."""
    kind, token = tokens[place]
    place += 1
    if token == "√" and place < len(tokens):
        under, place = (_script if tokens[place][1] == "(" else _atom)(tokens, place)
        return f"<msqrt>{under}</msqrt>", place
    base = _operator(tokens, place - 1) if token in "+-−" else _symbol(kind, token)
    below, above = "", ""
    while place < len(tokens):
        mark = tokens[place][1]
        if mark in "_^" and place + 1 < len(tokens):
            script, place = _script(tokens, place + 1)
            below, above = (below + script, above) if mark == "_" else (below, above + script)
        elif mark == "'" or (mark == "*" and kind == "letter"):
            above += f"<mo>{'′' if mark == chr(39) else '&#8727;'}</mo>"
            place += 1
        elif mark in RAISED:
            above += _run(RAISED[mark])
            place += 1
        elif mark in LOWERED:
            below += _run(LOWERED[mark])
            place += 1
        else:
            break
    low, high = f"<mrow>{below}</mrow>", f"<mrow>{above}</mrow>"
    if below and above:
        return f"<msubsup>{base}{low}{high}</msubsup>", place
    if below or above:
        return (f"<msub>{base}{low}</msub>" if below else f"<msup>{base}{high}</msup>"), place
    return base, place


def _script(tokens: list[tuple[str, str]], place: int) -> tuple[str, int]:
    """What an index or a power has: a group in brackets, which are dropped, or letters and digits without a space."""
    ends = {"{": "}", "(": ")"}
    opened = tokens[place][1]
    if opened in ends:
        depth, end = 1, place + 1
        while end < len(tokens) and depth:
            depth += (tokens[end][1] == opened) - (tokens[end][1] == ends[opened])
            end += 1
        inner, place = tokens[place + 1 : end - 1], end
    else:
        end = place + (opened in "-−")
        while end < len(tokens) and tokens[end][0] in ("letter", "word", "number"):
            end += 1
        inner, place = tokens[place:end], max(end, place + 1)
    out, at = [], 0
    while at < len(inner):
        if inner[at][0] == "space":
            out.append('<mspace width="0.2em"/>')
            at += 1
        else:
            symbol, at = _atom(inner, at)
            out.append(symbol)
    return "".join(out), place


def _operator(tokens: list[tuple[str, str]], place: int) -> str:
    """A plus or minus: between two things if a space follows it or a thing precedes it, else a sign."""
    kind, before = tokens[place - 1] if place else ("", "")
    spaced = place + 1 < len(tokens) and tokens[place + 1][0] == "space"
    between = spaced or kind in ("letter", "number", "word") or before in (*")]‖", *RAISED)
    return f'<mo form="{"infix" if between else "prefix"}">{tokens[place][1].replace("-", "−")}</mo>'


def _symbol(kind: str, token: str) -> str:
    if kind == "number":
        return f"<mn>{token}</mn>"
    if token == "½":
        return "<mfrac><mn>1</mn><mn>2</mn></mfrac>"
    if token in ("Σ", "∇"):
        return f"<mo>{'∑' if token == 'Σ' else token}</mo>"
    base, accent = token[:1], ""
    if kind == "letter" and len(apart := unicodedata.normalize("NFD", token)) == 2:
        base, accent = apart[0], apart[1]
    if accent in ACCENTS:
        return f'<mover accent="true"><mi>{base}</mi><mo stretchy="false">{ACCENTS[accent]}</mo></mover>'
    if kind in ("letter", "word"):
        return f"<mi>{token}</mi>"
    if token in "|‖":
        return f'<mo stretchy="false" lspace="0" rspace="0">{_entities(token)}</mo>'
    return f'<mo stretchy="false">{_entities(token)}</mo>'


def _run(text: str) -> str:
    return f"<mn>{text}</mn>" if text.isdigit() else f"<mi>{text}</mi>" if text.isalpha() else f"<mo>{text}</mo>"


def _entities(text: str) -> str:
    """``text`` for HTML that Markdown reads first, where a star or an underscore must not begin emphasis."""
    return re.sub(r"[*_`\[\]\\|~]", lambda found: f"&#{ord(found[0])};", escape(text, quote=False))
