"""Every type of Transformers' MODEL_MAPPING with dmattn, against its own eager attention.

    python tests/integrations/sweep.py [--types bert t5] [--shard 0/4] [--json results.json]

Everything runs in float64, both eager attention and dmattn's PyTorch path, and RoundingNothing keeps models from rounding to float32 in
between. So the two agree to TOLERANCE = 1e-8 or differ: there is no allowance in which a small mistake could hide, and no choice of experts
or keys that a rounding turns.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import re
import signal
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from sweep_compare import TOLERANCE, Pass, Unusable, compare, largest, off, tensors
from sweep_inputs import Inputs
from sweep_listed import NOT_RUN, expected
from sweep_models import WIDTH, build, few_layers, tiny, types
from torch import nn
from torch.overrides import TorchFunctionMode

from dmattn.integrations import transformers as integration

SECONDS = 60
LOWER = {torch.float32: torch.float64, torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.complex64: torch.complex128}
CASTS = (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16)


class RoundingNothing(TorchFunctionMode):
    """What asks for a lower floating-point dtype gets float64."""

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if function in CASTS:
            return args[0].double()
        args = tuple(LOWER.get(each, each) if isinstance(each, torch.dtype) else each for each in args)
        if isinstance(kwargs.get("dtype"), torch.dtype):
            kwargs = kwargs | dict(dtype=LOWER.get(kwargs["dtype"], kwargs["dtype"]))
        return function(*args, **kwargs)


class TooLong(BaseException):
    """No except clause for errors of models stops it."""


@contextmanager
def in_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with RoundingNothing(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TooLong(f"longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def counted(model: nn.Module) -> Iterator[tuple[set, set]]:
    """Attention layers that run, and those that dmattn serves."""

    ran: set[nn.Module] = set()
    served: set[Any] = set()
    modules = [each for each in model.modules() if "Attention" in type(each).__name__]
    leaves = [each for each in modules if not any("Attention" in type(inner).__name__ for inner in each.modules() if inner is not each)]
    handles = [each.register_forward_pre_hook(lambda module, _: ran.add(module)) for each in leaves]
    attend = integration.attention.attention

    def spy(query: Any, *args: Any, **kwargs: Any) -> Any:
        served.add(len(served))
        return attend(query, *args, **kwargs)

    integration.attention.attention = spy
    try:
        yield ran, served
    finally:
        integration.attention.attention = attend
        for handle in handles:
            handle.remove()


def paddings(model: nn.Module, given: dict[str, Any]) -> tuple[str, ...]:
    names = inspect.signature(model.forward).parameters
    if "attention_mask" not in names:
        return ("none",)
    if "input_ids" in given:
        return ("none", "right", "left")
    return ("none", "right") if "input_features" in given or "input_values" in given else ("none",)


MEDIA = ("pixel_values", "input_features", "input_values", "pixel_values_videos")


def ways(model: nn.Module) -> Iterator[list[str]]:
    """Which parameters of the forward method are given together: the first that eager attention runs on is taken."""
    names = inspect.signature(model.forward).parameters
    known = [name for name in names if hasattr(Inputs, name)]
    required = [n for n, p in names.items() if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    main = model.main_input_name
    main = [main] if isinstance(main, str) else list(main)
    yield known
    for keep in MEDIA:
        yield [name for name in known if name not in MEDIA or name == keep]
    yield [name for name in known if name in ("input_ids", "attention_mask", "decoder_input_ids", "bbox") or name in required]
    yield [name for name in known if name in (*main, *required, "attention_mask", "decoder_input_ids")]
    yield [name for name in known if name in (*main, *required)]


def try_ways(kind: str, model: nn.Module) -> tuple[list[str], dict[str, int], dict[str, Any]]:
    """Names of the inputs, and what else Inputs is to know: how many image tokens they need and the shape of sound."""
    first: Exception | None = None
    seen = []
    for names in ways(model):
        if names in seen:
            continue
        seen.append(names)
        media = any(name in names for name in MEDIA)
        for variant in range(4 if media else 1):
            options = dict(variant=variant, image_tokens=0)
            for _ in range(2):
                try:
                    given = Inputs(kind, model, "none", **options).make(names)
                    torch.manual_seed(0)
                    result = model(**given)
                    if not any(True for _ in tensors(result)):
                        raise Unusable("no floating-point output")
                    return names, options, given
                except Exception as error:
                    first = error if first is None or options["image_tokens"] else first
                    found = re.search(r"features:? (\d+)", str(error)) or re.search(r"features\D*(\d+)", str(error))
                    if found is None or not media or options["image_tokens"] or "input_ids" not in names or int(found.group(1)) < 2:
                        break
                    count = int(found.group(1)) // 2
                    options["image_tokens"] = count // WIDTH if count > 600 else count  # some count numbers instead of features
    assert first is not None
    raise first


def usable(kind: str) -> tuple[nn.Module, list[str], dict[str, int], dict[str, Any], str]:
    errors = []
    for plan, make in (("tiny", tiny), ("few layers", few_layers)):
        try:
            model = build(kind, make(kind))
            return model, *try_ways(kind, model), plan
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            errors.append(f"{plan}: {type(error).__name__}: {str(error).strip()[:300]} ({Path(last.filename).name}:{last.lineno})")
    raise Unusable(" | ".join(errors))


def sweep(kind: str) -> dict[str, Any]:
    """The verdict on one type."""
    began = time.time()
    result: dict[str, Any] = dict(type=kind)
    try:
        if kind in NOT_RUN:
            raise Unusable("not run")
        with limited(SECONDS), in_float64():
            result |= _sweep(kind)
    except Unusable as error:
        package = re.search(r"requires the (\S+) library|No module named '(\w+)'", str(error))
        result |= dict(verdict="needs a package" if package else "UNUSABLE", detail=(package[1] or package[2]) if package else str(error))
    except TooLong as error:
        result |= dict(verdict="UNUSABLE", detail=str(error))
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        result |= dict(verdict="ERROR", detail=f"{type(error).__name__}: {str(error)[:400]} ({Path(last.filename).name}:{last.lineno})")
    return result | dict(seconds=round(time.time() - began, 1))


def _sweep(kind: str) -> dict[str, Any]:
    model, names, options, given, plan = usable(kind)
    made: dict[str, dict[str, Any]] = {}
    eager: dict[str, Pass] = {}
    lengths: dict[str, int] = {}
    notes = [] if plan == "tiny" else [plan]
    causal = None
    with counted(model) as (ran, _):
        for padding in paddings(model, given):
            if padding == "left" and causal != 0.0 and not options["image_tokens"]:  # only decoders are called so
                continue
            inputs = Inputs(kind, model, padding, **options)
            made[padding] = inputs.make(names)
            lengths[padding] = inputs.length if "input_ids" in given else 0
            try:
                found = Pass(model, made[padding], padding, lengths[padding])
                if padding == "none" and "input_ids" in given and not options["image_tokens"]:
                    causal = _future(kind, model, names, found, lengths["none"])
                if not all(x.isfinite().all() for x in (*found.outputs.values(), *found.gradients.values())):
                    notes.append(f"eager gives what is not finite with {padding} padding")
                    if padding != "none":
                        continue
                    if any(x.isnan().any() for x in found.outputs.values()):
                        raise Unusable("NaN")
                eager[padding] = found
            except Exception as error:
                if padding == "none":
                    refusal = _refusal(model)
                    if refusal is not None:
                        return dict(verdict="refused", detail=refusal, notes=[f"eager: {str(error)[:80]}"])
                    raise Unusable(f"eager: {type(error).__name__}: {str(error)[:300]}") from error
                notes.append(f"eager fails with {padding} padding: {str(error)[:80]}")
    attentions = {type(each).__name__ for each in ran}
    idle = {type(each).__name__ for each in model.modules() if "Attention" in type(each).__name__} - attentions
    idle = {
        name
        for name in idle
        if not any("Attention" in type(i).__name__ for e in model.modules() if type(e).__name__ == name for i in e.modules() if i is not e)
    }
    coverage = integration.report(model)
    common = dict(inputs=list(given), ran=sorted(attentions), report=[tuple(each) for each in coverage], notes=notes)
    if idle:
        common["idle"] = sorted(idle)
    refusal = _refusal(model)
    patchable = any(each.state == "patchable" for each in coverage)
    if patchable:
        integration.patch(model)
    if refusal is not None and not patchable:
        if type(model).__name__ not in refusal:
            return common | dict(verdict="ERROR", detail=f"refused without its name: {refusal}")
        return common | dict(verdict="refused", detail=refusal)
    worst = (0.0, "", "")
    with counted(model) as (_, served):
        for padding, want in eager.items():
            got = Pass(model, made[padding], padding, lengths[padding])
            error, place = compare(got, want)
            worst = max(worst, (error, place, padding))
        moved = _future(kind, model, names, Pass(model, made["none"], "none", 0), lengths["none"]) if causal == 0.0 else None
    detail = f"{worst[0]:.1e} at {worst[1]}, padding {worst[2]}"
    common |= dict(worst=worst[0], place=worst[1], padding=worst[2], calls=len(served), detail=detail)
    if moved:
        return common | dict(verdict="DIFFERENT", detail=f"sees the future ({moved:.1e}); {detail}")
    if worst[0] > TOLERANCE:
        return common | dict(verdict="DIFFERENT", detail=f"{detail}{_beside_sdpa(model, made[worst[2]], worst[2], lengths[worst[2]])}")
    if not served:
        return common | dict(verdict="NOT SERVED" if attentions else "no attention", detail=f"{sorted(attentions)}; {detail}")
    return common | dict(verdict="equal")


def _refusal(model: nn.Module) -> str | None:
    try:
        integration.enable(model)
    except ValueError as error:
        return str(error)
    return None


def _beside_sdpa(model: nn.Module, given: dict[str, Any], padding: str, length: int) -> str:
    """Whether Transformers' own SDPA differs from eager attention as dmattn does."""
    ours = Pass(model, given, padding, length)
    try:
        integration.disable(model)
        model.set_attn_implementation("sdpa")
        error, _ = compare(ours, Pass(model, given, padding, length))
    except Exception as error:
        return f"; sdpa: {type(error).__name__}: {str(error)[:60]}"
    return f"; beside sdpa {error:.1e}"


def _future(kind: str, model: nn.Module, names: list[str], base: Pass, length: int) -> float | None:
    """How far positions of the first half move when tokens of the second half change; None where that cannot be told."""
    try:
        changed = Pass(model, Inputs(kind, model, "none", change=True).make(names), "none", length)
    except Exception:
        return None
    most = None
    for name, x in base.outputs.items():
        y = changed.outputs.get(name)
        if y is None or y.shape != x.shape or x.numel() % (2 * length):
            continue
        before, after = (each.view(2, length, -1)[:, : length // 2] for each in (x, y))
        error = off(after, before) / max(largest(x), 1e-300)
        most = max(most or 0.0, 0.0 if error < TOLERANCE else error)
    return most


ORDER = ("DIFFERENT", "NOT SERVED", "ERROR", "UNUSABLE", "needs a package", "no attention", "refused", "equal")


def table(results: list[dict[str, Any]]) -> str:
    lines = [f"Transformers {transformers.__version__}, {len(results)} types"]
    lines += [f"  {verdict}: {sum(each['verdict'] == verdict for each in results)}" for verdict in ORDER]
    for verdict in ORDER:
        lines += ["", f"== {verdict}"]
        for each in results:
            if each["verdict"] == verdict:
                more = "".join(f" | {key} {each[key]}" for key in ("notes", "idle") if each.get(key))
                lines.append(f"{each['type']}: {each['detail']}{more}")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--types", nargs="*")
    parser.add_argument("--shard", default="0/1")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    shard, shards = map(int, options.shard.split("/"))
    results: list[dict[str, Any]] = json.loads(options.json.read_text()) if options.resume and options.json.exists() else []
    done = {each["type"] for each in results}
    for kind in (options.types or types())[shard::shards]:
        if kind in done:
            continue
        results.append(sweep(kind))
        gc.collect()  # the model
        print(f"{results[-1]['seconds']:5.1f} {kind}: {results[-1]['verdict']}: {results[-1].get('detail')}", flush=True)
        if options.json:
            options.json.write_text(json.dumps(results, indent=1))
            options.json.with_suffix(".txt").write_text(table(results))
    print(table(results).split("==")[0])
    for each in results:
        wanted = expected(each["type"])
        if each["verdict"] not in (wanted, "needs a package") and not (wanted is None and each["verdict"] in ("equal", "refused")):
            print(f"sweep_listed.py: {each['type']}: listed as {wanted}, is {each['verdict']}")


if __name__ == "__main__":
    main()
