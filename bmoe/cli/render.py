"""Results as rich renderables; pure."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bmoe.decide import DecideResult
from bmoe.decide.perplexity import PerplexityResult
from bmoe.generate import GenerateResult

WIDTH = 80
BAR_CELLS = 24  # of WIDTH; fewer in fewer, and none where they would leave no room for the names
NO_BARS_BELOW = 40
BESIDE_CELLS = 14  # of a line that are neither bar nor name
SHOWN_CHOICES = 40
NOTABLE_MASS = 0.1
MOST_MASS = 0.5
ENDINGS = {
    "end": "complete",
    "stop": "ended by a stop text",
    "length": "cut off by -n",
    "context": "cut off: the context is full",
    "cancelled": "cancelled",
}
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def decision(
    result: DecideResult, options: Sequence[str] | None, *, ascii_only: bool = False, width: int = WIDTH
) -> RenderableType:
    """Each choice with its probability as a bar, the mass outside them, and what it took."""
    width = min(width, WIDTH)
    bar_cells = BAR_CELLS * width // WIDTH if width >= NO_BARS_BELOW else 0

    def shown_bar(mass: float) -> str:
        return bar(mass, ascii_only, bar_cells)

    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold", max_width=max(1, width - bar_cells - BESIDE_CELLS))
    table.add_column(no_wrap=True, width=bar_cells)
    table.add_column(justify="right", no_wrap=True)
    masses = [math.exp(logp) for logp in result.choice_logp]
    for index in _shown(result):
        best = index == result.best
        style = "bold green" if best else ""
        cells = (
            ">" if best else "",
            _name(result, options, index),
            shown_bar(masses[index]),
            percent(masses[index]),
        )
        table.add_row(*(Text(cell, style) for cell in cells))
    hidden = len(masses) - min(len(masses), SHOWN_CHOICES)
    if hidden:
        left = sum(sorted(masses)[:hidden])
        table.add_row("", Text(f"{hidden} others together", "dim"), Text(shown_bar(left), "dim"), percent(left))
    outside = result.outside_mass
    style = "bold yellow" if outside >= NOTABLE_MASS else "dim"
    cells = ("!" if outside >= NOTABLE_MASS else "", "outside the choices", shown_bar(outside), percent(outside))
    table.add_row(*(Text(cell, style) for cell in cells))
    return Group(table, *_warning(result), Text(cost(result), "dim"))


def cost(result: DecideResult) -> str:
    """Tokens and time in one line."""
    seconds = result.prefill_s + result.restore_s + result.store_s + result.policy_s
    reused = f", {result.n_reused} of them reused" if result.n_reused else ""
    return f"{result.n_tokens} tokens{reused}{_on_device(result)}, {seconds:.2f} s{_read(result)}"


def _on_device(result: DecideResult | GenerateResult | PerplexityResult) -> str:
    return f", {result.prefill_dev_tokens} on the device" if result.prefill_dev_tokens else ""


def _read(result: DecideResult | PerplexityResult) -> str:
    """Of streamed experts, for the CPU and for the device; nothing where none was wanted."""
    read_mib = result.prefill_read_mib + result.prefill_dev_read_mib
    return f", {read_mib:.1f} MiB read" if result.prefill_routed_mib or result.prefill_dev_read_mib else ""


def bar(mass: float, ascii_only: bool = False, cells: int = BAR_CELLS) -> str:
    """A probability as a bar of at most so many cells."""
    eighths = round(mass * cells * 8)
    if ascii_only:
        return "#" * round(eighths / 8)
    whole, part = divmod(eighths, 8)
    return "█" * whole + (_EIGHTHS[part] if part else "")


def percent(mass: float) -> str:
    """A probability for people: what is not nothing does not read as nothing, nor what is not all as all."""
    if mass == 0:
        return "0 %"
    if mass < 0.001:
        return "<0.1 %"
    if 0.9995 <= mass < 1:
        return ">99.9 %"
    return f"{mass * 100:.1f} %"


def printable(text: str) -> str:
    """Text on one line, control characters as escapes."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def on_screen(text: str) -> str:
    """Text for a terminal: what would steer it is shown as escapes."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else repr(letter)[1:-1] for letter in text)


def turn(result: GenerateResult) -> str:
    """What a turn took and why it ended, in one line."""
    reused = f" and {result.n_reused} reused" if result.n_reused else ""
    parts = [f"{result.n_prompt} tokens read{reused}{_on_device(result)} in {result.prefill_s:.2f} s"]
    if result.n_generated:
        rate = f" ({result.n_generated / result.generate_s:.1f}/s)" if result.generate_s > 0 else ""
        parts.append(f"{result.n_generated} written in {result.generate_s:.2f} s{rate}")
    if result.prefill_routed_mib or result.prefill_dev_read_mib:
        read_mib = result.prefill_read_mib + result.prefill_dev_read_mib + result.read_mib
        parts.append(f"{read_mib:.1f} MiB of experts from the file")
    return f"{', '.join(parts)}; {ENDINGS[result.ending]}"


def perplexity(result: PerplexityResult, choices: Sequence[str], *, ascii_only: bool = False) -> RenderableType:
    """The estimate with its standard errors, and the choices as what would follow."""
    sign = "+-" if ascii_only else "±"
    n_scored, n_to_score = len(result.token_logp), result.n_tokens - 1
    so_far = f" of {n_to_score}, interrupted" if result.cancelled else ""
    values = {
        "perplexity": _with_error(result.perplexity, sign, result.perplexity * result.stderr),
        "nll per token": f"{_with_error(result.nll, sign, result.stderr)} nats",
        "tokens scored": f"{n_scored}{so_far}",
    }
    if not n_scored:
        del values["perplexity"], values["nll per token"]
    rows = [Text(f"{logp:9.4f}  {percent(math.exp(logp)):>7}  {choice!r}") for choice, logp in _paired(choices, result)]
    after = [Text("after the text, log p and p of", "dim"), *rows] if rows else []
    cost = f"{result.n_prefilled} tokens computed{_on_device(result)} in {result.prefill_s:.2f} s{_read(result)}"
    return Group(facts(values), *after, Text(cost, "dim"))


def _paired(choices: Sequence[str], result: PerplexityResult) -> list[tuple[str, float]]:
    return list(zip(choices, result.choice_logp, strict=True)) if result.choice_logp else []


def _with_error(value: float, sign: str, error: float) -> str:
    return f"{value:.4f}" if math.isnan(error) else f"{value:.4f} {sign} {error:.4f}"


def facts(values: Mapping[str, Any]) -> RenderableType:
    """Names and values in two columns."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for name, value in values.items():
        table.add_row(Text(name), Text(printable(str(value))))
    return table


def _shown(result: DecideResult) -> list[int]:
    """Indices in the order given; of very many, the likeliest."""
    indices = range(len(result.choice_logp))
    if len(indices) <= SHOWN_CHOICES:
        return list(indices)
    return sorted(indices, key=lambda index: -result.choice_logp[index])[:SHOWN_CHOICES]


def _name(result: DecideResult, options: Sequence[str] | None, index: int) -> str:
    choice = result.choices[index]
    if options is not None:
        return printable(f"{choice.strip()}) {options[index]}")
    # Blanks at the ends make another token, so they must be seen.
    return printable(choice) if choice == choice.strip() else repr(choice)


def _warning(result: DecideResult) -> list[Text]:
    if result.outside_mass < NOTABLE_MASS:
        return []
    lead = "The model wanted to say something else" if result.outside_mass >= MOST_MASS else "Not sure"
    text = f"{lead}: {percent(result.outside_mass)} of its answer is outside the choices"
    if result.outside_text:
        text += f", {percent(result.outside_text_mass)} on {result.outside_text!r}"
    return [Text(text, "bold yellow")]
