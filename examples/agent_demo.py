"""An agent turns on Wi-Fi: three screens, one decision each. Exit code 1 if one of them is wrong.

Run it with `python examples/agent_demo.py [MODEL]`. Without MODEL the default model is used, and fetched on first use.
"""

import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from bmoe import DecideResult, FetchError, Session
from bmoe.models import DEFAULT, default_cache, is_fetched

TASK = "How do I turn on Wi-Fi on this phone? Tell me what to tap next."


@dataclass(frozen=True)
class Screen:
    name: str
    elements: tuple[str, ...]
    right: str


SCREENS = (
    Screen("home", ("Camera", "Settings", "Phone", "Messages"), "Settings"),
    Screen("settings", ("Display", "Network & internet", "Battery", "Sound"), "Network & internet"),
    Screen("network", ("Airplane mode", "Bluetooth", "Wi-Fi", "Hotspot"), "Wi-Fi"),
)


def main() -> int:
    model = sys.argv[1] if len(sys.argv) > 1 else None
    cache = Path(os.environ.get("BMOE_CACHE") or default_cache())
    if model is None and not is_fetched(DEFAULT, cache):
        print(f"Fetching {DEFAULT.name} ({DEFAULT.size_bytes / 1e9:.2f} GB, once) into {cache}", file=sys.stderr)
    history, wrong = "", 0
    with Session.open(model, cache=cache, on_fetch=show_progress) as session:
        for step, screen in enumerate(SCREENS, start=1):
            # The history only grows, so each prompt begins with the one before and is computed from where that ended.
            history += f"\nStep {step}, {screen.name} screen:"
            request = session.lettered(TASK + history, screen.elements)
            result = session.decide(request)
            show(screen, result)
            wrong += screen.elements[result.best] != screen.right
            history += f" tapped {screen.elements[result.best]}."
    print(f"{len(SCREENS) - wrong} of {len(SCREENS)} decisions right")
    return 1 if wrong else 0


def show(screen: Screen, result: DecideResult) -> None:
    print(
        f"{screen.name} screen ({result.n_tokens} tokens, {result.n_reused} of them reused, {result.prefill_s:.2f} s)"
    )
    for index, element in enumerate(screen.elements):
        mark = ">" if index == result.best else " "
        print(f"  {mark} {element:<20} {math.exp(result.choice_logp[index]):7.2%}")
    print(f"    {'outside the options':<20} {result.outside_mass:7.2%}\n")


def show_progress(done: int, total: int) -> None:
    end = "\n" if done == total else ""
    print(f"\r  {done / 1e6:6.0f} of {total / 1e6:.0f} MB", end=end, file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except FetchError as error:
        sys.exit(f"agent_demo: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
