"""Pictures of benchmarks: the data that is drawn, from made-up result files, and colours that readers tell apart."""

from __future__ import annotations

import importlib
import json
from itertools import combinations
from pathlib import Path
from types import ModuleType

import pytest

from dmattn import figures
from dmattn.execution.backend import interpreting

pytest.importorskip("matplotlib", reason="draws the pictures")
pytestmark = pytest.mark.skipif(interpreting(), reason="pictures are the same in both halves")

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
WHERE = {"device": "a GPU", "dtype": "bf16", "commit": "0123456789", "versions": {"torch": "2"}, "transformers": "5", "ranks": 4}


@pytest.fixture
def plots(monkeypatch) -> ModuleType:
    """benchmarks/plots.py, whose figures are kept in `drawn` and not written."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1]))
    module = importlib.import_module("benchmarks.plots")
    drawn: list = []
    monkeypatch.setattr(module.figures, "save", lambda figure, target: drawn.append(figure))
    module.drawn = drawn
    return module


def bars(axes) -> list[tuple[float, str]]:
    """Ends of the bars and their colours, from the top."""
    from matplotlib.colors import to_hex

    order = -1 if axes.yaxis_inverted() else 1
    found = sorted(axes.patches, key=lambda bar: -order * bar.get_y())
    return [(round(bar.get_x() + bar.get_width(), 6), to_hex(bar.get_facecolor())) for bar in found]


def texts(axes) -> list[str]:
    return [text.get_text().strip() for text in axes.texts]


def labels(axes) -> list[str]:
    return [label.get_text() for label in axes.get_yticklabels()]


def luminance(color: str) -> float:
    """Relative, as WCAG has it."""
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def seen_by(color: str, matrix: tuple[tuple[float, ...], ...]) -> list[float]:
    """Linear channels of a colour as a colour-blind reader sees it."""
    linear = [((int(color[i : i + 2], 16) / 255 + 0.055) / 1.055) ** 2.4 for i in (1, 3, 5)]
    return [min(1.0, max(0.0, sum(a * x for a, x in zip(row, linear, strict=True)))) ** (1 / 2.4) for row in matrix]


DEUTERANOPIA = ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881))  # Machado et al., 2009
PROTANOPIA = ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998))


def test_colours_are_told_apart_in_print_and_by_the_colour_blind():
    assert contrast(figures.INK, figures.BACKGROUND) > 7
    assert contrast(figures.FAINT, figures.BACKGROUND) > 4.5
    assert contrast(figures.OURS, figures.BACKGROUND) > 4.5
    for name, look in figures.LOOKS.items():
        if not name.startswith("dmattn"):
            assert look.color != figures.OURS
            assert contrast(look.color, figures.OURS) > 1.6, f"{name} in grey print"
            for matrix in (DEUTERANOPIA, PROTANOPIA):
                apart = max(abs(a - b) for a, b in zip(seen_by(look.color, matrix), seen_by(figures.OURS, matrix), strict=True))
                assert apart > 0.15, name
    peers = [figures.LOOKS[name] for name in ("flex", "sdpa_cudnn", "cudnn", "sdpa", "sdpa_flash", "eager")]
    for one, other in combinations(peers, 2):
        assert (one.color, one.hatch) != (other.color, other.hatch)
        assert one.hatch != other.hatch, "which alone is left in grey print"
        assert one.marker != other.marker


def speeds(**milliseconds: float | None) -> dict:
    return {name: {"forward": {"median_ms": x} if x else {"error": "refused"}} for name, x in milliseconds.items()}


def test_speed_draws_ours_beside_the_fastest_peer(plots):
    def workload(name: str, bias: str | None, contenders: dict) -> dict:
        return {"workload": name, "shape": "1", "bias": bias, "passes": ["forward"], "contenders": contenders}

    known = dict(workload("bias1h_d64", "1hqk", speeds(dmattn=2.0, flex=5.0, cudnn=3.0)), shape="4, 16/16, 4096 x 4096, 64")
    records = [
        workload("plain", None, speeds(dmattn=1.0, flex=300.0)),
        known,
        workload("alone", "1hqk", speeds(dmattn=1.5, flex=None)),
        workload("lost", "1hqk", speeds(dmattn=4.0, sdpa=1.0)),
    ]
    plots.speed({"environment": WHERE, "workloads": records}, Path())
    (axes,) = plots.drawn[0].axes
    ours, flex, cudnn, sdpa = (figures.LOOKS[name].color for name in ("dmattn", "flex", "cudnn", "sdpa"))
    assert bars(axes) == [(1, ours), (1.5, cudnn), (1, ours), (1, ours), (0.25, sdpa), (1, ours), (4, flex)], "biased first, the longest is cut"
    assert labels(axes)[0] == "like T5: bias (1, H, Sq, Sk), head dim 64\nbatch 4, 16 heads, 4096 x 4096", "of today's workload of the name"
    assert labels(axes)[1:] == ["alone\n1", "lost\n1", "plain\n1"]
    assert texts(axes)[:2] == ["2.000 ms", "3.000 ms, 1.50x"]
    assert "no peer runs this" in texts(axes)
    assert "300 ms, 300x" in texts(axes)
    assert [text.get_text() for text in plots.drawn[0].legends[0].get_texts()] == ["dmattn", "FlexAttention", "cuDNN's frontend", "SDPA"]


def test_matrix_draws_sorted_ratios(plots):
    def entry(work: str, ours: float, peer: float, best: str, step: str = "forward") -> dict:
        return {"work": work, "pass": step, "ours_ms": ours, "peer_ms": peer, "best_peer": best}

    rows = [
        entry("swin_49", 1.0, 2.0, "flex"),
        entry("b", 4.0, 1.0, "fa4"),
        entry("c", 1.0, 8.0, "sdpa"),
        entry("b", 1.0, 1.0, "flex", "backward"),
    ]
    rows.append({**entry("d", 1.0, 1.0, "flex"), "peer_ms": None})
    plots.matrix({"environment": WHERE, "rows": rows, "means": {"forward": {"mean": 1.587, "won": 2, "of": 3}}}, Path())
    forward, backward = plots.drawn[0].axes
    assert bars(forward) == [(8, figures.OURS), (2, figures.OURS), (0.25, figures.LOOKS["fa4"].color)]
    assert labels(forward) == ["b", "like Swin: bias (1, H, Sq, Sk), head dim 32; batch 4096, 12 heads, 49 x 49", "c"]
    assert texts(forward) == ["0.25, FlashAttention-4", "2.00, FlexAttention", "8.00, SDPA"]
    assert forward.get_title(loc="right") == "forward\ndmattn at least as fast in 2 of 3, geometric mean 1.59"
    assert bars(backward) == [(1, figures.OURS)]


@pytest.mark.parametrize("name", ["matrix_nvidia_h200", "matrix_nvidia_h100_80gb_hbm3"])
def test_no_text_of_the_matrix_lies_over_another(plots, name):
    """Of the result files whose pictures lie beside them; and none is cut off at the edge."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    plots.matrix(json.loads((RESULTS / f"{name}.json").read_text()), Path())
    (figure,) = plots.drawn
    FigureCanvasAgg(figure)
    figure.draw_without_rendering()
    ticks = [label for axes in figure.axes for label in axes.get_xticklabels()]  # some of them beyond the ends of the axis, not drawn
    found = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip() and text not in ticks]
    boxes = [(text.get_text(), text.get_window_extent()) for text in found]
    assert len(boxes) > 300
    assert not [(a, b) for (a, one), (b, other) in combinations(boxes, 2) if one.overlaps(other)]
    assert not [a for a, one in boxes if one.x0 < 0 or one.x1 > figure.bbox.x1]


def test_memory_draws_peaks_and_where_they_end(plots):
    growth = []
    for length in (1024, 2048, 4096):
        theirs = {"peak_bytes": length**2} if length < 4096 else {"error": "out of memory, in the call"}
        contenders = {"eager": {"step": theirs}, "dmattn": {"step": {"peak_bytes": length * 2**20}}, "cudnn": {"step": {"error": "refused"}}}
        growth.append({"growth": "table", "length": length, "contenders": contenders})
    plots.memory({"environment": WHERE, "growth": growth}, {"table": "a table"}, Path())
    (axes,) = plots.drawn[0].axes
    ours, eager, cross = axes.lines
    assert ours.get_xydata().tolist() == [[1024, 1], [2048, 2], [4096, 4]]
    assert (ours.get_color(), ours.get_label()) == (figures.OURS, "dmattn, as N^1.00")
    assert eager.get_label() == "eager PyTorch, as N^2.00"
    assert (cross.get_marker(), cross.get_xdata().tolist()) == ("x", [2048])
    assert axes.get_title(loc="left") == "a table"
    with pytest.raises(SystemExit, match="has none"):
        plots.memory({"environment": WHERE, "growth": []}, {}, Path())


def sweep(commit: str, **contenders: float) -> dict:
    points = []
    for length in (1024, 2048):
        steps = {
            name: {step: {"median_ms": x * length, "extra_bytes": x * length * 2**20} for step in ("forward", "backward")}
            for name, x in contenders.items()
        }
        sizes = dict(group="length", point=f"length-{length}", len_q=length, len_k=length, keep=64, heads=4, kv_heads=2, head_dim=16)
        points.append({**sizes, "contenders": steps})
    return {"environment": {**WHERE, "commit": commit}, "points": points}


def test_dynamic_mask_draws_the_peers_of_other_files_on_the_same_axes(plots):
    plots.dynamic_mask(sweep("aaaaaaaaa", dmattn=1.0), [sweep("bbbbbbbbb", dmattn=9.0, dense_flash=3.0), sweep("ccccccccc", flex=1e-9)], Path())
    time, memory, *_ = plots.drawn[0].axes
    found = {line.get_color(): line.get_ydata().tolist() for line in time.lines if len(line.get_ydata())}
    looks = figures.LOOKS
    assert found[figures.OURS] == [1024, 2048], "ours is that of the first file"
    assert found[looks["dense_flash"].color] == [3072, 6144]
    assert "FlexAttention: under 0.1 MiB" in memory.get_title(loc="left")
    names = [text.get_text() for text in plots.drawn[0].legends[0].get_texts()]
    assert names == ["dmattn, dynamic mask (aaaaaaa)", "FlexAttention, same mask (ccccccc)", "FlashAttention, all keys (bbbbbbb)"]


def test_models_are_those_of_the_last_file_that_has_them(plots):
    def made(commit: str, model: str, **speed: float | None) -> dict:
        runs = {
            name: {"training": {"loss": 1.0, "per_second": x, "peak_bytes": x * 2**30} if x else {"error": "out of memory"}}
            for name, x in speed.items()
        }
        record = {"model": model, "batch": 4, "length": 2048, "unit": "tokens", "runs": runs}
        return {"environment": {**WHERE, "commit": commit}, "models": [record]}

    other = made("bbbbbbbbb", "t5_large_2048", dmattn=100.0, eager=50.0)
    plots.models(
        made("aaaaaaaaa", "t5_large_2048", dmattn=1.0), [other, made("ccccccccc", "llama_1b_16384_checkpoints", dmattn=2.0, sdpa=None)], Path()
    )
    time, memory = plots.drawn[0].axes
    assert labels(time) == ["T5-large, 4 x 2048\n(commit bbbbbbb)", "Llama-1B, checkpointing, 4 x 2048\n(commit ccccccc)"]
    eager = figures.LOOKS["eager"].color
    assert bars(time) == [(1, figures.OURS), (2, eager), (1, figures.OURS)]
    assert bars(memory) == [(1, figures.OURS), (0.5, eager), (1, figures.OURS)]
    assert sorted(texts(time)) == ["100 tokens/s", "2 tokens/s", "50 tokens/s", "SDPA: out of memory"]


def test_context_parallelism_draws_times_and_efficiency(plots):
    fields = dict(
        length=32768, heads=32, kv_heads=8, dim=128, causal=True, bias="keys", window=None, documents=None, keep=None, strategy="ring"
    )
    times = {
        "one": {"forward": 8.0, "backward": 20.0},
        "shared": {"forward": 2.5, "backward": 8.0},
        "torch": {"forward": 4.0, "backward": 10.0},
    }
    record = {"problem": "p", **fields, "times": times, "efficiency": {"forward": 0.8, "backward": 0.625}}
    others = [{**record, "bias": "distances", "efficiency": {}}, {**record, "bias": None, "keep": 64, "strategy": "fetch", "efficiency": {}}]
    plots.context_parallel(
        {"environment": WHERE, "problems": [record, {**record, "times": {}}, {**record, "times": {"one": {"backward": 20.0}}}, *others]}, Path()
    )
    forward, backward, efficiency = plots.drawn[0].axes
    one, torchs = figures.FAINT, figures.LOOKS["torch"].color
    assert bars(forward) == 3 * [(1, one), (0.3125, figures.OURS), (0.5, torchs)]
    assert bars(backward) == 3 * [(1, one), (0.4, figures.OURS), (0.5, torchs)]
    assert texts(forward) == 3 * ["8.000 ms", "2.500 ms", "4.000 ms"]
    kinds = "causal, bias per key", "causal, table of distances", "causal, dynamic mask of 64 keys"
    assert labels(forward) == [f"{kind}\n32768 tokens, 32 heads on 8, head dim 128" for kind in kinds]
    assert [line.get_xdata()[0] for line in efficiency.lines] == [80, 62.5, 100]


def test_titles_tell_workloads_apart(plots):
    rows = importlib.import_module("benchmarks.matrix_rows").MATRIX
    workloads = importlib.import_module("benchmarks.workloads").WORKLOADS
    for each in (rows, workloads):
        assert len({(workload.title, workload.extent) for workload in each}) == len(each)
    by_name = {workload.name: workload.title for workload in (*rows, *workloads)}
    assert by_name["bias1h_d64"] == "like T5: bias (1, H, Sq, Sk), head dim 64"
    assert by_name["gpt_oss_window_sinks"] == "like GPT-OSS: sinks, causal window of 128 keys, head dim 64"
    assert by_name["mla_192_128"] == "like DeepSeek: causal, head dim 192, values of 128"
    assert by_name["plain_d128_keys_rising"] == "no bias, no mask, head dim 128, inputs: keys rising"
    assert by_name["decode_bias_b32_pad"] == "bias (1, H, Sq, Sk), padding, decoding, head dim 64"
    titles = [growth.title for growth in importlib.import_module("benchmarks.memory").GROWTHS]
    assert "dynamic mask of 1024 keys, causal, head dim 128, 16 heads" in titles
    assert "padding, head dim 128, 8 heads" in titles
