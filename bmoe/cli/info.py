"""bmoe info"""

from dataclasses import asdict
from typing import Annotated, Any

import typer

from bmoe.cli import experts
from bmoe.cli.experts import ExpertFlags, MoeStreamFlag
from bmoe.cli.opening import model_path
from bmoe.cli.render import facts
from bmoe.cli.shell import Shell

THINK_CTL = {
    "none": "no reasoning",
    "switch": "reasoning can be switched off, and is for decisions",
    "closed": "opens reasoning; closed before a decision is read",
    "free": "may reason of its own accord; a decision reads the first token all the same",
    "forced": "forces reasoning and cannot be closed: decisions with the template are refused",
}


def info(
    ctx: typer.Context,
    model: Annotated[str | None, typer.Argument(help="A GGUF file or a name; see bmoe models list.")] = None,
    moe_stream: MoeStreamFlag = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """What the engine sees of a model, experts included.

    No weight is read, but for --moe-stream, which opens the model as other commands do with it.
    """
    shell: Shell = ctx.obj
    path = model_path(shell, model)
    flags = ExpertFlags(moe_stream=moe_stream)
    with shell.inspect(path, inspect=not moe_stream, streaming=flags.streaming) as engine:
        seen = engine.info
    if as_json:
        shell.emit({"path": str(path), **asdict(seen)})
    else:
        streamed = {"streaming": experts.described(seen, flags)} if seen.is_streamed else {}
        shell.out.print(facts({"file": path, **described(seen), **streamed}))


def described(seen: Any) -> dict[str, Any]:
    """The engine's facts in words."""
    kind = "recurrent" if seen.is_recurrent else "hybrid recurrent" if seen.is_hybrid else "attention"
    window = f", sliding window of {seen.n_swa} tokens" if seen.n_swa else ""
    return {
        "name": seen.name or "(none in the file)",
        "architecture": f"{seen.arch}, {seen.n_layer} layers, embedding {seen.n_embd}",
        "memory": kind + window,
        "weights": f"{seen.quantization}, {seen.n_params / 1e9:.2f} B parameters, {seen.weights_bytes / 1e9:.2f} GB"
        + (f" in {seen.n_shards} files" if seen.n_shards > 1 else ""),
        "experts": _experts(seen),
        "vocabulary": f"{seen.n_vocab} tokens, " + ("begins with BOS" if seen.adds_bos else "adds no BOS"),
        "context": f"trained on {seen.n_ctx_train} tokens",
        "chat template": THINK_CTL[seen.think_ctl]
        if seen.has_template
        else "none: use --no-template or --template FILE",
        **({"threads": seen.n_threads} if seen.n_threads else {}),
    }


def _experts(seen: Any) -> str:
    if not seen.n_expert:
        return "none: a dense model"
    return (
        f"{seen.n_expert} in each of {seen.n_moe_layer} layers, {seen.n_expert_used} used per token, "
        f"{seen.experts_bytes / 1e9:.2f} GB together, which --moe-stream leaves in the file"
    )
