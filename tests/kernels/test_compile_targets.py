"""Every kernel compiles for each supported kind of GPU, fits its shared memory, and spills no more than is known and accepted.

In a full run (DMATTN_FULL=1) all launches, for every GPU. Else fewer. For the GPU whose shared memory is the smallest of NVIDIA's one of each
kernel, with which those of a folder have together each dtype, each flag and argument, left out and given, so padded and packed, several axes
before the heads, and each mask, window, softcap and other rule. Hopper's own kernels, which no interpreter runs, have each flag, argument
and rule of each kernel, and together each dtype, each size of a block and each head dim in as many panels. Hopper has the other kernels with what
the first GPU's have not, and else one of each kernel. For sm_100, whose tiles are those of sm_80, and AMD's GPU one of each kernel. Left to the
full run are the combinations of these, so those of a dtype, a tile or a head dim with one kernel and not another of its folder, all tiles
of kernels that are not Hopper's, and strides of 1, of 32 and of 64 bits.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from compile_report import shared_barriers

from dmattn.execution.backend import interpreting
from dmattn.kernels.hopper import copies as hopper

pytestmark = [
    pytest.mark.compile_only,
    pytest.mark.skipif(interpreting(), reason="compiles, which a process with TRITON_INTERPRET=1 cannot"),
]
TESTS = Path(__file__).parents[1]
REPORTS = """
import json, sys
from compile_report import report

for line in sys.stdin:
    print("rows", json.dumps(report(*line.split())), flush=True)
"""
# sm_80 has 166912 bytes, but its tiles are those of sm_86, sm_89 and sm_120 too.
SHARED_MEMORY = {"sm_80": 101376, "sm_90": 232448, "sm_100": 232448, "gfx942": 65536}
CHOSEN = {"sm_80": "fewer", "sm_90": "beside", "sm_100": "once", "gfx942": "once"} if not os.environ.get("DMATTN_FULL") else {}

# Bytes of spill stores a program may have. dK/dV at head dim 128 spills a little in its fastest known form.
MOST_SPILLED = 512
# Slow but exact: dK/dV at head dim 256 accumulates in half of the registers; tiles whose rows are not 16-byte aligned are loaded element by
# element; ptxas spills all of these. Float32 at head dim 256 spills in its fastest known forms.
# Rows of 49 keys are such rows too, in the forward pass. The kernels for dK and dV on Hopper spill the strides of their results, and a few
# addresses that a tile needs; the forms that spilled less were slower (docs/history.md). That for dQ and a shared dBias spills in tiles at
# a window's edge, that with the bias on chip between tiles and where it loads the bias.
SPILLED_IN = {
    "dense-bias-causal-d128": 1024,
    "documents-bias-by-head-gqa-d128": 1024,
    "documents-bias-by-head-gqa-d256": 1024,
    "documents-shared-bias-d128": 1280,
    "dropout-d512": 768,
    "dynamic-gqa-d128": 1024,
    "key-bias-gqa-causal-d128": 1280,
    "leading-in-runs-mask-d64": 768,
    "leading-rows-shared-bias-d32": 1024,
    "loaded-dense-bias-causal-d256": 1024,
    "loaded-mask-dense-bias-fp32-d128": 1536,
    "loaded-rows-shared-bias-d32": 1024,
    "loaded-shared-bias-d128": 1280,
    "loaded-shared-bias-fp32-softcap-window-d256": 1280,
    "mask-shared-bias-d192": 768,
    "mask-softcap-d128": 1280,
    "packed-mask-key-bias-d256": 768,
    "packed-mask-key-bias-window-d128": 768,
    "prepared-mask-shared-bias-softcap-d64": 768,
    "packed-shared-bias-d64": 1024,
    "packed-shared-bias-mask-gqa-d128": 768,
    "leading-shared-bias-of-eight-mask-d128": 1024,
    "rows-shared-bias-d32": 1024,
    "shared-bias-of-eight-window-d64": 1280,
    "shared-bias-of-four-d128": 1024,
    "shared-bias-of-four-window-d64": 1024,
    "shared-bias-of-many-d128": 1024,
    "windows-of-49-mask-d32": 2048,
    "dense-bias-d256": 1024,
    "decoding-fp32-d256": 768,
    "odd-lengths-d20": 1024,
}
SPILLED_ON = {("sm_80", "fp32-d256"): 768, ("sm_90", "fp32-d256"): 2816}


@pytest.mark.parametrize(
    ("store", "shared"),
    [
        ("", 0),
        ("st.shared.b32 [%r2+16], %r9;", 0),
        ("st.shared.b32 [%r2+8], %r9;", 1),
        ("st.shared.b32 [ %r2 + 12 ], %r9;", 1),
        ("st.shared.v4.f32 [global_smem+64], {%f1, %f2, %f3, %f4};", 2),
        ("mbarrier.init.shared::cta.b64 [%r1 + 72], 1;", 1),
        ("mbarrier.init.shared::cta.b64 [%r7], 1;", 1),
    ],
    ids=["no-store", "beside", "over-one", "spaces", "over-both", "made-twice", "somewhere"],
)
def test_barriers_whose_memory_has_another_use_are_counted(store: str, shared: int) -> None:
    made = "\n".join(f"mbarrier.init.shared::cta.b64 [%r{number}], 1;" for number in (2, 3))
    code = f"mov.b32 %r1, global_smem;\nadd.s32 %r2, %r1, 64;\nadd.s32 %r3, %r2, 8;\n{made}\n{store}"
    assert shared_barriers(code) == shared


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], list[dict[str, Any]]]]:
    """The report for a target, of one process for all of them: each would import torch for seconds, and note the launches of others again."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    errors = tmp_path_factory.mktemp("report") / "stderr"
    with errors.open("w") as stream:
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stream)
        with subprocess.Popen([sys.executable, "-c", REPORTS], env=environment, text=True, **pipes) as process:

            def of(target: str) -> list[dict[str, Any]]:
                print(target, CHOSEN.get(target, "all"), file=process.stdin, flush=True)
                found = next((line for line in process.stdout if line.startswith("rows ")), None)
                assert found is not None, errors.read_text()[-3000:]
                rows = json.loads(found.removeprefix("rows "))
                ended = [f"{row['case']}: {row['kernel']} ended with status {row['ended']}" for row in rows if "ended" in row]
                assert not ended, "\n".join([*ended, errors.read_text()[-3000:]])
                return rows

            yield of
            process.stdin.close()


@pytest.mark.timeout(3600)  # minutes of compiling, many where other processes keep the processor busy
@pytest.mark.parametrize("target", SHARED_MEMORY)
def test_kernels_compile_without_excess(target: str, report: Callable[[str], list[dict[str, Any]]]) -> None:
    rows = report(target)
    kernels = {row["kernel"] for row in rows}
    expected = {"_forward_kernel", "_terms_kernel", "_key_gradients_kernel", "_query_gradients_kernel", "_shared_gradient_kernel"}
    expected |= {"_one_tile_forward_kernel", "_one_tile_gradients_kernel", "_sum_parts_kernel"}
    expected |= {"_summary_kernel", "_sort_kernel", "_merge_kernel", "_count_kernel", "_accumulate_kernel", "_deaths_kernel"}
    expected |= {"_numbers_kernel", "_digits_kernel", "_best_kernel", "_reorder_kernel"}
    expected |= {"_split_kernel", "_merge_splits_kernel", "_sink_gradients_kernel", "_join_kernel"}
    expected |= {"_largest_factors_kernel", "_join_factors_kernel", "_factor_gradients_kernel"}
    expected |= {"_bands_kernel", "_table_kernel", "_packed_blocks_kernel"}
    expected |= {"_row_gradients_kernel"} if target == "sm_90" else set()  # the only target with a tile for it
    if target == "sm_90" and hopper.GLUON:
        expected |= {"_resident_query_gradients_kernel", "_resident_key_gradients_kernel"}
        expected |= {"_copy_pairs_kernel", "_spread_kernel", "_one_pass_kernel", "_add_parts_kernel"}
    expected |= {"_count_epochs_kernel", "_order_kernel", "_scan_kernel", "_mask_lists_kernel"}
    assert kernels == expected | {"_interval_lists_kernel", "_query_interval_lists_kernel"}
    modules = {row["module"] for row in rows if ".hopper." in row["module"]}
    for_hopper = {"forward", "key_grad", "key_grad_intervals", "query_grad", "bias_grad", "shared_query_grad", "one_pass"}
    for_hopper |= {"aligned", "distances", "rest_of_tiles", "resident.query_grad", "resident.key_grad"}
    expected = {f"dmattn.kernels.hopper.{name}" for name in for_hopper}
    assert modules == (expected if target == "sm_90" and hopper.GLUON else set())
    for row in rows:
        assert row["shared"] <= SHARED_MEMORY[target], row
        assert row["spilled"] <= (SPILLED_ON.get((target, row["case"])) or SPILLED_IN.get(row["case"], MOST_SPILLED)), row
        assert row["atomics"] == row["uneven"] == row["early"] == 0, row
        if row["module"] in modules:  # elsewhere barriers are Triton's own, which end before their memory has another use
            assert row["shared_barriers"] == 0, row
    # Beside a bias, sums and a dBias may be stored by single numbers. Else that is a tile of which the compiler lost that columns are
    # neighbours; dK and dV in parts are float32.
    plain = [row for row in rows if row["module"] in modules and not re.search("bias|mask|sinks|distances|dynamic", row["case"])]
    assert all(row["halves"] == 0 for row in plain), plain
    assert all(row["words"] == 0 for row in plain if re.search("key_grad|one_pass", row["module"])), plain
