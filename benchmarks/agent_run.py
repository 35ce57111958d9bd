"""Four decisions of an agent that turns on Wi-Fi: what each reused, computed and took.

Run it with `python benchmarks/agent_run.py [MODEL]`; without MODEL the default model is used, and fetched on first use.
The second decision restores what the first stored, the third restores it, extends it and stores the longer prefix, and
the fourth is the third again, computed whole.
"""

import math
import sys
from dataclasses import dataclass

from bmoe import Session

TASK = "How do I turn on Wi-Fi on this phone? Tell me what to tap next."
GROWN = TASK + " So far: on the home screen tapped Settings; on the settings screen tapped Network & internet."


@dataclass(frozen=True)
class Step:
    name: str
    prefix: str
    elements: tuple[str, ...]
    reuse_prefix: bool = True


STEPS = (
    Step("home screen", TASK, ("Camera", "Settings", "Phone", "Messages")),
    Step("settings, same prefix", TASK, ("Display", "Network & internet", "Battery", "Sound")),
    Step("network, grown prefix", GROWN, ("Airplane mode", "Bluetooth", "Wi-Fi", "Hotspot")),
    Step("the same, computed whole", GROWN, ("Airplane mode", "Bluetooth", "Wi-Fi", "Hotspot"), reuse_prefix=False),
)


def main() -> None:
    print("| decision | answer | p | reused / prefilled | restore ms | store ms | prefill s | kept MiB |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    with Session.open(sys.argv[1] if len(sys.argv) > 1 else None) as session:
        for step in STEPS:
            request = session.lettered(step.prefix, step.elements, reuse_prefix=step.reuse_prefix)
            result = session.decide(request)
            print(
                f"| {step.name} | {step.elements[result.best]} | {math.exp(max(result.choice_logp)):.3f} "
                f"| {result.n_reused} / {result.n_prefilled} | {1e3 * result.restore_s:.2f} "
                f"| {1e3 * result.store_s:.2f} | {result.prefill_s:.2f} | {result.prefix_state_mib:.2f} |"
            )


if __name__ == "__main__":
    main()
