"""How decisions came about, as text 80 columns wide."""

import math
from collections.abc import Iterator, Sequence
from string import ascii_letters, digits

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bmoe.cli.render import WIDTH, bar, percent, printable
from bmoe.probe import Record
from bmoe.probe.course import NO_ANSWER, Agreement, Course
from bmoe.probe.hits import HitRates
from bmoe.probe.routing import HOTTEST, LayerUse
from bmoe.probe.summary import Summary

STRIP_CELLS = 64  # layers in a line of WIDTH; fewer in a narrower one
NARROWEST_STRIP = 10
LABEL_CELLS = 9  # before it
MOST_ROWS = 32  # of a table by layer, where there is one for all decisions
NAME_CELLS = 40
_SYMBOLS = ascii_letters.upper()[:26] + ascii_letters[:26] + digits
_HEIGHTS = "▁▂▃▄▅▆▇█"
_ASCII_HEIGHTS = "12345678"


def strip(
    record: Record,
    came: Course | None,
    name: str,
    options: Sequence[str] | None = None,
    *,
    ascii_only: bool = False,
    width: int = WIDTH,
) -> RenderableType:
    """One decision: its answer, and a character per layer for the answer there, its share, and the margin."""
    symbols = _symbols(record.choices)
    logp = float(record.logp[record.best])
    title = Text(f"{name}  {_named(record, options, record.best)}", "bold")
    title.append(f"  {percent(math.exp(logp))}", "default")
    if came is None:
        return Group(title, Text(f"no lens: {record.lens_why}", "yellow"))
    title.append(f"; stays from layer {came.stays_from} of {len(came.answers)}", "default")
    legend = _legend(record, symbols, options)
    heights = _ASCII_HEIGHTS if ascii_only else _HEIGHTS
    most = max((abs(margin) for margin in came.margins), default=0.0) or 1.0
    answers = ["?" if answer == NO_ANSWER else symbols[answer] for answer in came.answers]
    shares = [_height(share, heights) for share in came.shares]
    margins = ["." if margin < 0 else _height(margin / most, heights) for margin in came.margins]
    lines = [Text(legend, "dim")] if legend else []
    cells = max(NARROWEST_STRIP, min(STRIP_CELLS, width - LABEL_CELLS))
    for begin in range(0, len(answers), cells):
        part = slice(begin, begin + cells)
        stays = max(0, came.stays_from - begin)
        row = Text("".join(answers[part]))
        row.stylize("bold green", stays)
        lines.append(Text(f"  layer  {_ruler(begin, len(answers[part]))}", "dim"))
        lines.append(Text("  answer ") + row)
        lines.append(Text(f"  share  {''.join(shares[part])}"))
        lines.append(Text(f"  margin {''.join(margins[part])}"))
    return Group(title, *lines)


def by_layer(
    record: Record, came: Course, options: Sequence[str] | None, *, ascii_only: bool = False
) -> RenderableType:
    """One decision's layers in numbers."""
    table = _table("layer", "answer", "share of the choices", "", "margin")
    for layer, (answer, share, margin) in enumerate(zip(came.answers, came.shares, came.margins, strict=True)):
        style = "bold green" if layer >= came.stays_from else ""
        name = "?" if answer == NO_ANSWER else _named(record, options, answer)
        cells = (str(layer), name, bar(share, ascii_only, 16), percent(share), f"{margin:+.2f}")
        table.add_row(*(Text(cell, style) for cell in cells))
    for column, justify in zip(table.columns, ("right", "left", "left", "right", "right"), strict=True):
        column.justify = justify  # type: ignore[assignment]  # the literals that rich wants
    return Group(table, Text("margin: the final answer's logit less the best other's, in nats", "dim"))


def summary(total: Summary, *, ascii_only: bool = False) -> RenderableType:
    """All decisions together."""
    return Group(*_parts(total, ascii_only))


def _parts(total: Summary, ascii_only: bool) -> Iterator[RenderableType]:
    agreed, uses, rates = total.agreement, total.layer_uses, total.hit_rates()
    if agreed is not None and agreed.n_decisions > 1:
        yield _agreement(agreed, ascii_only)
    if uses:
        yield _uses(uses)
    if rates is not None and total.n_decisions > 1:
        yield _rates(rates)


def _agreement(agreed: Agreement, ascii_only: bool) -> RenderableType:
    table = _table("layer", f"agrees, of {agreed.n_decisions}", "")
    for layer in _sampled(len(agreed.n_agree)):
        n = agreed.n_agree[layer]
        table.add_row(str(layer), str(n), bar(n / agreed.n_decisions, ascii_only))
    table.columns[2].justify = "left"
    caption = f"always the same place among the choices would agree with {agreed.n_constant}"
    return Group(Text("Decisions whose answer at a layer is the final one"), table, Text(caption, "dim"))


def _uses(uses: Sequence[LayerUse]) -> RenderableType:
    parts = [f"{part:.0%}".replace("%", " %") for part in HOTTEST]
    table = _table("layer", "experts", "routings", "used", *(f"hottest {part}" for part in parts))
    for index in _sampled(len(uses)):
        use = uses[index]
        shares = (use.used, *use.hottest)
        table.add_row(str(use.layer), str(use.n_expert), str(use.n_routings), *map(percent, shares))
    caption = "used: experts that computed anything; hottest N %: routings that fall on so many of the experts"
    return Group(Text("How concentrated the routing is"), table, Text(caption, "dim"))


def _rates(rates: HitRates) -> RenderableType:
    table = _table("cache, MiB", "of all experts", "LRU", "fixed")
    for mib, lru, fixed in zip(rates.cache_mib, rates.lru, rates.fixed, strict=True):
        cells = (f"{mib:.1f}", percent(mib / rates.all_mib), percent(lru), percent(fixed))
        table.add_row(*cells)
    caption = (
        f"of {rates.n_asked} experts asked for, once per decision and layer. LRU: empty at first, keeps what was asked "
        "for last; fixed: holds from the start what is asked for most often"
    )
    return Group(Text("What an expert cache would have served"), table, Text(caption, "dim"))


def _table(*headings: str) -> Table:
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right", overflow="fold")
    return table


def _sampled(n: int) -> list[int]:
    """At most MOST_ROWS of n, evenly apart, with the last."""
    step = -(-n // MOST_ROWS)
    return list(range(n - 1, -1, -step))[::-1]


def _symbols(choices: Sequence[str]) -> list[str]:
    """A character for each choice: its own where they all are one, else letters by place; + past those."""
    own = [choice.strip() for choice in choices]
    if len(set(own)) == len(own) and all(len(text) == 1 and text.isascii() and text.isprintable() for text in own):
        return own
    return [*_SYMBOLS, *"+" * len(choices)][: len(choices)]


def _legend(record: Record, symbols: Sequence[str], options: Sequence[str] | None) -> str:
    """What symbols stand for, where they are not the choices themselves."""
    texts = record.choices if options is None else options
    pairs = [(symbol, _short(text)) for symbol, text in zip(symbols, texts, strict=True) if symbol != text.strip()]
    return ", ".join(f"{symbol} {text}" for symbol, text in pairs if symbol != "+")


def _named(record: Record, options: Sequence[str] | None, index: int) -> str:
    choice = record.choices[index]
    return _short(choice if options is None else f"{choice.strip()}) {options[index]}")


def _short(text: str) -> str:
    shown = repr(text) if text != text.strip() else printable(text)
    return shown if len(shown) <= NAME_CELLS else shown[: NAME_CELLS - 1] + "…"


def _height(share: float, heights: str) -> str:
    return heights[min(int(share * len(heights)), len(heights) - 1)]


def _ruler(begin: int, n: int) -> str:
    """Numbers of layers, each at its place."""
    line = ""
    for layer in range(begin, begin + n):
        if layer % 10 == 0 and len(line) <= layer - begin:
            line = line.ljust(layer - begin) + str(layer)
    return line
